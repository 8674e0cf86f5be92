"""Embeddings of whole texts, by a model that is made for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from orchestrator.errors import ComputeError, ContextLengthError, RequestError
from orchestrator.ring.steps import Remove, TokenBatch, one_sequence
from orchestrator.types import FloatArray

_FIRST, _LAST = "2", "3"
_NO_POOLING: Final = "0"


class EmbeddingContext(Protocol):
    """The part of an engine context that embeds."""

    n_ctx: int

    def decode(self, batch: TokenBatch) -> EmbeddingOutcome:
        """Compute a batch."""

    def apply(self, operation: Remove) -> bool:
        """Forget tokens."""


class EmbeddingOutcome(Protocol):
    """What a batch gave."""

    @property
    def logits(self) -> FloatArray | None:
        """The embeddings of the wanted tokens, [n, n_embd]."""


class Embedder:
    """Turns tokens into one vector of length 1; ``pooling`` is the model's own (``*.pooling_type`` of its file).

    ``run`` runs a call where nothing else uses the context, and returns what it returns.
    """

    def __init__(
        self,
        context: EmbeddingContext,
        pooling: str,
        run: Callable[[Callable[[], FloatArray]], FloatArray],
    ) -> None:
        self.n_ctx = context.n_ctx
        self._context = context
        self._pooling = pooling
        self._run = run

    def embed(self, tokens: Sequence[int]) -> FloatArray:
        """Return the embedding of a text, [n_embd].

        Raises :class:`ContextLengthError` for one that is too long, :class:`RequestError` for an empty one.
        """
        if not tokens:
            raise RequestError("the input is empty", param="input")
        if len(tokens) > self.n_ctx:
            raise ContextLengthError(len(tokens), self.n_ctx, param="input")
        return self._run(lambda: self._compute(tokens))

    def _compute(self, tokens: Sequence[int]) -> FloatArray:
        try:
            rows = self._context.decode(one_sequence(tokens, 0, every=True)).logits
        finally:
            self._context.apply(Remove(0))
        if rows is None:
            raise ComputeError("the engine gave no embeddings")
        if self._pooling == _FIRST:
            vector = rows[0].astype(np.float64)
        elif self._pooling == _LAST:
            vector = rows[-1].astype(np.float64)
        else:  # the mean, which is what nearly all of them are trained for
            vector = rows.astype(np.float64).mean(axis=0)
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length):
            raise ComputeError("the engine gave embeddings that are not numbers")
        unit: FloatArray = (vector / length if length else vector).astype(np.float32)
        return unit


def pooling_of(metadata: Mapping[str, str], architecture: str) -> str:
    """Return how a model's file says that the vectors of its tokens become one."""
    return metadata.get(f"{architecture}.pooling_type", _NO_POOLING)
