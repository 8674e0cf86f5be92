"""Answers in the form of the OpenAI API, whole or as server-sent events. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.gateway.sequence import FinishReason, TextDelta, TokenChoice, TokenRecord, Usage

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


def encode_event(body: Body) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_body(usage: Usage) -> Body:
    """Return the token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChatForm:
    """The shape of ``/v1/chat/completions``."""

    def __init__(self, head: AnswerHead, *, logprobs: bool, include_usage: bool) -> None:
        self._head = head
        self._logprobs = logprobs
        self._include_usage = include_usage

    def opening(self) -> list[Body]:
        """Return the first chunk, which names the role."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def delta(self, delta: TextDelta) -> Body:
        """Return a chunk with new text."""
        return self._chunk({"content": delta.text}, delta.tokens)

    def closing(self, reason: FinishReason, usage: Usage) -> list[Body]:
        """Return the last chunk, and the one with the token counts where they were asked for."""
        last = self._chunk({}, reason=reason)
        if not self._include_usage:
            return [last]
        return [last, {**_head(self._head, "chat.completion.chunk"), "choices": [], "usage": usage_body(usage)}]

    def whole(self, text: str, tokens: Sequence[TokenRecord], reason: FinishReason, usage: Usage) -> Body:
        """Return the answer in one piece."""
        choice: Body = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs_body(tokens),
            "finish_reason": reason,
        }
        return {**_head(self._head, "chat.completion"), "choices": [choice], "usage": usage_body(usage)}

    def _chunk(self, delta: Body, tokens: Sequence[TokenRecord] = (), reason: FinishReason | None = None) -> Body:
        choice: Body = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
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
    """The shape of ``/v1/completions``."""

    def __init__(self, head: AnswerHead, *, logprobs: bool, include_usage: bool) -> None:
        self._head = head
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._offset = 0  # characters sent so far

    def opening(self) -> list[Body]:
        """Return nothing: this shape has no first chunk."""
        return []

    def delta(self, delta: TextDelta) -> Body:
        """Return a chunk with new text."""
        return self._chunk(delta.text, delta.tokens)

    def closing(self, reason: FinishReason, usage: Usage) -> list[Body]:
        """Return the last chunk, and the one with the token counts where they were asked for."""
        last = self._chunk("", reason=reason)
        if not self._include_usage:
            return [last]
        return [last, {**_head(self._head, "text_completion"), "choices": [], "usage": usage_body(usage)}]

    def whole(self, text: str, tokens: Sequence[TokenRecord], reason: FinishReason, usage: Usage) -> Body:
        """Return the answer in one piece."""
        return {**self._chunk(text, tokens, reason), "usage": usage_body(usage)}

    def _chunk(self, text: str, tokens: Sequence[TokenRecord] = (), reason: FinishReason | None = None) -> Body:
        logprobs = self._logprobs_body(tokens) if self._logprobs and tokens else None
        choice: Body = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        body: Body = {**_head(self._head, "text_completion"), "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return body

    def _logprobs_body(self, tokens: Sequence[TokenRecord]) -> Body:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(_text(token.piece))
        return {
            "tokens": [_text(token.piece) for token in tokens],
            "token_logprobs": [_logprob(token.logprob or 0.0) for token in tokens],
            "top_logprobs": [
                {_text(choice.piece): _logprob(choice.logprob) for choice in token.alternatives} for token in tokens
            ],
            "text_offset": offsets,
        }


AnswerForm = ChatForm | CompletionForm


def _head(head: AnswerHead, kind: str) -> Body:
    return {
        "id": head.identifier,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


def _choice_body(choice: TokenChoice) -> Body:
    return {"token": _text(choice.piece), "logprob": _logprob(choice.logprob), "bytes": list(choice.piece)}


def _logprob(value: float) -> float:
    return max(value, LEAST_LOGPROB)


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
