"""Several complete backends of one model behind one door: each request goes to the replica that suits it best.

A replica that is lost gets no new requests while another one is there, and what it fails before the first text of an
answer begins again elsewhere. So its conversations move, at the price of computing their prompts once more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Final

from orchestrator.dispatch.exchange import DispatchStatistics
from orchestrator.errors import BusyError, FleetError, InputError, LinkcppError
from orchestrator.gateway.gateway import DEFAULT_TERMS, Gateway
from orchestrator.gateway.generation import Generation
from orchestrator.gateway.prefix import reusable_prefix
from orchestrator.gateway.routing import Candidate, affinity_key, choose
from orchestrator.gateway.scheduler import Terms
from orchestrator.gateway.sequence import Event, Failed, GenerationRequest
from orchestrator.gateway.state import GatewayState, SlotState

_SUMMED: Final = tuple(
    field.name for field in fields(GatewayState) if field.name not in ("running", "problem", "slots")
)


class _Moving(Generation):
    """A generation that begins again elsewhere, once, if its replica is lost before the first text."""

    def __init__(self, request: GenerationRequest, submitted: float, move: Callable[[_Moving, Failed], None]) -> None:
        super().__init__(request, submitted)
        self._move: Callable[[_Moving, Failed], None] | None = move

    def deliver(self, event: Event) -> None:
        """Hand an event to the reader, unless the request moves."""
        move, self._move = self._move, None
        if move is None or not isinstance(event, Failed) or not isinstance(event.error, FleetError) or self.cancelled:
            super().deliver(event)
            return
        # In a thread of its own: the caller may hold the lock of a gateway, and the other one's is needed now.
        threading.Thread(target=move, args=(self, event), name="move", daemon=True).start()


class Replicas:
    """Gateways by name that together answer as one; use it like a :class:`Gateway`.

    ``usable`` tells by name whether a replica can answer now; one that is not named always can. The names decide
    where a conversation goes, so other gateways in front of the same replicas should give them the same ones.
    """

    def __init__(
        self,
        gateways: Mapping[str, Gateway],
        usable: Mapping[str, Callable[[], bool]] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not gateways:
            raise InputError("there must be at least one replica")
        self.gateways = dict(gateways)
        self.n_ctx = min(gateway.n_ctx for gateway in gateways.values())
        self.n_vocab = min(gateway.n_vocab for gateway in gateways.values())
        self._usable = usable or {}
        self._now = now

    def submit(self, request: GenerationRequest, terms: Terms = DEFAULT_TERMS) -> Generation:
        """Queue a request with the replica that suits it best; see :meth:`Gateway.submit` for the errors."""
        candidates = [self._candidate(name, request) for name in self.gateways]
        first = candidates[choose(affinity_key(request.prompt, terms.session), candidates)].name

        def move(generation: _Moving, end: Failed) -> None:
            others = [name for name in self.gateways if name != first and self._is_usable(name)]
            try:
                if not others:
                    raise end.error
                self._submit(others, terms, generation)
            except LinkcppError:
                generation.deliver(end)

        generation = _Moving(request, self._now(), move)
        # Should its queue be full, anybody's will do.
        self._submit([first, *(name for name in self.gateways if name != first)], terms, generation)
        return generation

    def _submit(self, names: Sequence[str], terms: Terms, generation: Generation) -> None:
        """Queue a request with the first of these replicas whose queue has room."""
        busy: BusyError | None = None
        for name in names:
            try:
                self.gateways[name].submit(generation.request, terms, generation)
                return
            except BusyError as error:
                busy = error if busy is None or error.retry_after < busy.retry_after else busy
        raise busy or InputError("no replica takes requests")

    def state(self) -> GatewayState:
        """Return what all replicas do together; slots are numbered through."""
        states = [gateway.state() for gateway in self.gateways.values()]
        slots = [slot for state in states for slot in state.slots]
        sums = {name: sum(getattr(state, name) for state in states) for name in _SUMMED}
        return GatewayState(
            running=next((state.running for state in states if state.running is not None), None),
            problem=next((state.problem for state in states if state.problem), ""),
            slots=tuple(SlotState(index, slot.held_tokens, slot.request) for index, slot in enumerate(slots)),
            **sums,
        )

    def is_usable(self) -> bool:
        """Tell whether one replica at least can answer now."""
        return any(map(self._is_usable, self.gateways))

    def start(self) -> None:
        """Start the loops of all replicas."""
        for gateway in self.gateways.values():
            gateway.start()

    def close(self, timeout: float = 10.0) -> bool:
        """End all; return False if a step outlasts ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        stopped = [gateway.close(max(0.0, deadline - time.monotonic())) for gateway in self.gateways.values()]
        return all(stopped)

    def __enter__(self) -> Replicas:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_usable(self, name: str) -> bool:
        usable = self._usable.get(name)
        return usable is None or usable()

    def _candidate(self, name: str, request: GenerationRequest) -> Candidate:
        gateway = self.gateways[name]
        requests, slots = gateway.load()
        prompt = list(request.prompt)
        cuttable = gateway.cuttable
        held = max(reusable_prefix(tokens, prompt, cuttable=cuttable) for tokens in gateway.holdings())
        return Candidate(name, requests, slots, held, self._is_usable(name))


def merged_statistics(replicas: Sequence[DispatchStatistics]) -> DispatchStatistics:
    """Return the counters of all replicas as those of one; the number of its replica begins each worker's name."""
    return DispatchStatistics(
        workers=tuple(
            replace(worker, name=f"{number}/{worker.name}")
            for number, one in enumerate(replicas, 1)
            for worker in one.workers
        ),
        steps=sum(one.steps for one in replicas),
        round_trips=sum(one.round_trips for one in replicas),
        samples=tuple(sample for one in replicas for sample in one.samples),
    )
