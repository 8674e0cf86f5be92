"""The in-memory twin of the engine's grammar sampler, and an author of random texts of a grammar."""

from __future__ import annotations

import codecs
import math
import random
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from orchestrator.api.constraints.gbnf import parse_grammar
from orchestrator.api.constraints.rules import Characters, Choice, Element, Reference, Repeat, Rules

Stack = tuple[Element, ...]  # what must come next, the first first


class Matcher:
    """All ways in which a text can be read so far."""

    def __init__(self, grammar: str) -> None:
        self._rules = parse_grammar(grammar)
        self.stacks = frozenset(expand(self._rules, (Reference("root"),)))

    def after(self, stacks: frozenset[Stack], text: str) -> frozenset[Stack]:
        for character in text:
            stacks = frozenset(
                following
                for first, *rest in filter(None, stacks)
                if first.holds(ord(character))
                for following in expand(self._rules, tuple(rest))
            )
        return stacks

    def accepts(self, text: str) -> bool:
        return () in self.after(self.stacks, text)


def expand(rules: Rules, stack: Stack, seen: set[Stack] | None = None) -> Iterator[Stack]:
    """Yield the stacks that begin with a character, or are empty."""
    seen = set() if seen is None else seen
    if stack in seen:
        return
    seen.add(stack)
    if not stack or isinstance(stack[0], Characters):
        yield stack
        return
    first, rest = stack[0], stack[1:]
    if isinstance(first, Reference):
        first = rules[first.name]
    if isinstance(first, Choice):
        for sequence in first.alternatives:
            yield from expand(rules, (*sequence, *rest), seen)
    elif isinstance(first, Repeat):
        high = None if first.high is None else first.high - 1
        if first.low == 0:
            yield from expand(rules, rest, seen)
        if first.high != 0:
            again = Repeat(first.element, max(0, first.low - 1), high)
            yield from expand(rules, (first.element, again, *rest), seen)
    else:
        raise NotImplementedError("the twin knows no tokens by name")


class GrammarTwin:
    def __init__(self, grammar: str, pieces: Sequence[bytes], ends: Collection[int]) -> None:
        self._matcher = Matcher(grammar)
        self._stacks = self._matcher.stacks
        self._held = b""  # the beginning of a character
        self._pieces, self._ends = pieces, ends

    def _after(self, token: int) -> tuple[frozenset[Stack], bytes] | None:
        if token in self._ends:
            return (self._stacks, b"") if () in self._stacks and not self._held else None
        if not self._pieces[token] or b"\0" in self._pieces[token]:
            return None
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(self._held + self._pieces[token])
        except UnicodeDecodeError:
            return None
        rest, _ = decoder.getstate()
        stacks = self._matcher.after(self._stacks, text)
        if rest:
            low, high = completions(rest)
            if 0xD800 <= low <= 0xDFFF:  # Python notices half of a surrogate pair one byte later
                return None
            stacks = frozenset(stack for stack in stacks if stack and may_hold(stack[0], low, high))
        return (stacks, rest) if stacks else None

    def allows(self, token: int) -> bool:
        return self._after(token) is not None

    def allowed(self) -> np.ndarray:
        return np.array([self.allows(token) for token in range(len(self._pieces))])

    def accept(self, token: int) -> None:
        after = self._after(token)
        assert after is not None, f"token {token} is not allowed"
        self._stacks, self._held = after


def completions(data: bytes) -> tuple[int, int]:
    """Return the range of characters that may begin with these bytes."""
    length = 2 if data[0] < 0xE0 else 3 if data[0] < 0xF0 else 4
    value = data[0] & (0x7F >> length)
    for byte in data[1:]:
        value = value << 6 | byte & 0x3F
    missing = 6 * (length - len(data))
    low = value << missing
    if low == 0:
        low = {3: 1 << 11, 4: 1 << 16}[length]
    return low, value << missing | (1 << missing) - 1


def may_hold(characters: Characters, low: int, high: int) -> bool:
    """Tell whether the engine lets a character of the range begin here; from a negated set none may be missing."""
    touched = any(first <= high and low <= last for first, last in characters.ranges)
    return touched is not characters.negated


class Author:
    """Writes random texts of a grammar; ``alphabet`` is what negated sets are filled from."""

    def __init__(self, grammar: str, seed: int, alphabet: str = 'abz09 _-é😀\\"/\n\t{}[],:.') -> None:
        self._rules = parse_grammar(grammar)
        self._random = random.Random(seed)
        self._alphabet = alphabet
        # The length of each rule's shortest text: what ends soonest is written once the budget is spent.
        self._shortest = dict.fromkeys(self._rules, math.inf)
        while True:
            found = {name: self._length(rule) for name, rule in self._rules.items()}
            if found == self._shortest:
                break
            self._shortest = found

    def _length(self, element: Element) -> float:
        if isinstance(element, Reference):
            return self._shortest[element.name]
        if isinstance(element, Repeat):
            return element.low * self._length(element.element) if element.low else 0
        if isinstance(element, Choice):
            return min(sum(map(self._length, sequence)) for sequence in element.alternatives)
        return 1

    def text(self, budget: int = 60) -> str:
        self._left = budget
        return self._write(Reference("root"))

    def _write(self, element: Element) -> str:
        self._left -= 1
        if isinstance(element, Reference):
            return self._write(self._rules[element.name])
        if isinstance(element, Characters):
            return self._character(element)
        if isinstance(element, Choice):
            sequences = element.alternatives
            if self._left < 0:
                return "".join(map(self._write, min(sequences, key=lambda items: sum(map(self._length, items)))))
            return "".join(map(self._write, self._random.choice(sequences)))
        if isinstance(element, Repeat):
            most = element.low + (3 if element.high is None else min(3, element.high - element.low))
            count = element.low if self._left < 0 else self._random.randint(element.low, most)
            return "".join(self._write(element.element) for _ in range(count))
        raise NotImplementedError

    def _character(self, element: Characters) -> str:
        fitting = [character for character in self._alphabet if element.holds(ord(character))]
        if not element.negated:
            low, high = self._random.choice(element.ranges)
            fitting = [chr(self._random.randint(low, min(high, low + 30)))]
        return self._random.choice(fitting)
