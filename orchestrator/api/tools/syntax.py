"""How a model writes tool calls, learned from its chat template. Pure.

Every family of models has its own way, and each template shows earlier calls in exactly the way that its model was
trained to write them. So nothing here knows a model: a conversation with calls of known names and values is rendered,
and what stands between these is the syntax. It may be JSON in some frame::

    <tool_call>\\n{"name": "NAME", "arguments": {...}}\\n</tool_call>
    [TOOL_CALLS]NAME[ARGS]{...}

or one piece of text per argument::

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import ChatTemplateError
from orchestrator.gateway.template import ChatMessage, ChatTemplate, ToolCall

HOLE: Final = "\0"
"""Stands in a syntax's texts for an identifier or number that differs from call to call."""

THOUGHTS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""The marks around what a model thinks before it answers."""

_NAMES: Final = ("probe_call_a", "probe_call_b")
_IDENTIFIERS: Final = ("idx4f7q2a", "idx9k3w8b")
_KEYS: Final = ("probe_key_a", "probe_key_b")
_VALUES: Final = ("probe value a", "probe value b")
_NUMBERS: Final = (1234567, 7654321)
_ANSWER: Final = "probe answer"
_TOOL: Final = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """Between a key and its value; behind the value, before either the next key or the end of the call."""

    middle: str
    end: str


@dataclass(frozen=True, slots=True)
class ArgumentSyntax:
    """One piece of text per argument.

    Behind the call's name comes ``first`` and a key, or ``none`` if there is no argument. Behind each value's own end
    comes ``following`` and the next key, or ``last``.
    """

    first: str
    none: str
    following: str
    last: str
    text: ValueSyntax
    other: ValueSyntax


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written.

    ``begin`` stands in front of the first call's name and starts with ``marker``, by which calls are known from other
    text; then the name, ``middle`` and the arguments as JSON, or as ``arguments`` says (``middle`` is empty then).
    ``between`` leads from the end of the arguments to the next call's name (None: only one call), ``end`` ends the
    last call. Texts may hold :data:`HOLE`.
    """

    begin: str
    marker: str
    middle: str
    between: str | None
    end: str
    arguments: ArgumentSyntax | None = None


PLAIN_SYNTAX: Final = CallSyntax(
    begin='<tool_call>\n{"name": "',
    marker="<tool_call>",
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)
"""For templates that know no tools; the prompt has to explain it (:mod:`orchestrator.api.tools.prompting`)."""


def learn_syntax(template: ChatTemplate, endings: Collection[str] = ()) -> CallSyntax | None:
    """Return how a template's model writes calls; None where the template does not show it.

    ``endings`` are the names of the tokens that end an answer: they are no part of its text.
    """
    if not template.knows_tools:
        return None
    with suppress(ChatTemplateError, _Unlike):
        return _Learner(template, endings).learn()
    return None


def thoughts_of(template: ChatTemplate) -> tuple[str, str] | None:
    """Return the marks around thoughts that a template knows, None where it knows none."""
    return next((marks for marks in THOUGHTS if any(mark in template.source for mark in marks)), None)


class _Unlike(Exception):  # noqa: N818  (it never leaves this module)
    """The rendered text is not of a kind that can be learned."""


