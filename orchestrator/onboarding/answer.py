"""Answer one question greedily and keep every logit, so that "the same answer" can be computed and not claimed."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.errors import InputError
from orchestrator.onboarding.trace import Decoder
from orchestrator.types import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The logits of prompt and answer, [n_prompt + n_decoded, n_vocab], and how long the decode steps took."""

    logits: FloatArray = field(repr=False)
    tokens: tuple[int, ...]  # decoded after the prompt; the end-of-generation token is not among them
    seconds: float  # in decode steps, without the prefill

    @property
    def tokens_per_second(self) -> float:
        """Speed of the decode steps; 0 where there was none."""
        return len(self.tokens) / self.seconds if self.seconds > 0 else 0.0

    @property
    def sha256(self) -> str:
        """Hash over all logits."""
        return hashlib.sha256(np.ascontiguousarray(self.logits).data).hexdigest()


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    limit: int,
    is_end: Callable[[int], bool],
    emit: Callable[[int], None],
    now: Callable[[], float],
    prefilled: Callable[[], None] = lambda: None,
) -> Answer:
    """Decode greedily until an end token or ``limit``; ``emit`` gets each token, ``prefilled`` comes once before."""
    return _decode(decoder, prompt, _Greedy(limit, is_end, emit), now, prefilled)


def repeat(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int], *, now: Callable[[], float]) -> Answer:
    """Decode the tokens of an answer given elsewhere: the oracle's way to check it."""
    return _decode(decoder, prompt, _Forced(tokens), now, lambda: None)


class TextStream:
    """Turns token pieces into text; an incomplete character waits for its rest."""

    def __init__(self, piece: Callable[[int], bytes], write: Callable[[str], None]) -> None:
        self._piece = piece
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""

    def __call__(self, token: int) -> None:
        """Take the next token."""
        text = self._decoder.decode(self._piece(token))
        self.text += text
        if text:
            self._write(text)


class _Greedy:
    def __init__(self, limit: int, is_end: Callable[[int], bool], emit: Callable[[int], None]) -> None:
        self._left = limit
        self._is_end = is_end
        self._emit = emit

    def next(self, logits: FloatArray) -> int | None:
        token = int(logits.argmax())
        if self._left == 0 or self._is_end(token):
            return None
        self._left -= 1
        self._emit(token)
        return token


class _Forced:
    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter(tokens)

    def next(self, logits: FloatArray) -> int | None:
        return next(self._tokens, None)


def _decode(
    decoder: Decoder,
    prompt: Sequence[int],
    choice: _Greedy | _Forced,
    now: Callable[[], float],
    prefilled: Callable[[], None],
) -> Answer:
    if not prompt:
        raise InputError("there is no prompt to answer")
    decoder.clear()
    pieces = [decoder.decode(prompt, all_logits=True)]
    prefilled()
    tokens: list[int] = []
    seconds = 0.0
    while (token := choice.next(pieces[-1][-1])) is not None:
        started = now()
        pieces.append(decoder.decode([token]))
        seconds += now() - started
        tokens.append(token)
    return Answer(np.concatenate(pieces), tuple(tokens), seconds)
