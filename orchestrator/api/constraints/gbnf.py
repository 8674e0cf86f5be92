"""Parse a grammar in GBNF, the notation of llama.cpp, before the engine gets it. Pure.

The engine has a parser of its own. This one stands in front of it for three reasons: it says what is wrong and in
which line; the engine prints a wrong grammar to the terminal; and some grammars would hang or exhaust the process
(deep nesting, ``{3,2}``, left recursion behind a rule that may be empty, rules whose beginnings branch again and
again).

    rule ::= "text" [a-z] [^0-9] . other-rule ( a | b ) x* x+ x? x{2,5} <[42]> !<[42]>     # comment
"""

from __future__ import annotations

from typing import Final

from orchestrator.api.constraints.checks import check_rules
from orchestrator.api.constraints.rules import Characters, Choice, Element, Reference, Repeat, Rules, Token
from orchestrator.errors import RequestError

ROOT: Final = "root"
MAX_LENGTH: Final = 256 << 10
MAX_NESTING: Final = 64
MAX_REPEATS: Final = 2000
"""The engine's own limit; a larger upper bound counts as none there, so it is refused here."""
MAX_OPERATORS: Final = 4
"""Most repetition operators in a row behind one element."""

_ESCAPES: Final = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_LENGTH: Final = {"x": 2, "u": 4, "U": 8}