class _Learner:
    def __init__(self, template: ChatTemplate, endings: Collection[str]) -> None:
        self._template = template
        self._endings = [ending for ending in endings if ending]
        plain = self._render(_ANSWER)
        self._begin = plain.index(_ANSWER) if _ANSWER in plain else -1
        if self._begin < 0:
            raise _Unlike
        self._plain = plain
        self._turn_end = plain[self._begin + len(_ANSWER) :]

    def learn(self) -> CallSyntax:
        one = self._calls({_KEYS[0]: _VALUES[0]})
        start = self._start(one)
        name = _find(one, _NAMES[0], start)
        begin = self._without_thoughts(one[start:name]).lstrip()
        found = _JSON.search(one, name)
        if found is None:
            return self._learn_arguments(one, begin, name + len(_NAMES[0]))
        middle = one[name + len(_NAMES[0]) : found.start()]
        end = self._end_of_turn(one[found.end() :])
        between = None
        with suppress(ChatTemplateError):
            two = self._calls({_KEYS[0]: _VALUES[0]}, {_KEYS[0]: _VALUES[0]})
            first = _match(_JSON, two, _find(two, _NAMES[0], start))
            second_name = _find(two, _NAMES[1], first.end())
            second = _match(_JSON, two, second_name)
            between = two[first.end() : second_name]
            middle = _alike(middle, two[second_name + len(_NAMES[1]) : second.start()])
        return _syntax(begin, middle, between, end, None)

    def _learn_arguments(self, one: str, begin: str, after_name: int) -> CallSyntax:
        """Learn from calls with none, one and two arguments, of text and of another type."""
        key = _find(one, _KEYS[0], after_name)
        first = one[after_name:key]
        end_of_one = self._end_of_turn(one[_find(one, _VALUES[0], key) + len(_VALUES[0]) :])
        none = self._calls({})
        none_end = self._end_of_turn(none[_find(none, _NAMES[0], self._start(none)) + len(_NAMES[0]) :])
        text, following, last = self._learn_values(_VALUES, end_of_one)
        number = self._calls({_KEYS[0]: _NUMBERS[0]})
        at = _find(number, str(_NUMBERS[0]), _find(number, _KEYS[0], self._start(number)))
        other, _, _ = self._learn_values(_NUMBERS, self._end_of_turn(number[at + len(str(_NUMBERS[0])) :]))
        between = None
        with suppress(ChatTemplateError):
            two = self._calls({_KEYS[0]: _VALUES[0]}, {_KEYS[0]: _VALUES[0]})
            value = _find(two, _VALUES[0], _find(two, _NAMES[0], self._start(two))) + len(_VALUES[0])
            between = two[value : _find(two, _NAMES[1], value)]
        # The end of a value and of a call hang together: what ends all calls alike belongs behind the last value.
        common = last
        if between is not None:
            if not between.startswith(text.end):
                raise _Unlike
            between = between[len(text.end) :]
            common = _common_prefix(last, between)
            between = between[len(common) :]
        end = last[len(common) :]
        if not none_end.endswith(end):
            raise _Unlike
        arguments = ArgumentSyntax(first, none_end[: len(none_end) - len(end)], following, common, text, other)
        return _syntax(begin, "", between, end, arguments)

    def _learn_values(self, values: Sequence[object], end_of_one: str) -> tuple[ValueSyntax, str, str]:
        pair = self._calls(dict(zip(_KEYS, values, strict=True)))
        key = _find(pair, _KEYS[0], self._start(pair))
        value = _find(pair, str(values[0]), key)
        next_key = _find(pair, _KEYS[1], value)
        between = pair[value + len(str(values[0])) : next_key]
        end = _common_prefix(between, end_of_one)
        if not end:
            raise _Unlike
        syntax = ValueSyntax(pair[key + len(_KEYS[0]) : value], end)
        return syntax, between[len(end) :], end_of_one[len(end) :]

    def _calls(self, *arguments: dict[str, object]) -> str:
        calls = tuple(
            ToolCall(name, json.dumps(values), identifier)
            for name, identifier, values in zip(_NAMES, _IDENTIFIERS, arguments, strict=False)
        )
        text = self._render("", calls)
        for identifier in _IDENTIFIERS:
            text = text.replace(identifier, HOLE)
        return text

    def _render(self, content: str, calls: tuple[ToolCall, ...] = ()) -> str:
        messages = [ChatMessage("user", "Probe."), ChatMessage("assistant", content, tool_calls=calls)]
        return self._template.render(messages, tools=[_TOOL], answer_next=False)

    def _start(self, text: str) -> int:
        """Return where the assistant's words begin: where the text leaves that of an answer without calls."""
        if text.startswith(self._plain[: self._begin]):
            return self._begin
        start = len(_common_prefix(text, self._plain[: self._begin]))
        # Two marks may begin alike; one that is cut open does not count.
        for opening, closing in (("<", ">"), ("[", "]")):
            cut = text.rfind(opening, 0, start)
            if cut > text.rfind(closing, 0, start):
                start = cut
        return start

    def _end_of_turn(self, text: str) -> str:
        """Cut off what ends every answer: the end tokens, and the last marks of an answer without calls."""
        text = text[: min((text.find(ending) for ending in self._endings if ending in text), default=len(text))]
        marks = self._turn_end.strip()
        for start in (0, *(at.start() for at in re.finditer(r"[<\[]", marks))):
            if marks[start:] and text.rstrip().endswith(marks[start:]):
                return text.rstrip()[: -len(marks[start:])].rstrip()
        return text.rstrip()

    def _without_thoughts(self, text: str) -> str:
        for _, mark in THOUGHTS:
            text = text.rpartition(mark)[2]
        return text


_JSON: Final = re.compile(rf'\{{\s*"{_KEYS[0]}"\s*:\s*"{_VALUES[0]}"\s*\}}')


def _syntax(begin: str, middle: str, between: str | None, end: str, arguments: ArgumentSyntax | None) -> CallSyntax:
    marker = re.match(r"[^\w\s{(].*?[>\])]", begin)
    found = begin if marker is None else marker[0]
    # Without a mark of some length any text might be the beginning of a call.
    if len(found) < 3 or HOLE in found or (arguments is None and not middle):
        raise _Unlike
    syntax = CallSyntax(begin, found, middle, between, end, arguments)
    if "probe" in repr(syntax):  # a name or key is written a second time: not of a kind known here
        raise _Unlike
    return syntax


def _find(text: str, part: str, start: int) -> int:
    at = text.find(part, start)
    if at < 0:
        raise _Unlike
    return at


def _match(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str]:
    found = pattern.search(text, start)
    if found is None:
        raise _Unlike
    return found


def _alike(one: str, other: str) -> str:
    """Return what two texts share; numbers that differ, such as a call's index, become a hole."""
    if one == other:
        return one
    if re.sub(r"\d+", HOLE, one) != re.sub(r"\d+", HOLE, other):
        raise _Unlike
    return re.sub(r"\d+", HOLE, one)


def _common_prefix(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]
