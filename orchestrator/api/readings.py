"""What a gateway and its workers count, as readings for the metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.gateway.state import GatewayState
from orchestrator.status.metrics import Reading
from orchestrator.status.snapshot import FleetSnapshot, WorkerState


def readings(state: GatewayState, fleet: FleetSnapshot) -> Iterator[Reading]:
    """Yield the values of this moment."""
    yield Reading("prompt_tokens_computed", "Tokens of prompts that were computed.", state.prompt_tokens)
    yield Reading("prompt_tokens_cached", "Tokens of prompts that the caches held.", state.cached_tokens)
    yield Reading("generated_tokens", "Tokens of answers.", state.generated_tokens)
    yield Reading("drafted_tokens", "Tokens that were guessed and computed.", state.drafted)
    yield Reading("accepted_tokens", "Guessed tokens that came true.", state.accepted)
    if state.turns:
        mean = state.generated_tokens / state.turns
        yield Reading("tokens_per_step", "Tokens that an answer got of a step.", mean, is_total=False)
    for name, count in (("finished", state.finished), ("failed", state.failed), ("cancelled", state.cancelled)):
        yield Reading("requests", "Requests that have ended.", count, labels=(("end", name),))
    yield Reading("steps", "Steps of the engine.", state.steps)
    yield Reading("waiting_requests", "Requests in the queue.", state.waiting, is_total=False)
    busy = sum(slot.request is not None for slot in state.slots)
    yield Reading("slots", "Sequences that can be answered at a time.", len(state.slots), is_total=False)
    yield Reading("busy_slots", "Sequences that are being answered.", busy, is_total=False)
    held = sum(slot.held_tokens for slot in state.slots)
    yield Reading("held_tokens", "Tokens in the caches of all slots.", held, is_total=False)
    yield Reading("saved_bytes", "Memory of beginnings kept outside the slots.", state.saved_bytes, is_total=False)
    if state.steps:
        mean = state.sequences / state.steps
        yield Reading("mean_batch_size", "Requests in the mean step since the start.", mean, is_total=False)
    yield Reading("round_trips", "Calls of MoE layers that were answered by workers.", fleet.round_trips)
    tokens = state.prompt_tokens + state.generated_tokens
    if tokens and fleet.workers:
        trips = fleet.round_trips / tokens
        yield Reading("round_trips_per_token", "Round trips to workers for each token.", trips, is_total=False)
        layers = len({layer for worker in fleet.workers for layer in worker.layers}) or 1
        sent = sum(worker.bytes_in + worker.bytes_out for worker in fleet.workers) / tokens / layers
        yield Reading("bytes_per_token_and_layer", "Bytes to and from workers.", sent, is_total=False)
    for worker in fleet.workers:
        label = (("worker", worker.name or worker.address),)
        up = worker.state is WorkerState.UP
        yield Reading("worker_up", "Whether a worker can be used.", up, is_total=False, labels=label)
        yield Reading("worker_rows", "Rows sent to a worker.", worker.rows, labels=label)
        yield Reading("worker_errors", "Requests that a worker failed.", worker.errors, labels=label)
        yield Reading("worker_late_frames", "Answers that came too late.", worker.late_frames, labels=label)
        for direction, count in (("in", worker.bytes_in), ("out", worker.bytes_out)):
            labels = (*label, ("direction", direction))
            yield Reading("worker_bytes", "Bytes from (in) and to (out) a worker.", count, labels=labels)
        if worker.rtt_ms is not None:
            rtt = worker.rtt_ms / 1000
            yield Reading("worker_round_trip_seconds", "Median of the last pings.", rtt, is_total=False, labels=label)
