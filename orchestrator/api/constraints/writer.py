"""Write grammars as GBNF text: rules with names of their own, literals, and the JSON values. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

_NO_NAME: Final = re.compile(r"[^a-zA-Z0-9]+")
_SPECIAL: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}

JSON_RULES: Final = {
    # Room for pretty printing, but not for a model that goes on with spaces for ever.
    "space": r'(" " | "\n" [ \t]{0,24})?',
    "hex": r"[0-9a-fA-F]",
    # Half of a surrogate pair is no text, though JSON can spell it.
    "char": r'[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" ([0-9abcefABCEF] hex | [dD] [0-7]) hex hex)',
    "string": r'"\"" char* "\""',
    "whole": r'"0" | [1-9] [0-9]{0,15}',
    "integer": r'"-"? whole',
    "number": r'"-"? whole ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": r'"true" | "false"',
    "null": r'"null"',
    "value": r"object | array | string | number | boolean | null",
    "object": r'"{" space (string ":" space value ("," space string ":" space value)*)? space "}"',
    "array": r'"[" space (value ("," space value)*)? space "]"',
}
"""JSON as models write it: at most one space or line break between its parts."""


class GrammarWriter:
    """Collects rules; the names that it gives are unique."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def reserve(self, hint: str) -> str:
        """Return a new name, similar to a hint, for a rule to be defined later."""
        base = _NO_NAME.sub("-", hint).strip("-")[:40] or "rule"
        name, number = base, 1
        while name in self._rules or name in JSON_RULES or name == "root":
            number += 1
            name = f"{base}-{number}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str) -> str:
        """Give a rule its body; returns the name."""
        self._rules[name] = body
        return name

    def add(self, hint: str, body: str) -> str:
        """Add a rule and return its name."""
        return self.define(self.reserve(hint), body)

    def json(self, name: str) -> str:
        """Make sure that a rule of :data:`JSON_RULES` is there, with those it uses; returns its name."""
        if name not in self._rules:
            self._rules[name] = JSON_RULES[name]
            for used in re.findall(
                r"[a-z]+", re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', " ", JSON_RULES[name])
            ):
                self.json(used)
        return name

    def text(self, root: str) -> str:
        """Return the grammar; ``root`` is the body of its first rule."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._rules.items())])


def literal(text: str) -> str:
    """Return a text as a GBNF literal."""
    return '"' + "".join(_SPECIAL.get(c) or (c if c >= " " else f"\\x{ord(c):02X}") for c in text) + '"'


def union(elements: Iterable[str]) -> str:
    """Return one of several elements, in brackets where there is more than one."""
    alternatives = list(dict.fromkeys(elements))
    return alternatives[0] if len(alternatives) == 1 else "(" + " | ".join(alternatives) + ")"


def character_set(ranges: Iterable[tuple[int, int]]) -> str:
    """Return the set of the code points of some ranges, both ends included."""
    parts = [_code(low) + ("" if low == high else "-" + _code(high)) for low, high in ranges]
    return "[" + "".join(parts) + "]"


def _code(value: int) -> str:
    character = chr(value)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{value:02X}" if value < 0x100 else f"\\u{value:04X}" if value < 0x10000 else f"\\U{value:08X}"


class Words:
    """A set of words as a tree of their letters, so that a grammar has one way to read each beginning.

    A mapping gives each word what follows it, as an element.
    """

    def __init__(self, words: Iterable[str] | Mapping[str, str]) -> None:
        self._children: dict[str, Words] = {}
        self._then: str | None = None  # what follows the word that ends here
        for word, then in words.items() if isinstance(words, Mapping) else ((word, "") for word in words):
            self._insert(word, then)

    def _insert(self, word: str, then: str) -> None:
        node = self
        for letter in word:
            node = node._children.setdefault(letter, Words(()))
        node._then = then

    def any_of(self, writer: GrammarWriter, hint: str) -> str:
        """Return an element that reads one of the words and what follows it."""
        alternatives = [] if self._then is None else [self._then or '""']
        for letter, child in self._children.items():
            run, node = letter, child
            while len(node._children) == 1 and node._then is None:
                ((following, node),) = node._children.items()
                run += following
            rest = node.any_of(writer, hint)
            alternatives.append(literal(run) if rest == '""' else f"{literal(run)} {rest}")
        body = " | ".join(alternatives)
        return writer.add(hint, body) if len(alternatives) > 1 else body

    def none_of(self, writer: GrammarWriter, hint: str, letters: str) -> str:
        """Return an element that reads any word over some letters (ranges inside of a set) but these."""
        here = "".join(_code(ord(letter)) for letter in self._children)
        alternatives = ['""'] if self._then is None else []
        alternatives.append(f"[^{here}{letters}] [^{letters}]*")
        for letter, child in self._children.items():
            alternatives.append(f"{literal(letter)} {child.none_of(writer, hint, letters)}")
        return writer.add(hint, " | ".join(alternatives))


def text_until(writer: GrammarWriter, marker: str, then: str, *, may_end: bool) -> str:
    """Return an element: any text up to a marker, the marker, then ``then``.

    With ``may_end`` the text may also end without the marker. Of the marker's beginning that the text holds, each
    rule knows how much it is, as in the search of Knuth, Morris and Pratt: so there is only one way to read a text.
    """
    names = [writer.reserve("text") for _ in marker]
    fall_back = [0]
    for length in range(1, len(marker)):
        state = fall_back[length - 1] if length > 1 else 0
        while state and marker[state] != marker[length - 1]:
            state = fall_back[state]
        fall_back.append(state + 1 if length > 1 and marker[state] == marker[length - 1] else 0)
    for matched, name in enumerate(names):
        alternatives = ['""'] if may_end else []
        others = ""
        for letter in dict.fromkeys(marker):
            state = matched
            while state and marker[state] != letter:
                state = fall_back[state]
            following = state + 1 if marker[state] == letter else 0
            if following == len(marker):
                alternatives.append(f"{literal(letter)} {then}".rstrip())
            elif following:
                alternatives.append(f"{literal(letter)} {names[following]}")
            else:
                continue
            others += _code(ord(letter))
        alternatives.append(f"[^{others}] {names[0]}")
        writer.define(name, " | ".join(alternatives))
    return names[0]
