"""Answers in channels, as gpt-oss writes them: thoughts, calls and text are messages of their own. Pure.

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The prompt ends behind ``<|start|>assistant``. A call ends the answer, so there is one at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from orchestrator.api.constraints.writer import GrammarWriter, Words, text_until
from orchestrator.api.tools.grammar import Tool, json_arguments
from orchestrator.api.tools.reader import CallBegins, CallContinues, Piece, Said, Thought

MARKS: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")

_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([\w.:-]+)")


def has_channels(template_source: str) -> bool:
    """Tell whether a chat template is of this kind."""
    return "<|channel|>" in template_source and "<|message|>" in template_source


def channels_element(writer: GrammarWriter, *, body: str | None, tools: Sequence[Tool], required: bool) -> str:
    """Return the element of an answer whose text follows ``body`` (None: any) or that calls one of the tools."""
    ends = []
    if not required:
        ends.append(f'"<|channel|>final<|message|>" {body if body is not None else ".*"}')
    if tools:
        kind = writer.add("kind", '(" <|constrain|>json" | " json" | " ")? "<|message|>"')
        calls = Words({tool.name: f"{kind} {json_arguments(writer, tool)}" for tool in tools})
        ends.append(f'"<|channel|>commentary to=functions." {calls.any_of(writer, "call")}')
    messages = writer.reserve("messages")
    more = text_until(writer, "<|end|>", f'"<|start|>assistant" {messages}', may_end=False)
    ends.append(f'"<|channel|>analysis<|message|>" {more}')
    if body is None and not required:  # what it says before it calls
        ends.append(f'"<|channel|>commentary<|message|>" {more}')
    return writer.define(messages, " | ".join(ends))


class ChannelReader:
    """Text in, pieces out; see :class:`orchestrator.api.tools.reader.AnswerReader`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._emit: Callable[[str], None] = self._say
        self._in_body = False
        self._index = -1

    def feed(self, text: str) -> list[Piece]:
        """Take new text and return what is certain now."""
        self._buffer += text
        while self._body() if self._in_body else self._head():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest when no more text will come."""
        rest, self._buffer = self._buffer, ""
        if rest and (self._in_body or not rest.startswith(("<|", "assistant", " to="))):
            self._emit(rest)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _head(self) -> bool:
        """Read up to where a message begins, and find out what it is."""
        head, found, rest = self._buffer.partition("<|message|>")
        if not found:
            return False
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and recipient[1] != "assistant":
            self._index += 1
            self._pieces.append(CallBegins(self._index, recipient[1]))
            self._emit = self._call
        else:
            self._emit = self._think if channel is not None and channel[1] == "analysis" else self._say
        self._buffer, self._in_body = rest, True
        return True

    def _body(self) -> bool:
        places = [(at, mark) for mark in _ENDS if (at := self._buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._emit(self._buffer[:at])
            self._buffer, self._in_body = self._buffer[at + len(mark) :], False
            return True
        held = max((_overlap(self._buffer, mark) for mark in _ENDS), default=0)
        certain = len(self._buffer) - held
        self._emit(self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Said(text))

    def _think(self, text: str) -> None:
        if text:
            self._pieces.append(Thought(text))

    def _call(self, text: str) -> None:
        if text:
            self._pieces.append(CallContinues(self._index, text))


def _overlap(text: str, mark: str) -> int:
    """Return how much of a mark's beginning a text ends with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