def parse_grammar(text: str, param: str = "grammar") -> Rules:
    """Return the rules of a grammar that the engine can use.

    Raises :class:`RequestError` (400) with the line and what is wrong there; ``param`` is the field it came from.
    """
    if len(text) > MAX_LENGTH:
        raise _error(f"is longer than {MAX_LENGTH} characters", param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _error("is not valid Unicode text", param) from None
    rules = _Parser(text, param).rules()
    if ROOT not in rules:
        raise _error(f"has no rule {ROOT!r}", param)
    problem = check_rules(rules)
    if problem is not None:
        raise _error(problem, param)
    return rules


def _error(problem: str, param: str) -> RequestError:
    return RequestError(f"the grammar {problem}", code="invalid_grammar", param=param)


class _Parser:
    """Recursive descent over the text; ``at`` is the position of the next character."""

    def __init__(self, text: str, param: str) -> None:
        self._text = text
        self._param = param
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Choice]:
        rules: dict[str, Choice] = {}
        self._space(newlines=True)
        while self._at < len(self._text):
            name = self._name()
            self._space(newlines=False)
            if not self._text.startswith("::=", self._at):
                raise self._wrong("'::=' is missing")
            self._at += 3
            if name in rules:
                raise self._wrong(f"rule {name!r} is there twice")
            self._space(newlines=True)
            rules[name] = self._choice(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._wrong(f"{self._text[self._at]!r} is out of place")
            self._space(newlines=True)
        return rules

    def _choice(self, *, nested: bool) -> Choice:
        alternatives = [self._sequence(nested=nested)]
        while self._next() == "|":
            self._at += 1
            self._space(newlines=True)
            alternatives.append(self._sequence(nested=nested))
        return Choice(tuple(alternatives))

    def _sequence(self, *, nested: bool) -> tuple[Element, ...]:
        elements: list[Element] = []
        while (element := self._element()) is not None:
            self._space(newlines=nested)
            operators = 0
            while self._next() in ("*", "+", "?", "{"):
                operators += 1
                if operators > MAX_OPERATORS:
                    raise self._wrong("too many repetitions of repetitions")
                low, high = self._bounds()
                element = Repeat(element, low, high)
                self._space(newlines=nested)
            elements.append(element)
        if self._next() in ("*", "+", "?", "{"):
            raise self._wrong(f"there is nothing in front of {self._next()!r}")
        return tuple(elements)

    def _element(self) -> Element | None:
        character = self._next()
        if character == '"':
            return self._literal()
        if character == "[":
            return self._set()
        if character == ".":
            self._at += 1
            return Characters((), negated=True)
        if character == "(":
            return self._group()
        if character in ("<", "!"):
            return self._token()
        if character is not None and _is_word(character):
            return Reference(self._name())
        return None

    def _literal(self) -> Element:
        self._at += 1
        characters: list[Element] = []
        while self._next() != '"':
            code = self._character()
            characters.append(Characters(((code, code),)))
        self._at += 1
        return characters[0] if len(characters) == 1 else Choice((tuple(characters),))

    def _set(self) -> Characters:
        self._at += 1
        negated = self._next() == "^"
        self._at += negated
        ranges = []
        while self._next() != "]":
            low = high = self._character()
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._character()
                if high < low:
                    raise self._wrong("a range runs backwards")
            ranges.append((low, high))
        if not ranges:
            raise self._wrong("a set of characters is empty")
        self._at += 1
        return Characters(tuple(ranges), negated)

    def _group(self) -> Choice:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._wrong(f"groups are nested more than {MAX_NESTING} deep")
        self._at += 1
        self._space(newlines=True)
        choice = self._choice(nested=True)
        if self._next() != ")":
            raise self._wrong("')' is missing")
        self._at += 1
        self._depth -= 1
        return choice

    def _token(self) -> Token:
        negated = self._next() == "!"
        self._at += negated
        end = self._text.find(">", self._at)
        if self._next() != "<" or end < 0:
            raise self._wrong("a token looks like <text> or <[number]>")
        name = self._text[self._at + 1 : end]
        self._at = end + 1
        return Token(name, negated)

    def _bounds(self) -> tuple[int, int | None]:
        sign = self._text[self._at]
        self._at += 1
        if sign != "{":
            return (1 if sign == "+" else 0), (1 if sign == "?" else None)
        low = self._number()
        high: int | None = low
        if self._next() == ",":
            self._at += 1
            self._space(newlines=True)
            high = None if self._next() == "}" else self._number()
        if self._next() != "}":
            raise self._wrong("'}' is missing")
        self._at += 1
        if max(low, high or 0) > MAX_REPEATS:
            raise self._wrong(f"something repeats more than {MAX_REPEATS} times")
        if high is not None and high < low:
            raise self._wrong("a repetition has its bounds the wrong way round")
        return low, high

    def _number(self) -> int:
        self._space(newlines=True)
        begin = self._at
        while (digit := self._next()) is not None and digit in "0123456789":
            self._at += 1
        if not 0 < self._at - begin < 10:
            raise self._wrong("a number is missing or too long")
        number = int(self._text[begin : self._at])
        self._space(newlines=True)
        return number

    def _character(self) -> int:
        character = self._next()
        if character is None or character == "\0":
            raise self._wrong("it ends inside of a text or set")
        self._at += 1
        if character != "\\":
            return ord(character)
        kind = self._next() or ""
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _HEX_LENGTH:
            raise self._wrong(f"'\\{kind}' is not an escape")
        digits = self._text[self._at : self._at + _HEX_LENGTH[kind]]
        if len(digits) != _HEX_LENGTH[kind] or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise self._wrong(f"'\\{kind}' needs {_HEX_LENGTH[kind]} hexadecimal digits")
        self._at += len(digits)
        return int(digits, 16)

    def _name(self) -> str:
        begin = self._at
        while (character := self._next()) is not None and _is_word(character):
            self._at += 1
        if self._at == begin:
            raise self._wrong("the name of a rule is missing")
        return self._text[begin : self._at]

    def _next(self) -> str | None:
        return self._text[self._at] if self._at < len(self._text) else None

    def _space(self, *, newlines: bool) -> None:
        while (character := self._next()) is not None:
            if character == "#":
                while self._next() not in (None, "\r", "\n"):
                    self._at += 1
            elif character in " \t" or (newlines and character in "\r\n"):
                self._at += 1
            else:
                return

    def _wrong(self, problem: str) -> RequestError:
        line = self._text.count("\n", 0, self._at) + 1
        return _error(f"is wrong in line {line}: {problem}", self._param)


def _is_word(character: str) -> bool:
    return character == "-" or (character.isascii() and character.isalnum())
