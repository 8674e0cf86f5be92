"""The Responses API, as far as it is text: its requests parsed, its answers whole and as named events. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.api.fields import Fields, invalid, unsupported
from orchestrator.api.formats import ANY_FORMAT, AnswerFormat, parse_response_format
from orchestrator.api.messages import parse_content
from orchestrator.api.schema import MAX_TOKENS, ChatRequest, GenerationOptions, ModelNames, parse_sampling
from orchestrator.api.stream import AnswerHead, Body, ChatAnswer
from orchestrator.api.tools.reader import Piece, Reader, Said, Thought
from orchestrator.gateway.sequence import Finished, TextDelta, Usage
from orchestrator.gateway.template import ChatMessage

RESPONSE_FIELDS: Final = frozenset(
    {
        "model",
        "input",
        "instructions",
        "max_output_tokens",
        "temperature",
        "top_p",
        "stream",
        "stream_options",
        "text",
        "reasoning",
        "prompt_cache_key",
        "metadata",
    }
)
IGNORED_FIELDS: Final = frozenset(
    {
        "store",
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "max_tool_calls",
        "parallel_tool_calls",
        "context_management",
    }
)
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
}
_TEXTS: Final = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A conversation to continue, and what the answer repeats of its request."""

    chat: ChatRequest
    echo: Mapping[str, object]


def parse_response_request(body: object, names: ModelNames, fresh_seed: int) -> ResponseRequest:
    """Parse the body of ``/v1/responses``. Raises :class:`RequestError` with the field's name."""
    fields = Fields(body)
    fields.refuse_unknown(RESPONSE_FIELDS | IGNORED_FIELDS | set(_NEUTRAL))
    for name in sorted(_NEUTRAL):
        if fields.get(name) is not None and fields.get(name) not in _NEUTRAL[name]:
            raise unsupported(name, "is not supported by this server, which keeps no answers and runs no tools")
    names.check(fields.text("model"))
    text = Fields(fields.mapping("text"), "text")
    text.refuse_unknown({"format", "verbosity"})
    wanted = text.get("format")
    answer_format = ANY_FORMAT if wanted is None else _format(Fields(wanted, "text.format"))
    reasoning = Fields(fields.mapping("reasoning"), "reasoning")
    effort = reasoning.text("effort") or None
    sampling = parse_sampling(fields, fresh_seed)
    options = GenerationOptions(
        max_tokens=fields.optional_integer("max_output_tokens", 1, MAX_TOKENS),
        sampling=sampling,
        stop=(),
        top_logprobs=None,
        ignore_end=False,
        stream=fields.flag("stream"),
        include_usage=True,
        format=answer_format,
        session=fields.text("prompt_cache_key"),
    )
    instructions = fields.text("instructions") or None
    messages = _messages(fields)
    if instructions is not None:
        messages = (ChatMessage("system", instructions), *messages)
    echo = {
        "instructions": instructions,
        "max_output_tokens": options.max_tokens,
        "metadata": dict(fields.mapping("metadata")),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": wanted or {"type": "text"}},
    }
    variables = {} if effort is None else {"reasoning_effort": effort}
    return ResponseRequest(ChatRequest(messages, options, variables), echo)


