"""Read an answer as it comes: thoughts, text, and tool calls with their arguments. Pure.

Text arrives in pieces that may end anywhere, so what may be the beginning of a mark is held back. Nothing here
raises: an answer that breaks its syntax (only possible when it is cut off) ends where it ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from orchestrator.api.tools.syntax import HOLE, ArgumentSyntax, CallSyntax, ValueSyntax

_MORE: Final = 40
"""Most characters that a hole takes."""


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model thinks to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The model calls a tool; ``index`` counts the calls of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallContinues:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Said | Thought | CallBegins | CallContinues


class Reader(Protocol):
    """Text in, pieces out."""

    def feed(self, text: str) -> list[Piece]:
        """Take new text and return what is certain now."""

    def finish(self) -> list[Piece]:
        """Return the rest when no more text will come."""


class AnswerReader:
    """Text in, pieces out.

    ``syntax`` None: there are no calls. ``thoughts`` None: there are no thoughts; ``inside``: the prompt has begun
    them. ``is_text`` (tool, argument) tells for a syntax with one text per argument which ones are text.
    """

    def __init__(
        self,
        syntax: CallSyntax | None = None,
        thoughts: tuple[str, str] | None = None,
        *,
        inside: bool = False,
        is_text: Callable[[str, str], bool] = lambda tool, argument: False,
    ) -> None:
        self._syntax = syntax
        self._thoughts = thoughts
        self._is_text = is_text
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._state = self._thought if inside else self._start if thoughts else self._text
        self._blank = True  # nothing but white space so far in this part
        self._index = -1
        self._name = ""
        self._scanner = _ObjectScanner()
        self._value: ValueSyntax | None = None
        self._keys = 0
        self._value_begun = False
        self._finishing = False

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._index + 1

    def feed(self, text: str) -> list[Piece]:
        """Take new text and return what is certain now."""
        self._buffer += text
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest when no more text will come."""
        self._finishing = True
        pieces = self.feed("")
        rest, self._buffer = self._buffer, ""
        if rest and self._state in (self._start, self._text):
            pieces.append(Said(rest))
        elif rest.strip() and self._state == self._thought:
            pieces.append(Thought(rest))
        return pieces

    # --- states: each returns whether there is more to do -------------------------------------------------------

    def _start(self) -> bool:
        opening = self._thoughts[0] if self._thoughts else ""
        text = self._buffer.lstrip()
        if text.startswith(opening):
            self._buffer = text[len(opening) :]
            self._state = self._thought
        elif opening.startswith(text) and not self._finishing:
            return False
        else:
            self._state = self._text
        return True

    def _thought(self) -> bool:
        closing = self._thoughts[1] if self._thoughts else ""
        self._strip_beginning()
        before, found, after = self._buffer.partition(closing)
        if found:
            self._emit_thought(before.rstrip())
            self._buffer, self._blank = after, True
            self._state = self._after_thought
            return True
        self._emit_thought(self._take_certain(closing))
        return False

    def _after_thought(self) -> bool:
        self._strip_beginning()
        if not self._buffer:
            return False
        self._state = self._text
        return True

    def _text(self) -> bool:
        if self._syntax is None:
            self._emit_text(self._take(len(self._buffer)))
            return False
        before, found, after = self._buffer.partition(self._syntax.marker)
        if not found:
            self._emit_text(self._take_certain(self._syntax.marker))
            return False
        self._emit_text(before.rstrip())
        self._buffer = after
        self._state = self._begin
        return True

    def _begin(self) -> bool:
        syntax = self._calls_syntax
        return self._expect((syntax.begin[len(syntax.marker) :], self._call_name), (None, self._text))

    def _call_name(self) -> bool:
        arguments = self._calls_syntax.arguments
        if arguments is not None:
            return self._spread_name(arguments)
        found = _pattern(self._calls_syntax.middle).search(self._buffer)
        if found is None:
            return False
        self._begin_call(self._buffer[: found.start()])
        self._buffer = self._buffer[found.end() :]
        self._scanner = _ObjectScanner()
        self._state = self._json_arguments
        return True

    def _json_arguments(self) -> bool:
        taken = self._take(self._scanner.scan(self._buffer))
        if taken:
            self._continue_call(taken)
        if not self._scanner.complete:
            return False
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        syntax = self._calls_syntax
        ways = [(syntax.between, self._call_name)] if syntax.between is not None else []
        return self._expect(*ways, (syntax.end, self._text), (None, self._text))

    # --- arguments that are written one by one ------------------------------------------------------------------

    def _spread_name(self, syntax: ArgumentSyntax) -> bool:
        ends = {syntax.first: self._key, syntax.none: self._after_call}
        places = {end: at for end in ends if (at := self._buffer.find(end)) >= 0}
        if not places:
            return False
        end = min(places, key=lambda end: (places[end], -len(end)))
        self._begin_call(self._take(places[end]))
        self._take(len(end))
        self._keys = 0
        self._state = ends[end]
        if end == syntax.none:
            self._continue_call("{}")
        return True

    def _key(self) -> bool:
        syntax = self._spread_syntax
        places = {value: at for value in (syntax.text, syntax.other) if (at := self._buffer.find(value.middle)) >= 0}
        if not places:
            return False
        self._value = min(places, key=lambda value: places[value])
        key = self._take(places[self._value])
        self._take(len(self._value.middle))
        self._continue_call(("{" if self._keys == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys += 1
        self._value_begun = False
        self._state = self._text_value if self._is_text(self._name, key) else self._other_value
        return True

    def _text_value(self) -> bool:
        end = self._value.end if self._value else ""
        before, found, after = self._buffer.partition(end)
        text = before if found else self._take_certain(end, keep_space=False)
        quoted = json.dumps(text, ensure_ascii=False)[1:-1]
        self._continue_call(("" if self._value_begun else '"') + quoted + ('"' if found else ""))
        self._value_begun = True
        if not found:
            return False
        self._buffer = after
        self._state = self._after_value
        return True

    def _other_value(self) -> bool:
        end = self._value.end if self._value else ""
        before, found, after = self._buffer.partition(end)
        if not found:
            return False
        try:
            value = json.dumps(json.loads(before), ensure_ascii=False)
        except ValueError:
            value = json.dumps(before, ensure_ascii=False)
        self._continue_call(value)
        self._buffer = after
        self._state = self._after_value
        return True

    def _after_value(self) -> bool:
        syntax = self._spread_syntax
        return self._expect(
            (syntax.following, self._key), (syntax.last, self._end_arguments), (None, self._end_arguments)
        )

    def _end_arguments(self) -> bool:
        self._continue_call("}")
        self._state = self._after_call
        return True

    # --- parts --------------------------------------------------------------------------------------------------

    @property
    def _calls_syntax(self) -> CallSyntax:
        if self._syntax is None:
            raise LookupError("there are no calls")
        return self._syntax

    @property
    def _spread_syntax(self) -> ArgumentSyntax:
        if self._calls_syntax.arguments is None:
            raise LookupError("the arguments are one piece of JSON")
        return self._calls_syntax.arguments

    def _expect(self, *ways: tuple[str | None, Callable[[], bool]]) -> bool:
        """Go on in the first way whose text comes next; wait while one still may; None takes anything."""
        for text, state in ways:
            if text is None:
                self._state = state
                return True
            found = _pattern(text).match(self._buffer)
            if found is not None:
                self._take(found.end())
                self._state = state
                return True
            if _may_become(self._buffer, text):
                return False
        return False

    def _begin_call(self, name: str) -> None:
        self._index += 1
        self._name = name
        self._pieces.append(CallBegins(self._index, name))

    def _continue_call(self, text: str) -> None:
        if text:
            self._pieces.append(CallContinues(self._index, text))

    def _emit_text(self, text: str) -> None:
        if text:
            self._pieces.append(Said(text))

    def _emit_thought(self, text: str) -> None:
        if text:
            self._pieces.append(Thought(text))

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _take_certain(self, mark: str, *, keep_space: bool = True) -> str:
        """Take what is surely not part of a mark that may follow, nor white space in front of it."""
        if self._finishing:
            return self._take(len(self._buffer))
        held = next(
            (n for n in range(min(len(mark) - 1, len(self._buffer)), 0, -1) if self._buffer.endswith(mark[:n])), 0
        )
        certain = self._buffer[: len(self._buffer) - held]
        if keep_space:
            certain = certain.rstrip()
        return self._take(len(certain))

    def _strip_beginning(self) -> None:
        if self._blank:
            self._buffer = self._buffer.lstrip()
            self._blank = not self._buffer


class _ObjectScanner:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def scan(self, text: str) -> int:
        """Return how much of a text belongs to the object."""
        for position, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            if self._depth <= 0 and not self._in_string and not character.isspace():
                self.complete = True
                return position + 1
        return len(text)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"[a-zA-Z0-9._-]{{1,{_MORE}}}".join(re.escape(part) for part in text.split(HOLE)))


def _may_become(beginning: str, text: str) -> bool:
    """Tell whether a text of a syntax may begin with what is there."""
    if HOLE not in text:
        return text.startswith(beginning)
    head, _, rest = text.partition(HOLE)
    if not beginning.startswith(head):
        return head.startswith(beginning)
    beyond = beginning[len(head) :]
    taken = re.match(rf"[a-zA-Z0-9._-]{{0,{_MORE}}}", beyond)
    return taken is not None and _may_become(beyond[taken.end() :], rest)
