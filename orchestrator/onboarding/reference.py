"""What the model answers in one process: the oracle, its batch invariance, and the stock engine's noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import InputError
from orchestrator.onboarding.findings import BatchInvariance
from orchestrator.onboarding.meter import Meter, work
from orchestrator.onboarding.options import GateOptions
from orchestrator.onboarding.prompts import MICRO_BATCH, Prompt, build_prompts, has_tokenizer, random_tokens
from orchestrator.onboarding.side_by_side import try_side_by_side
from orchestrator.onboarding.trace import Trace, compare_micro_batches, follow, replay, run_prompts
from orchestrator.onboarding.whole_text import decoder_of
from orchestrator.verification.gate import Comparison, batch_invariant

FLOOR_MICRO_BATCHES = (512, 1)
"""The stock engine's default micro-batch, and single steps: the two ends of what its users choose."""

INVARIANCE_TOKENS = 130  # two full micro-batches of 63 and a rest
INVARIANCE_SIZES = (2, 5, 33, 63)

SIDE_BY_SIDE = (0.5, 0.2, 0.1, 0.1, 0.1)
"""Lengths of the texts that share micro-batches, as parts of the tokens above: one more than there are slots."""

_LONGEST_PROMPT = 4096  # where the model does not say how much context it was made for


@dataclass(frozen=True, slots=True, eq=False)
class Oracle:
    """The answers that everything else is compared with."""

    prompts: tuple[Prompt, ...]
    traces: list[Trace] = field(repr=False)
    invariance: BatchInvariance
    n_ctx: int  # tokens of context that all runs need
    n_ubatch: int  # tokens of a micro-batch of all runs


def run_oracle(path: Path, options: GateOptions, meter: Meter) -> Oracle:
    """Run the prompts on the whole file with the hook off, in the batch-invariant configuration.

    Raises :class:`InputError` for a model whose own logits are not finite: equal bytes would then prove nothing.
    """
    meter.say("loading the model")
    with Model.open(path) as model:
        longest = max(model.n_ctx_train - options.steps, 1) if model.n_ctx_train > 0 else _LONGEST_PROMPT
        tokenize = model.tokenize if has_tokenizer(model.metadata) else None
        prompts = build_prompts(tokenize, model.n_vocab, longest=longest, names=options.prompts)
        # a model that reads the whole text at once has no pieces to take it in
        count = min(INVARIANCE_TOKENS, longest) if options.invariance and not model.reads_whole_text else 0
        n_ctx = max(count, *(len(prompt.tokens) + options.steps for prompt in prompts))
        meter.expect(whole_work(prompts, count, options))
        # A star keeps a backup sequence of recurrent state, and its micro-batch is a multiple of two sequences.
        # The oracle takes the same size, and so do the stages of a ring: an architecture whose answer depends on the
        # partition is still comparable.
        size = MICRO_BATCH // 2 * 2 if model.is_hybrid else MICRO_BATCH
        with Session(model, n_ctx=n_ctx, n_ubatch=size, n_threads=options.threads) as session:
            traces = run_prompts(decoder_of(session), prompts, options.steps, meter.phase("one process", MICRO_BATCH))
            _require_comparable(path, traces)
            invariance = _invariance(session, random_tokens(model.n_vocab, count, seed=1), meter)
        if count:
            invariance = replace(invariance, several=_side_by_side(model, count, options.threads, meter))
    return Oracle(prompts, traces, invariance, n_ctx, size)


def run_floor(path: Path, oracle: Oracle, threads: int, meter: Meter, *, repack: bool) -> Comparison:
    """Compare the stock configuration at one micro-batch size with itself at another, on the oracle's tokens.

    Why not the batch-invariant configuration: there the answer does not depend on the micro-batch, so its floor is
    zero by construction and says nothing about what users of the stock engine accept.
    """
    larger, smaller = FLOOR_MICRO_BATCHES
    meter.say("loading the model as the stock engine does")
    with Model.open(path, repack=repack) as model:
        with _stock(model, oracle.n_ctx, smaller, threads) as session:
            advance = meter.phase(f"noise floor, micro-batch {smaller}", smaller)
            reference = follow(decoder_of(session), oracle.traces, advance)
        with _stock(model, oracle.n_ctx, larger, threads) as session:
            advance = meter.phase(f"noise floor, micro-batch {larger}", larger)
            return replay(decoder_of(session), reference, advance).comparison


def whole_work(prompts: tuple[Prompt, ...], invariance_tokens: int, options: GateOptions) -> float:
    """Count the work of all phases, in the meter's unit."""

    def once(micro_batch: int) -> float:
        steps = len(prompts) * options.steps
        return work([len(prompt.tokens) for prompt in prompts], micro_batch) + work([1] * steps, micro_batch)

    total = once(MICRO_BATCH) * (1 + len(options.contracts) * len(options.worker_counts))
    total += once(MICRO_BATCH) * len(options.boundaries) * len(options.stage_counts)
    total += sum(work([invariance_tokens], size) for size in (1, *INVARIANCE_SIZES))
    total += 2 * work([invariance_tokens], 1)  # each alone, and then side by side
    if options.noise_floor:
        total += sum(once(size) for size in FLOOR_MICRO_BATCHES)
    return total


def _require_comparable(path: Path, traces: Sequence[Trace]) -> None:
    if not all(np.isfinite(trace.prefill).all() and np.isfinite(trace.steps).all() for trace in traces):
        raise InputError(f"{path.name} itself gives logits that are not finite: nothing can be compared")
    rows = [row for trace in traces for row in (*trace.prefill, *trace.steps)]
    if len(rows) > 1 and all(np.array_equal(row, rows[0]) for row in rows):
        raise InputError(f"{path.name} itself gives the same logits at every position: equal bytes prove nothing")


def _invariance(session: Session, tokens: tuple[int, ...], meter: Meter) -> BatchInvariance:
    if not tokens:
        return BatchInvariance()
    sizes = compare_micro_batches(session, tokens, INVARIANCE_SIZES, meter.phase("other micro-batches", MICRO_BATCH))
    return BatchInvariance(
        one=batch_invariant(list(sizes.values())),
        micro_batches={size: comparison.byte_identical for size, comparison in sizes.items()},
        tokens=len(tokens),
    )


def _side_by_side(model: Model, count: int, threads: int, meter: Meter) -> bool:
    texts = [
        random_tokens(model.n_vocab, max(1, int(part * count)), seed=2 + number)
        for number, part in enumerate(SIDE_BY_SIDE)
    ]
    advance = meter.phase("several sequences side by side", 1)
    return try_side_by_side(model, texts, n_threads=threads, advance=advance).byte_identical


def _stock(model: Model, n_ctx: int, micro_batch: int, threads: int) -> Session:
    return Session(model, n_ctx=n_ctx, n_ubatch=micro_batch, n_threads=threads, batch_invariant=False)
