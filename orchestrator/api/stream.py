"""Answers in the form of the OpenAI API, whole or as server-sent events. Pure.

A form takes what the gateway gives for each of the answers to one request and returns bodies: those of a stream as it
goes, or the whole at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from orchestrator.api.tools.reader import CallBegins, CallContinues, Piece, Reader, Said, Thought
from orchestrator.gateway.sequence import Finished, FinishReason, TextDelta, TokenChoice, TokenRecord, Usage

DONE: Final = b"data: [DONE]\n\n"
LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer share: its id, Unix time in seconds, the model's name, the engine's build."""

    identifier: str
    created: int
    model: str
    fingerprint: str


class AnswerForm(Protocol):
    """The shape of one kind of answer; ``answer`` is the number of one of several answers to a request."""

    def opening(self) -> list[Body]:
        """Return what a stream begins with."""

    def delta(self, answer: int, delta: TextDelta) -> list[Body]:
        """Take new text of an answer and return what a stream sends for it."""

    def ending(self, answer: int, end: Finished) -> list[Body]:
        """Take an answer's end and return what a stream sends for it."""

    def closing(self, usage: Usage) -> list[Body]:
        """Return what a stream ends with."""

    def whole(self, usage: Usage) -> Body:
        """Return all answers in one piece; after their ends."""

    @property
    def final(self) -> bytes:
        """What stands behind the last event of a stream."""


def encode_event(body: Body) -> bytes:
    """Return one server-sent event; a body of the Responses API is also named by its type."""
    data = b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    kind = body.get("type")
    return f"event: {kind}\n".encode() + data if isinstance(kind, str) else data


