"""Guess what a small model says: a second GGUF with the same vocabulary, in this process.

It reads along: its cache holds what the target's answer holds, and its own guesses behind that, which are taken back
where the target chose otherwise. Its guesses need not be exact, so it runs as fast as the engine can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.errors import InputError, LinkcppError
from orchestrator.gateway.depth import StepTimes
from orchestrator.gateway.prefix import common_prefix
from orchestrator.gateway.speculation import Draft, Wanted
from orchestrator.ring.steps import Remove, TokenBatch
from orchestrator.types import FloatArray

logger = logging.getLogger(__name__)

SIZE_DIFFERENCE: Final = 128
"""Tokens that one vocabulary may have beyond the other's: models of one family are padded differently."""

_ROWS: Final = 512
_TRIAL_ROWS: Final = 32
_TRIALS: Final = 4

_USUAL: Final = 2
"""Tokens that it has not read where all of its last guesses were right: the last of them, and the one behind."""


class ModelDrafter:
    """A :class:`orchestrator.gateway.speculation.Drafter` over a context with a sequence for each slot.

    ``n_common`` is the number of tokens that draft and target have in common. ``now`` is a clock in seconds.
    """

    name = "draft"
    is_free = False
    prior = 0.8

    def __init__(
        self, model: Model, context: Context, n_common: int, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._model = model
        self._context = context
        self._n_common = n_common
        self._now = now
        self._held: list[list[int]] = [[] for _ in range(context.n_sequences)]
        self._times = StepTimes()
        self._reading = 0.0  # seconds for a token of a text that it has not read
        self._try()

    @classmethod
    def open(cls, path: Path, target: Model, *, n_ctx: int, n_sequences: int, n_threads: int) -> ModelDrafter:
        """Load a model that drafts for ``target``; raise :class:`InputError` where it cannot."""
        model = Model.open(path, repack=True)
        try:
            n_common = common_vocabulary(model, target)
            context = Context(
                model,
                n_ctx=n_ctx,
                n_sequences=n_sequences,
                n_ubatch=_ROWS,
                n_threads=n_threads,
                batch_invariant=False,
            )
        except BaseException:
            model.close()
            raise
        return cls(model, context, n_common)

    def begin(self, slot: int) -> None:
        """Do nothing: what the cache has in common with the new text may stay."""

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Draft]:
        """Guess greedily for all texts at once; where the model fails, nothing."""
        known = [one for one in wanted if max(one.tokens) < self._n_common]
        if not known:
            return {}
        try:
            return self._guess(sorted(known, key=lambda one: one.slot))
        except LinkcppError as error:
            logger.warning("the draft model failed: %s", error)
            for one in known:
                self._cut(one.slot, 0)
            return {}

    def seconds(self, slots: int) -> float:
        """Return what one more guess for so many slots takes."""
        return self._times.seconds([slots]) or 0.0

    def debt(self, slot: int, tokens: Sequence[int]) -> float:
        """Return what reading the text takes, as far as it was not read."""
        return self._reading * max(0, len(tokens) - common_prefix(self._held[slot], list(tokens)) - _USUAL)

    def close(self) -> None:
        """Free the model."""
        self._context.close()
        self._model.close()

    def _guess(self, wanted: Sequence[Wanted]) -> dict[int, Draft]:
        news: dict[int, list[int]] = {}
        for one in wanted:
            tokens = list(one.tokens)
            self._cut(one.slot, common_prefix(self._held[one.slot], tokens[:-1]))
            news[one.slot] = tokens[len(self._held[one.slot]) :]
        guesses: dict[int, list[int]] = {one.slot: [] for one in wanted}
        count = {one.slot: one.count for one in wanted}
        is_ready = all(len(new) <= _USUAL for new in news.values())
        begun = self._now()
        while news:
            logits = self._decode(news)
            chosen = dict(zip(news, logits[:, : self._n_common].argmax(axis=1).tolist(), strict=True))
            for slot, token in chosen.items():
                guesses[slot].append(token)
            news = {slot: [token] for slot, token in chosen.items() if len(guesses[slot]) < count[slot]}
        if is_ready:
            self._times.observe([len(wanted)], (self._now() - begun) / max(count.values()))
        return {slot: Draft(tuple(tokens)) for slot, tokens in guesses.items()}

    def _decode(self, news: Mapping[int, Sequence[int]]) -> FloatArray:
        """Append tokens (by slot, ascending); return the logits behind each slot's last."""
        rows = [
            (token, len(self._held[slot]) + index, slot, index == len(tokens) - 1)
            for slot, tokens in news.items()
            for index, token in enumerate(tokens)
        ]
        tokens, positions, slots, outputs = zip(*rows, strict=True)
        begun = self._now()
        outcome = self._context.decode(
            TokenBatch(
                np.array(tokens, np.int32),
                np.array(positions, np.int32),
                np.array(slots, np.int32),
                np.array(outputs, np.bool_),
            )
        )
        if len(rows) >= _TRIAL_ROWS:
            self._reading = (self._now() - begun) / len(rows)
        for slot, new in news.items():
            self._held[slot].extend(new)
        return outcome.logits if outcome.logits is not None else np.empty((0, self._n_common), np.float32)

    def _cut(self, slot: int, keep: int) -> None:
        held = self._held[slot]
        if keep < len(held):
            self._context.apply(Remove(slot, keep))
            del held[keep:]

    def _try(self) -> None:
        """Find out how fast it is, before anybody waits for it; the first time its weights are read from the disk."""
        for _ in range(2):
            self._times = StepTimes()
            text = [0] * _TRIAL_ROWS
            for _ in range(_TRIALS):
                (draft,) = self._guess([Wanted(0, text, 2, 2)]).values()
                text += draft.tokens
            self._cut(0, 0)


def common_vocabulary(draft: Model, target: Model) -> int:
    """Return how many tokens two models have in common; raise :class:`InputError` where they are not the same."""
    if draft.is_hybrid or draft.embeds or draft.reads_whole_text:
        raise InputError(f"{draft.path} cannot draft: it takes a model with attention that continues texts")
    sizes = sorted((draft.n_vocab, target.n_vocab))
    if sizes[1] - sizes[0] > SIZE_DIFFERENCE:
        raise InputError(
            f"{draft.path} has {draft.n_vocab} tokens and {target.path} has {target.n_vocab}",
            hint="a draft model needs the vocabulary of the model that it drafts for",
        )
    for token in range(sizes[0]):
        mine, its = draft.piece(token, special=True), target.piece(token, special=True)
        if mine != its:
            raise InputError(
                f"token {token} is {mine.decode(errors='replace')!r} in {draft.path} "
                f"and {its.decode(errors='replace')!r} in {target.path}",
                hint="a draft model needs the vocabulary of the model that it drafts for",
            )
    return sizes[0]
