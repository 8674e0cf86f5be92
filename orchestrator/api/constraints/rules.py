"""The parts of a grammar as values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set; ranges of code points with both ends, the whole set negated or not."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def holds(self, character: int) -> bool:
        """Tell whether a code point is in the set."""
        return any(low <= character <= high for low, high in self.ranges) is not self.negated


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the vocabulary, by its text or number as written, or any other token."""

    name: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A rule, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences."""

    alternatives: tuple[tuple[Element, ...], ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An element ``low`` to ``high`` times; None: no upper bound."""

    element: Element
    low: int
    high: int | None


Element = Characters | Token | Reference | Choice | Repeat
Rules = Mapping[str, Choice]