def usage_body(usage: Usage) -> Body:
    """Return the token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_body(end: Finished) -> Body:
    """Return how long an answer took, as llama.cpp's server says it: tokens, milliseconds, and guesses if any."""
    usage, times = end.usage, end.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    body: Body = {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(1e3 * times.prefill, 3),
        "prompt_per_second": round(computed / times.prefill, 3) if times.prefill > 0 else 0.0,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(1e3 * times.decode, 3),
        "predicted_per_second": round(usage.completion_tokens / times.decode, 3) if times.decode > 0 else 0.0,
    }
    if usage.drafted_tokens:
        body |= {"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_tokens}
    return body


class ChatAnswer:
    """One answer of a chat: its pieces as they come, and all of them."""

    def __init__(self, reader: Reader, new_identifier: Callable[[], str]) -> None:
        self._reader = reader
        self._new_identifier = new_identifier
        self._waiting: list[TokenRecord] = []
        self.said = ""
        self.thought = ""
        self.calls: list[tuple[str, str, str]] = []  # identifier, name, arguments
        self.tokens: list[TokenRecord] = []
        self.reason: FinishReason | None = None

    def take(self, delta: TextDelta) -> tuple[list[Piece], list[TokenRecord]]:
        """Take new text; return the pieces that are certain now and the tokens that came until then."""
        self.tokens += delta.tokens
        self._waiting += delta.tokens
        pieces = self._note(self._reader.feed(delta.text))
        tokens, self._waiting = (self._waiting, []) if pieces else ([], self._waiting)
        return pieces, tokens

    def end(self, reason: FinishReason) -> tuple[list[Piece], list[TokenRecord]]:
        """Take the end; return what was held back."""
        self.reason = reason
        return self._note(self._reader.finish()), self._waiting

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, as the API says it."""
        return "tool_calls" if self.calls and self.reason == "stop" else str(self.reason)

    def identifier(self, call: int) -> str:
        """Return a call's identifier."""
        return self.calls[call][0]

    def _note(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, Said):
                self.said += piece.text
            elif isinstance(piece, Thought):
                self.thought += piece.text
            elif isinstance(piece, CallBegins):
                self.calls.append((self._new_identifier(), piece.name, ""))
            else:
                identifier, name, arguments = self.calls[piece.index]
                self.calls[piece.index] = (identifier, name, arguments + piece.text)
        return pieces


class ChatForm:
    """The shape of ``/v1/chat/completions``; one reader for each answer."""

    final = DONE

    def __init__(
        self,
        head: AnswerHead,
        readers: Sequence[Reader],
        *,
        logprobs: bool,
        include_usage: bool,
        new_identifier: Callable[[], str],
    ) -> None:
        self._head = head
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._answers = [ChatAnswer(reader, new_identifier) for reader in readers]
        self._timings: Body = {}

    def opening(self) -> list[Body]:
        """Return the first chunk of each answer, which names the role."""
        return [self._chunk(number, {"role": "assistant", "content": ""}) for number in range(len(self._answers))]

    def delta(self, answer: int, delta: TextDelta) -> list[Body]:
        """Return a chunk for each new piece."""
        return self._chunks(answer, *self._answers[answer].take(delta))

    def ending(self, answer: int, end: Finished) -> list[Body]:
        """Return an answer's last chunks."""
        rest = self._chunks(answer, *self._answers[answer].end(end.reason))
        self._timings = _timings(end, len(self._answers))
        last = self._chunk(answer, {}, reason=self._answers[answer].finish_reason)
        return [*rest, {**last, **self._timings}]

    def closing(self, usage: Usage) -> list[Body]:
        """Return the chunk with the token counts where they were asked for."""
        if not self._include_usage:
            return []
        return [{**_head(self._head, "chat.completion.chunk"), "choices": [], "usage": usage_body(usage)}]

    def whole(self, usage: Usage) -> Body:
        """Return the answers in one piece."""
        choices = [self._choice(number, answer) for number, answer in enumerate(self._answers)]
        body = {**_head(self._head, "chat.completion"), "choices": choices, "usage": usage_body(usage)}
        return {**body, **self._timings}

    def _choice(self, number: int, answer: ChatAnswer) -> Body:
        message: Body = {"role": "assistant", "content": answer.said, "refusal": None}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["content"] = answer.said or None
            message["tool_calls"] = [
                {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
                for identifier, name, arguments in answer.calls
            ]
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs_body(answer.tokens),
            "finish_reason": answer.finish_reason,
        }

    def _chunks(self, number: int, pieces: list[Piece], tokens: Sequence[TokenRecord]) -> list[Body]:
        bodies = []
        for piece in pieces:
            bodies.append(self._chunk(number, self._piece_body(number, piece), tokens))
            tokens = ()
        if tokens:  # the log probabilities of what shows nowhere, such as the end of a call
            bodies.append(self._chunk(number, {}, tokens))
        return bodies

    def _piece_body(self, number: int, piece: Piece) -> Body:
        if isinstance(piece, Said):
            return {"content": piece.text}
        if isinstance(piece, Thought):
            return {"reasoning_content": piece.text}
        if isinstance(piece, CallContinues):
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        call: Body = {
            "index": piece.index,
            "id": self._answers[number].identifier(piece.index),
            "type": "function",
            "function": {"name": piece.name, "arguments": ""},
        }
        return {"tool_calls": [call]}

    def _chunk(self, number: int, delta: Body, tokens: Sequence[TokenRecord] = (), reason: str | None = None) -> Body:
        choice: Body = {"index": number, "delta": delta, "logprobs": None, "finish_reason": reason}
        if tokens:
            choice["logprobs"] = self._logprobs_body(tokens)
        body = {**_head(self._head, "chat.completion.chunk"), "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return body

    def _logprobs_body(self, tokens: Sequence[TokenRecord]) -> Body | None:
        if not self._logprobs:
            return None
        content = [
            {
                **_choice_body(TokenChoice(token.token, token.piece, token.logprob or 0.0)),
                "top_logprobs": [_choice_body(choice) for choice in token.alternatives],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionForm:
    """The shape of ``/v1/completions`` with some answers."""

    final = DONE

    def __init__(self, head: AnswerHead, answers: int, *, logprobs: bool, include_usage: bool) -> None:
        self._head = head
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._texts = [""] * answers
        self._tokens: list[list[TokenRecord]] = [[] for _ in range(answers)]
        self._reasons: list[FinishReason | None] = [None] * answers
        self._timings: Body = {}
        self._offsets = [0] * answers  # characters in the log probabilities that were sent

    def opening(self) -> list[Body]:
        """Return nothing: this shape has no first chunk."""
        return []

    def delta(self, answer: int, delta: TextDelta) -> list[Body]:
        """Return a chunk with new text."""
        self._texts[answer] += delta.text
        self._tokens[answer] += delta.tokens
        return [self._chunk(answer, delta.text, delta.tokens)]

    def ending(self, answer: int, end: Finished) -> list[Body]:
        """Return an answer's last chunk."""
        self._reasons[answer] = end.reason
        self._timings = _timings(end, len(self._texts))
        return [{**self._chunk(answer, "", reason=end.reason), **self._timings}]

    def closing(self, usage: Usage) -> list[Body]:
        """Return the chunk with the token counts where they were asked for."""
        if not self._include_usage:
            return []
        return [{**_head(self._head, "text_completion"), "choices": [], "usage": usage_body(usage)}]

    def whole(self, usage: Usage) -> Body:
        """Return the answers in one piece."""
        self._offsets = [0] * len(self._texts)
        choices = [
            self._choice(number, text, self._tokens[number], self._reasons[number])
            for number, text in enumerate(self._texts)
        ]
        body = {**_head(self._head, "text_completion"), "choices": choices, "usage": usage_body(usage)}
        return {**body, **self._timings}

    def _chunk(
        self, number: int, text: str, tokens: Sequence[TokenRecord] = (), reason: FinishReason | None = None
    ) -> Body:
        body: Body = {
            **_head(self._head, "text_completion"),
            "choices": [self._choice(number, text, tokens, reason)],
        }
        if self._include_usage:
            body["usage"] = None
        return body

    def _choice(self, number: int, text: str, tokens: Sequence[TokenRecord], reason: FinishReason | None) -> Body:
        logprobs = self._logprobs_body(number, tokens) if self._logprobs and tokens else None
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs_body(self, number: int, tokens: Sequence[TokenRecord]) -> Body:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(_text(token.piece))
        return {
            "tokens": [_text(token.piece) for token in tokens],
            "token_logprobs": [_logprob(token.logprob or 0.0) for token in tokens],
            "top_logprobs": [
                {_text(choice.piece): _logprob(choice.logprob) for choice in token.alternatives} for token in tokens
            ],
            "text_offset": offsets,
        }


def _head(head: AnswerHead, kind: str) -> Body:
    return {
        "id": head.identifier,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


def _timings(end: Finished, answers: int) -> Body:
    """Return the field with the times; of several answers to a request none says it all."""
    return {"timings": timings_body(end)} if answers == 1 else {}


def _choice_body(choice: TokenChoice) -> Body:
    return {"token": _text(choice.piece), "logprob": _logprob(choice.logprob), "bytes": list(choice.piece)}


def _logprob(value: float) -> float:
    return max(value, LEAST_LOGPROB)


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
