"""One request's way from prompt to answer: what was asked, what came out, and the state in between. Pure."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Literal, Protocol

from orchestrator.errors import LinkcppError, RequestError
from orchestrator.gateway.detokenize import Detokenizer, Released
from orchestrator.gateway.sampling import (
    Constraint,
    SamplingParameters,
    TokenHistory,
    choose_token,
    log_probabilities,
    most_likely,
)
from orchestrator.types import FloatArray

FinishReason = Literal["stop", "length", "cancelled"]


class Vocabulary(Protocol):
    """The part of a model that turns tokens into bytes."""

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return a token's bytes; control tokens have none unless ``special``."""

    def is_end_of_generation(self, token: int) -> bool:
        """Tell whether the model ends its answer with this token."""

    def constrain(self, grammar: str, visible: Collection[int] = ()) -> Constraint:
        """Return the beginning of an answer in a GBNF grammar; raises :class:`InputError` for an unusable one."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client wants.

    ``max_tokens`` None: until the model ends or the context is full. ``top_logprobs`` None: no log probabilities;
    0: those of the chosen tokens only. ``ignore_end``: go on after the model's end token (for measurements).
    ``grammar``: what the whole answer must look like, in GBNF. ``visible``: control tokens that the answer shows as
    text, such as the one that begins a tool call.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    ignore_end: bool = False
    identifier: str = ""
    grammar: str | None = None
    visible: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token that might have been chosen: its id, bytes and natural log probability."""

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of the answer; ``logprob`` and ``alternatives`` only where log probabilities were asked for."""

    token: int
    piece: bytes
    logprob: float | None = None
    alternatives: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens.

    ``completion_tokens`` counts every token that was sampled, the end token and those of a stop string included;
    ``cached_tokens`` of the prompt were still in the KV cache. ``drafted_tokens`` were guessed and computed, and
    ``accepted_tokens`` of them came true.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a request took, in seconds: waiting in the queue, until the first token, and after it."""

    queued: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New certain text of the answer, and the tokens whose text starts in it; the text may be empty."""

    text: str
    tokens: tuple[TokenRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer ends with an error; other requests are not affected."""

    error: LinkcppError


Event = TextDelta | Finished | Failed


class Sequence:
    """A request in progress: its tokens, how many of them the engine has seen, and its text."""

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, n_ctx: int) -> None:
        self.request = request
        self.tokens: list[int] = list(request.prompt)
        self.decoded = 0  # how many of the tokens are in the KV cache
        self.cached = 0  # how many were there already
        self.drafted = 0  # guesses that were computed, and those of them that came true
        self.accepted = 0
        self.finish_reason: FinishReason | None = None
        self._vocabulary = vocabulary
        self._n_ctx = n_ctx
        self._history = TokenHistory(request.prompt)
        self._text: Detokenizer[TokenRecord] = Detokenizer(request.stop)
        self._constraint = vocabulary.constrain(request.grammar, request.visible) if request.grammar else None

    @property
    def generated(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def usage(self) -> Usage:
        """The token counts so far."""
        return Usage(len(self.request.prompt), self.generated, self.cached, self.drafted, self.accepted)

    def accept(self, logits: FloatArray) -> TextDelta:
        """Choose the next token from ``logits`` [n_vocab] and return the text that became certain."""
        token = choose_token(logits, self.request.sampling, self._history, self.generated, self._constraint)
        if token is None:
            raise RequestError("the grammar leads to where no token of this model fits", code="invalid_grammar")
        self.tokens.append(token)
        self._history.append(token)
        if self._vocabulary.is_end_of_generation(token) and not self.request.ignore_end:
            self.finish_reason = "stop"
            return _delta(self._text.finish())
        if self._constraint is not None:
            self._constraint.accept(token)
        piece = self._vocabulary.piece(token, special=token in self.request.visible)
        released = self._text.feed(piece, self._record(token, logits))
        if self._text.stopped:
            self.finish_reason = "stop"
        elif self.generated == self.request.max_tokens or len(self.tokens) > self._n_ctx:
            self.finish_reason = "length"
            rest = self._text.finish()
            released = Released(released.text + rest.text, released.items + rest.items)
        return _delta(released)

    def _record(self, token: int, logits: FloatArray) -> TokenRecord:
        piece = self._vocabulary.piece(token, special=True)
        if self.request.top_logprobs is None:
            return TokenRecord(token, piece)
        scores = log_probabilities(logits)
        alternatives: Listed[TokenChoice] = [
            TokenChoice(other, self._vocabulary.piece(other, special=True), score)
            for other, score in most_likely(scores, self.request.top_logprobs)
        ]
        return TokenRecord(token, piece, float(scores[token]), tuple(alternatives))


def _delta(released: Released[TokenRecord]) -> TextDelta:
    return TextDelta(released.text, released.items)
