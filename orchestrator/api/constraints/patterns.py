"""Regular expressions of JSON Schema as grammars of JSON strings. Pure.

What is written inside of the quotes is JSON, so a character that needs an escape there is written as that escape.
"""

from __future__ import annotations

from typing import Final

from orchestrator.api.constraints.writer import GrammarWriter, character_set

Ranges = list[tuple[int, int]]

MAX_DEPTH: Final = 24
_LAST: Final = 0x10FFFF
_CONTROL: Final = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0xD800, 0xDFFF))
_JSON_ESCAPES: Final = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}

_DIGIT: Final[Ranges] = [(0x30, 0x39)]
_WORD: Final[Ranges] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Final[Ranges] = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x2028, 0x2029)]
_LINE_ENDS: Final[Ranges] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_CONTROLS: Final = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}


class UnsupportedPattern(ValueError):  # noqa: N818  (it is the converter's word for "refuse this")
    """A part of a pattern that cannot be a grammar; the text says which."""


def string_pattern(pattern: str, writer: GrammarWriter, hint: str) -> str:
    """Return an element for the JSON strings that match a pattern, quotes included.

    As JSON Schema has it, a pattern may match anywhere in the string unless it says ``^`` and ``$``. Raises
    :class:`UnsupportedPattern`.
    """
    body = _PatternReader(pattern, writer).whole()
    return writer.add(hint, f'"\\"" ({body}) "\\""')


def complement(ranges: Ranges) -> Ranges:
    """Return all other code points."""
    found, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    if begin <= _LAST:
        found.append((begin, _LAST))
    return found


def json_characters(ranges: Ranges) -> str:
    """Return an element for one character of a set as it is written inside of a JSON string."""
    plain = complement([*complement(ranges), *_CONTROL])
    alternatives = [character_set(plain)] if plain else []
    for code, escape in _JSON_ESCAPES.items():
        if any(low <= code <= high for low, high in ranges):
            alternatives.append('"' + escape.replace("\\", "\\\\").replace('"', '\\"') + '"')
    if not alternatives:
        raise UnsupportedPattern("asks for a character that no text holds")
    return alternatives[0] if len(alternatives) == 1 else "(" + " | ".join(alternatives) + ")"


class _PatternReader:
    def __init__(self, pattern: str, writer: GrammarWriter) -> None:
        self._pattern = pattern
        self._writer = writer
        self._at = 0
        self._depth = 0

    def whole(self) -> str:
        alternatives = []
        while True:
            begins = self._take("^")
            body = self._sequence()
            ends = self._take("$")
            anything = "" if begins and ends else f"{self._writer.json('char')}*"
            parts = ["" if begins else anything, body, "" if ends else anything]
            alternatives.append(" ".join(part for part in parts if part) or '""')
            if not self._take("|"):
                break
        if self._at < len(self._pattern):
            raise UnsupportedPattern(f"has {self._pattern[self._at]!r} where it cannot be")
        return " | ".join(alternatives)

    def _alternatives(self) -> str:
        alternatives = [self._sequence() or '""']
        while self._take("|"):
            alternatives.append(self._sequence() or '""')
        return " | ".join(alternatives)

    def _sequence(self) -> str:
        parts = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)$^":
            parts.append(self._quantified())
        return " ".join(parts)

    def _quantified(self) -> str:
        atom = self._atom()
        sign = self._next()
        if sign in ("*", "+", "?"):
            self._at += 1
            atom += sign
        elif sign == "{":
            end = self._pattern.find("}", self._at)
            low, comma, high = self._pattern[self._at + 1 : end].partition(",")
            if end < 0 or not _is_count(low) or (high and not _is_count(high)):
                raise UnsupportedPattern("has a '{' that is no repetition")
            if high and int(high) < int(low):
                raise UnsupportedPattern("has a repetition with its bounds the wrong way round")
            self._at = end + 1
            atom += f"{{{low}{comma}{high}}}"
        else:
            return atom
        self._take("?")  # "as few as possible" matches the same strings
        if self._next() in ("*", "+", "?", "{"):
            raise UnsupportedPattern("repeats a repetition")
        return atom

    def _atom(self) -> str:
        character = self._pattern[self._at]
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return json_characters(self._set())
        if character == ".":
            return json_characters(complement(_LINE_ENDS))
        if character == "\\":
            return json_characters(self._escape())
        if character in "*+?{":
            raise UnsupportedPattern(f"has nothing in front of {character!r}")
        return json_characters([(ord(character), ord(character))])

    def _group(self) -> str:
        if self._take("?") and not self._take(":"):
            raise UnsupportedPattern("looks ahead, looks back, or names a group")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnsupportedPattern("is nested too deep")
        body = self._alternatives()
        if not self._take(")"):
            raise UnsupportedPattern("has a group without end, or an anchor inside of one")
        self._depth -= 1
        return f"({body})"

    def _set(self) -> Ranges:
        negated = self._take("^")
        ranges: Ranges = []
        while not self._take("]"):
            low = self._member()
            if self._next() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or high[0][1] < low[0][0]:
                    raise UnsupportedPattern("has a range in a set that is none")
                low = [(low[0][0], high[0][1])]
            ranges += low
        return complement(ranges) if negated else ranges

    def _member(self) -> Ranges:
        character = self._next()
        if character is None:
            raise UnsupportedPattern("has a set without end")
        self._at += 1
        return self._escape() if character == "\\" else [(ord(character), ord(character))]

    def _escape(self) -> Ranges:
        character = self._next()
        if character is None:
            raise UnsupportedPattern("ends with a backslash")
        self._at += 1
        kinds = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
        if character.lower() in kinds:
            ranges = kinds[character.lower()]
            return list(ranges) if character.islower() else complement(ranges)
        if character in _CONTROLS:
            return [(_CONTROLS[character], _CONTROLS[character])]
        if character in "xu":
            return [self._number(2 if character == "x" else 4)]
        if character.isalnum():
            raise UnsupportedPattern(f"has '\\{character}'")
        return [(ord(character), ord(character))]

    def _number(self, length: int) -> tuple[int, int]:
        digits = self._pattern[self._at : self._at + length]
        self._at += length
        if len(digits) != length or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise UnsupportedPattern("has an incomplete number of a character")
        return int(digits, 16), int(digits, 16)

    def _next(self) -> str | None:
        return self._pattern[self._at] if self._at < len(self._pattern) else None

    def _take(self, character: str) -> bool:
        found = self._next() == character
        self._at += found
        return found


def _is_count(text: str) -> bool:
    return 0 < len(text) <= 4 and text.isascii() and text.isdecimal()
