"""Does an answer depend on who else is in its micro-batches? Several sequences side by side against each alone.

The mixture is made from a seed: texts of different lengths, chunks of one to thirty tokens beside single ones, some
sequences pausing, and texts that take the place of others that have ended. All logits of every text are compared
with those of the text alone, in single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.ring.steps import Clear, Remove, TokenBatch, one_sequence
from orchestrator.types import FloatArray
from orchestrator.verification.gate import Comparison, compare

SLOTS: Final = 4
_LARGEST_CHUNK: Final = 30


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens ``start`` to ``stop`` - 1 of a text, in a slot."""

    slot: int
    text: int
    start: int
    stop: int


def mixture(lengths: Sequence[int], slots: int, rows: int, seed: int) -> Iterator[tuple[Part, ...]]:
    """Yield steps of at most ``rows`` tokens until all texts are complete; parts are in the order of their slots."""
    random = np.random.Generator(np.random.PCG64(seed))
    waiting = list(range(len(lengths)))
    texts: dict[int, tuple[int, int]] = {}  # slot -> (text, tokens of it that were given)
    while waiting or texts:
        for slot in range(slots):
            if slot not in texts and waiting:
                texts[slot] = (waiting.pop(0), 0)
        parts = []
        left = rows
        pausing = int(random.integers(0, 2 * slots))
        for slot in sorted(texts):
            text, given = texts[slot]
            if not left or (slot == pausing and len(texts) > 1):
                continue
            count = 1 if random.random() < 0.5 else int(random.integers(1, _LARGEST_CHUNK + 1))
            count = min(count, left, lengths[text] - given)
            parts.append(Part(slot, text, given, given + count))
            left -= count
            texts[slot] = (text, given + count)
        yield tuple(parts)
        texts = {slot: (text, given) for slot, (text, given) in texts.items() if given < lengths[text]}


def try_side_by_side(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    slots: int = SLOTS,
    n_threads: int = 1,
    seed: int = 0,
    advance: Callable[[int], None] = lambda rows: None,
) -> Comparison:
    """Compare all logits of the texts side by side with those of each alone; ``advance`` hears of rows decoded."""
    n_ctx = max(map(len, texts))
    alone: list[FloatArray] = []
    with Context(model, n_ctx=n_ctx, n_threads=n_threads) as context:
        for text in texts:
            context.apply(Clear())
            rows = [_logits(context, one_sequence([token], place)) for place, token in enumerate(text)]
            alone.append(np.concatenate(rows))
            advance(len(text))
    together: list[list[FloatArray]] = [[] for _ in texts]
    with Context(model, n_ctx=n_ctx, n_sequences=slots, n_threads=n_threads) as context:
        for parts in mixture([len(text) for text in texts], slots, context.n_ubatch, seed):
            logits = _logits(context, _batch(parts, texts))
            start = 0
            for part in parts:
                count = part.stop - part.start
                together[part.text].append(logits[start : start + count])
                start += count
                if part.stop == len(texts[part.text]):
                    context.apply(Remove(part.slot))
            advance(start)
    return compare(np.concatenate([np.concatenate(rows) for rows in together]), np.concatenate(alone))


def join(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Make one batch of several, in their order."""
    return TokenBatch(
        np.concatenate([batch.tokens for batch in batches]),
        np.concatenate([batch.positions for batch in batches]),
        np.concatenate([batch.sequences for batch in batches]),
        np.concatenate([batch.outputs for batch in batches]),
    )


def _batch(parts: Sequence[Part], texts: Sequence[Sequence[int]]) -> TokenBatch:
    return join(
        [
            one_sequence(texts[part.text][part.start : part.stop], part.start, sequence=part.slot, every=True)
            for part in parts
        ]
    )


def _logits(context: Context, batch: TokenBatch) -> FloatArray:
    logits = context.decode(batch).logits
    return np.empty((0, context.model.n_vocab), np.float32) if logits is None else logits
