"""Guess what the model's own prediction layers say (MTP): a few layers in its file that were made for it.

They go on from the hidden rows that the model computes for each token, so they read along: each step's rows come
here, and wait until a guess is wanted or many have come together. Behind what the model has computed, the layers go
on from their own rows: one layer again and again, or, where a model has several, each for its own distance.

What they have not seen (a beginning that came from another slot or from a file, or a step that failed) they do
without: the guesses are worse then, for a while. A text of which they have not seen the newest rows gets none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.engine.prediction import PredictionContext
from orchestrator.errors import LinkcppError
from orchestrator.gateway.depth import StepTimes
from orchestrator.gateway.speculation import Draft, Seen, Wanted
from orchestrator.ring.steps import TokenBatch
from orchestrator.types import FloatArray

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 128
"""Hidden rows of a slot that wait at most: together they are read quicker, and they take memory."""

_TRIAL_ROWS: Final = 32
_TRIALS: Final = 4

_USUAL: Final = 9
"""Rows that wait at most where guesses are made in each step."""


@dataclass(slots=True)
class _Text:
    """What was seen of a slot's text: ``tokens`` at the positions from ``first`` on.

    The layers' cache holds those before ``held``; the others wait with the ``rows`` of the tokens in front of them.
    ``last`` is the newest token's own row, None where it is not known.
    """

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    held: int = 0
    rows: list[FloatArray] = field(default_factory=list)
    last: FloatArray | None = None

    @property
    def end(self) -> int:
        """The position behind the newest token that was seen."""
        return self.first + len(self.tokens)

    def is_beginning_of(self, text: Sequence[int], length: int) -> bool:
        """Tell whether the first ``length`` positions of a text are among what was seen, as far as it reaches."""
        return (
            self.first <= length <= self.end and list(text[self.first : length]) == self.tokens[: length - self.first]
        )

    def cut(self, keep: int) -> None:
        """Forget the positions from ``keep`` on, which were seen."""
        if keep < self.end:
            del self.tokens[keep - self.first :]
            self.held = min(self.held, keep)
            del self.rows[keep - self.held :]
            self.last = None

    def append(self, tokens: Sequence[int], rows: FloatArray) -> None:
        """See more tokens with their own rows."""
        self.tokens.extend(tokens)
        self.rows.append(np.zeros_like(rows[0]) if self.last is None else self.last)
        self.rows.extend(rows[:-1])
        self.last = rows[-1]


class MtpDrafter:
    """A :class:`orchestrator.gateway.speculation.Drafter` and ``Reader`` with a sequence for each slot.

    ``now`` is a clock in seconds.
    """

    name = "mtp"
    is_free = False
    prior = 0.8

    def __init__(self, layers: PredictionContext, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._layers = layers
        self._now = now
        self._texts = [_Text() for _ in range(layers.n_sequences)]
        self._times = StepTimes()
        self._reading = 0.0  # seconds for a token
        self._try()

    @classmethod
    def open(cls, path: Path, *, n_ctx: int, n_sequences: int, n_threads: int) -> MtpDrafter:
        """Load the prediction layers of a file; raise :class:`InputError` where it has none of use."""
        layers = PredictionContext(path, n_ctx=n_ctx, n_sequences=n_sequences, n_threads=n_threads)
        try:
            return cls(layers)
        except BaseException:
            layers.close()
            raise

    @property
    def most(self) -> int | None:
        """The most guesses at once; None where a layer can go on and on."""
        return self._layers.n_layers if self._layers.n_layers > 1 else None

    def begin(self, slot: int) -> None:
        """Do nothing: whether a text goes on is seen by its tokens."""

    def read(self, seen: Sequence[Seen]) -> None:
        """Take the hidden rows of tokens that were computed and stay."""
        for one in seen:
            text = self._texts[one.slot]
            if text.is_beginning_of(one.tokens, one.start):
                text.cut(one.start)
            else:
                self._forget(one.slot, one.start)
                text = self._texts[one.slot]
            text.append(one.tokens[one.start : one.start + len(one.rows)], one.rows)
        full = [one.slot for one in seen if len(self._texts[one.slot].rows) >= MOST_WAITING]
        if full:
            self._safely(full, lambda: self._read_waiting(full))

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Draft]:
        """Guess greedily for all texts at once whose newest rows were seen; where the layers fail, nothing."""
        known = [one for one in wanted if self._is_known(one)]
        if not known:
            return {}
        known.sort(key=lambda one: one.slot)
        drafts: dict[int, Draft] = {}
        self._safely([one.slot for one in known], lambda: drafts.update(self._guess(known)))
        return drafts

    def seconds(self, slots: int) -> float:
        """Return what one more guess for so many slots takes."""
        return self._times.seconds([slots]) or 0.0

    def debt(self, slot: int, tokens: Sequence[int]) -> float:
        """Return what reading the rows takes that wait."""
        return self._reading * max(0, len(self._texts[slot].rows) - _USUAL)

    def close(self) -> None:
        """Free the layers."""
        self._layers.close()

    def _is_known(self, one: Wanted) -> bool:
        text, newest = self._texts[one.slot], len(one.tokens) - 1
        return text.end == newest and text.last is not None and text.is_beginning_of(one.tokens, newest)

    def _safely(self, slots: Sequence[int], call: Callable[[], object]) -> None:
        try:
            call()
        except LinkcppError as error:
            logger.warning("the prediction layers failed: %s", error)
            for slot in slots:
                self._forget(slot, self._texts[slot].end)

    def _forget(self, slot: int, position: int) -> None:
        """Go on from a position as if nothing were in front of it."""
        self._layers.cut(slot, 0)
        self._texts[slot] = _Text(first=position, held=position)

    def _read_waiting(self, slots: Sequence[int]) -> None:
        texts = {slot: self._texts[slot] for slot in sorted(slots) if self._texts[slot].rows}
        if not texts:
            return
        parts = [(slot, text.held, text.tokens[text.held - text.first :]) for slot, text in texts.items()]
        self._layers.read(_batch(parts), np.stack([row for text in texts.values() for row in text.rows]))
        for text in texts.values():
            text.held = text.end
            text.rows.clear()

    def _guess(self, wanted: Sequence[Wanted]) -> dict[int, Draft]:
        slots = [one.slot for one in wanted]
        is_usual = all(len(self._texts[slot].rows) <= _USUAL for slot in slots)
        begun = self._now()
        self._read_waiting(slots)
        newest = {slot: self._texts[slot].last for slot in slots}
        chains = {one.slot: _Chain(one, row, self.most) for one in wanted if (row := newest[one.slot]) is not None}
        depth = 0
        while alive := [chain for chain in chains.values() if chain.count > len(chain.guesses)]:
            layer, keep = (0, 1) if self.most is None else (depth, depth + 1)
            parts = [chain.part(keep) for chain in alive]
            rows = np.concatenate([np.stack(chain.rows[-keep:]) for chain in alive])
            logits, hidden = self._layers.guess(_batch(parts), rows, layer)
            for chain, at in zip(alive, range(keep - 1, len(rows), keep), strict=True):
                chain.guesses.append(int(logits[at].argmax()))
                chain.rows.append(hidden[at])
            depth += 1
        if is_usual:
            self._times.observe([len(wanted)], (self._now() - begun) / depth)
        return {slot: Draft(tuple(chain.guesses)) for slot, chain in chains.items()}

    def _try(self) -> None:
        """Find out how fast it is, before anybody waits for it; the first time its weights are read from the disk."""
        rows = np.zeros((_TRIAL_ROWS, self._layers.length), np.float32)
        for _ in range(2):
            self._times = StepTimes()
            text = [0] * _TRIAL_ROWS
            self.read([Seen(0, text, 0, rows)])
            begun = self._now()
            self._read_waiting([0])
            self._reading = (self._now() - begun) / _TRIAL_ROWS
            for _ in range(_TRIALS):
                text.append(0)
                self._guess([Wanted(0, text, min(2, self.most or 2), 2)])
                self.read([Seen(0, text, len(text) - 1, rows[:1])])
            self._forget(0, 0)


class _Chain:
    """The newest token of a text and the guesses behind it, each with the row of the token in front of it."""

    def __init__(self, one: Wanted, row: FloatArray, most: int | None) -> None:
        self.slot = one.slot
        self.count = one.count if most is None else min(one.count, most)
        self.guesses: list[int] = []
        self.rows = [row]
        self._start = len(one.tokens) - 1
        self._newest = one.tokens[-1]

    def part(self, keep: int) -> tuple[int, int, list[int]]:
        """Return slot, first position and tokens of the last ``keep`` of them."""
        tokens = [self._newest, *self.guesses]
        return self.slot, self._start + len(tokens) - keep, tokens[-keep:]


def _batch(parts: Sequence[tuple[int, int, Sequence[int]]]) -> TokenBatch:
    """Join (slot, first position, tokens)."""
    lengths = [len(tokens) for _, _, tokens in parts]
    return TokenBatch(
        np.array([token for _, _, tokens in parts for token in tokens], np.int32),
        np.concatenate([np.arange(start, start + len(tokens), dtype=np.int32) for _, start, tokens in parts]),
        np.repeat(np.array([slot for slot, _, _ in parts], np.int32), lengths),
        np.ones(sum(lengths), np.bool_),
    )