def _format(fields: Fields) -> AnswerFormat:
    fields.refuse_unknown({"type", "name", "description", "schema", "strict"})
    inner = {name: fields.get(name) for name in ("type", "schema") if fields.get(name) is not None}
    return parse_response_format(inner, "text.format")


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    value = fields.get("input")
    if isinstance(value, str):
        return (ChatMessage("user", value),)
    messages = []
    for number, item in enumerate(fields.items("input")):
        entry = Fields(item, f"input[{number}]")
        kind = entry.text("type", "message")
        if kind == "reasoning":
            continue  # earlier thoughts; templates show none
        if kind != "message":
            raise unsupported(entry.name("type"), f"{kind!r} is not supported: this server reads messages only")
        role = entry.text("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise invalid(entry.name("role"), "must be user, assistant, system or developer")
        messages.append(ChatMessage("system" if role == "developer" else role, parse_content(entry, _TEXTS)))
    if not messages:
        raise invalid("input", "must be a text or hold at least one message")
    return tuple(messages)


class ResponseForm:
    """The shape of ``/v1/responses``: one answer; in a stream every step of its making is an event."""

    final = b""

    def __init__(self, head: AnswerHead, reader: Reader, echo: Mapping[str, object]) -> None:
        self._head = head
        self._echo = echo
        self._answer = ChatAnswer(reader, lambda: "")
        self._number = 0
        self._items: list[str] = []  # identifiers of the output's items, the open one last
        self._open: type[Piece] | None = None
        self._usage: Usage | None = None

    def opening(self) -> list[Body]:
        """Return the first two events."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta(self, answer: int, delta: TextDelta) -> list[Body]:
        """Return events for new text."""
        return self._events(self._answer.take(delta)[0])

    def ending(self, answer: int, end: Finished) -> list[Body]:
        """Return the events that end the last item."""
        events = self._events(self._answer.end(end.reason)[0])
        if self._open is not Said and not self._answer.said:
            events += self._begin(Said)  # an answer without any text still has an item
        return events + self._end_item()

    def closing(self, usage: Usage) -> list[Body]:
        """Return the last event, with the whole answer."""
        body = self.whole(usage)
        return [self._event(f"response.{body['status']}", response=body)]

    def whole(self, usage: Usage) -> Body:
        """Return the answer in one piece."""
        self._usage = usage
        return self._response("incomplete" if self._answer.reason == "length" else "completed")

    def _events(self, pieces: list[Piece]) -> list[Body]:
        events = []
        for piece in pieces:
            if not isinstance(piece, Said | Thought):
                continue
            if self._open is not type(piece):
                events += self._end_item() + self._begin(type(piece))
            kind = "output_text" if isinstance(piece, Said) else "reasoning_text"
            events.append(
                self._event(f"response.{kind}.delta", delta=piece.text, **self._place(), **_no_logprobs(kind))
            )
        return events

    def _begin(self, kind: type[Piece]) -> list[Body]:
        self._open = kind
        prefix = "msg_" if kind is Said else "rs_"
        self._items.append(prefix + self._head.identifier.removeprefix("resp_") + str(len(self._items)))
        item = self._item(kind, self._items[-1], "", "in_progress")
        events = [self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)]
        return [*events, self._event("response.content_part.added", part=_part(kind, ""), **self._place())]

    def _end_item(self) -> list[Body]:
        kind, self._open = self._open, None
        if kind is None:
            return []
        text = self._answer.said if kind is Said else self._answer.thought
        name = "output_text" if kind is Said else "reasoning_text"
        item = self._item(kind, self._items[-1], text, "completed")
        return [
            self._event(f"response.{name}.done", text=text, **self._place(), **_no_logprobs(name)),
            self._event("response.content_part.done", part=_part(kind, text), **self._place()),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _place(self) -> Body:
        return {"item_id": self._items[-1], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> Body:
        body: Body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return body

    def _item(self, kind: type[Piece], identifier: str, text: str, status: str) -> Body:
        content = [_part(kind, text)] if text or status != "in_progress" else []
        if kind is Said:
            return {"type": "message", "id": identifier, "status": status, "role": "assistant", "content": content}
        return {"type": "reasoning", "id": identifier, "status": status, "summary": [], "content": content}

    def _response(self, status: str) -> Body:
        output: list[Body] = []
        for identifier in self._items:
            kind = Said if identifier.startswith("msg_") else Thought
            text = self._answer.said if kind is Said else self._answer.thought
            output.append(self._item(kind, identifier, text, "completed" if status == "completed" else status))
        return {
            "id": self._head.identifier,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "model": self._head.model,
            "output": [] if status == "in_progress" else output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if self._usage is None else _usage_body(self._usage),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            **self._echo,
        }


def _part(kind: type[Piece], text: str) -> Body:
    if kind is Said:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _no_logprobs(kind: str) -> Body:
    return {"logprobs": []} if kind == "output_text" else {}


def _usage_body(usage: Usage) -> Body:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
