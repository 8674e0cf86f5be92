"""Twins for tests of speculation: a drafter that knows the answer, and a backend whose steps take what we say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from fake_backend import FakeBackend, greedy
from fake_engine import N_VOCAB, Script

from orchestrator.gateway.depth import micro_batches
from orchestrator.gateway.speculation import Draft, Wanted
from orchestrator.ring.steps import TokenBatch


class KnowingDrafter:
    """Guesses the greedy answer of :class:`FakeBackend`, and each token wrongly with probability 1 - ``rate``.

    ``limit`` is the most that it guesses; with None for an answer's ``continuation`` it computes the true one.
    """

    name = "knowing"

    def __init__(
        self,
        rate: float,
        *,
        script: Script = lambda held: None,
        is_free: bool = True,
        prior: float = 0.5,
        seconds_each: float = 0.0,
        clock: Clock | None = None,
        continuation: Callable[[Sequence[int], int], list[int]] | None = None,
        n_vocab: int = N_VOCAB,
    ) -> None:
        self.rate = rate
        self.is_free = is_free
        self.prior = prior
        self.begun: list[int] = []
        self._seconds_each = seconds_each
        self._clock = clock
        self._script = script
        self._continuation = continuation
        self._n_vocab = n_vocab
        self._random = np.random.default_rng(0)

    def begin(self, slot: int) -> None:
        self.begun.append(slot)

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Draft]:
        drafts = {}
        for one in wanted:
            if self._continuation is not None:
                tokens = self._continuation(one.tokens, one.count)
            else:
                tokens = greedy(one.tokens, one.count, self._script)
            wrong = self._random.random(one.count) >= self.rate
            drafts[one.slot] = Draft(
                tuple((token + 1) % self._n_vocab if bad else token for token, bad in zip(tokens, wrong, strict=True))
            )
        if self._clock is not None and wanted:
            self._clock.now += self._seconds_each * max(one.count for one in wanted)
        return drafts

    def seconds(self, slots: int) -> float:
        return self._seconds_each

    def debt(self, slot: int, tokens: Sequence[int]) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Clock:
    """A clock that stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedBackend(FakeBackend):
    """A backend whose steps take ``fixed`` + ``per_row`` x rows seconds for each micro-batch, on a clock of its own.

    ``noise`` is the relative deviation; every 50th step takes ten times as long.
    """

    def __init__(
        self, clock: Clock, fixed: float, per_row: float, *, noise: float = 0.0, n_sequences: int = 1
    ) -> None:
        super().__init__(n_ctx=4096, n_sequences=n_sequences, n_chunk=63)
        self.fixed, self.per_row = fixed, per_row
        self._clock = clock
        self._noise = noise
        self._random = np.random.default_rng(1)
        self._number = 0

    def submit(self, batch: TokenBatch, wanted: Callable[[], bool]) -> int:
        lengths = {int(s): int((batch.sequences == s).sum()) for s in np.unique(batch.sequences)}
        seconds = sum(self.fixed + self.per_row * rows for rows in micro_batches(lengths, 63))
        self._number += 1
        if self._noise:
            seconds *= 1 + abs(self._random.normal(0, self._noise))
            seconds *= 10 if self._number % 50 == 0 else 1
        self._clock.now += seconds
        return super().submit(batch, wanted)
