"""Rings of synthetic models inside one process, and the unsplit engine as their oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.engine.stage import StageSizes
from orchestrator.engine.survey import survey
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.steps import TokenBatch, one_sequence
from orchestrator.types import FloatArray


def tokens_of(n_vocab: int, count: int, seed: int = 11) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, n_vocab, count)]


def batches(tokens: Sequence[int], parts: Sequence[int], n_batch: int, every: bool = True) -> Iterator[TokenBatch]:
    """Cut a text into prefills of these lengths (each in steps of at most ``n_batch``) and single steps."""
    position = 0
    for part in [*parts, *[1] * (len(tokens) - sum(parts))]:
        yield from one_sequence(tokens[position : position + part], position, every=every).split(n_batch)
        position += part


def legal_cuts(path: Path) -> tuple[int, list[int]]:
    """Return the number of layers and the places where the model may be cut."""
    with Model.open(path, without_experts=True) as model:
        return model.n_layer, [cut.layer for cut in survey(model) if cut.is_legal]


@contextlib.contextmanager
def whole(path: Path, sizes: StageSizes) -> Iterator[Context]:
    with (
        Model.open(path) as model,
        Context(
            model,
            n_ctx=sizes.n_ctx,
            n_sequences=sizes.n_sequences,
            n_ubatch=sizes.n_ubatch,
            n_batch=sizes.n_batch,
            batch_invariant=sizes.batch_invariant,
        ) as context,
    ):
        yield context


def decode_all(target: Context | Pipeline, steps: Sequence[TokenBatch]) -> list[FloatArray]:
    if isinstance(target, Context):
        none = np.empty((0, target.model.n_vocab), np.float32)  # of a step that wanted no logits
        return [none if (logits := target.decode(step).logits) is None else logits for step in steps]
    return [target.decode(step) for step in steps]


def same(left: Sequence[FloatArray], right: Sequence[FloatArray]) -> bool:
    return len(left) == len(right) and all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))
