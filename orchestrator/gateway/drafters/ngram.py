"""Guess that a text goes on as it did before: look its end up in prompt and answer. PURE.

The longest end of the text that occurred before is found, and what followed there is the guess. It costs next to
nothing and is right in what repeats: edits of a file, quotations, tables, code. Prompt lookup (Saxena 2023) is the
same with ends of a fixed length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from orchestrator.gateway.speculation import Draft, Wanted

SHORTEST: Final = 2
LONGEST: Final = 32
"""Tokens of an end that are compared; a longer one is not surer."""

_PLACES: Final = 8
"""Occurrences of a pair that are compared, the last ones; common pairs have thousands."""


class NgramIndex:
    """Where each pair of tokens of one growing text occurred; takes constant time for each token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # pair -> where its second token stands, ascending

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the text as it is now, which begins with what it was."""
        for token in tokens[len(self._tokens) :]:
            # The pair that ends the text is not among the places: it would be found as its own repetition.
            end = len(self._tokens) - 1
            if end > 0:
                places = self._places.setdefault((self._tokens[end - 1], self._tokens[end]), [])
                places.append(end)
                if len(places) > _PLACES:
                    del places[0]
            self._tokens.append(token)

    def longest(self) -> tuple[int, int]:
        """Return how many tokens of the text's end occurred before, and where the last of them stands; (0, 0): none.

        Of equally long ones the last counts.
        """
        tokens = self._tokens
        best, place = 0, 0
        for end in reversed(self._places.get((tokens[-2], tokens[-1]), ()) if len(tokens) > 1 else ()):
            length = SHORTEST
            while length < LONGEST and length <= end and tokens[end - length] == tokens[-1 - length]:
                length += 1
            if length > best:
                best, place = length, end
        return best, place

    def guess(self, place: int, count: int) -> tuple[int, ...]:
        """Return ``count`` tokens that follow a place; behind the end of the text the guess itself goes on."""
        tokens = self._tokens
        period = len(tokens) - 1 - place
        found = tokens[place + 1 : place + 1 + min(count, period)]
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)


class NgramDrafter:
    """A :class:`Drafter` that looks each text's end up in the text; its kinds are the lengths of what was found."""

    name = "ngram"
    is_free = True
    prior = 0.4

    def __init__(self) -> None:
        self._texts: dict[int, NgramIndex] = {}

    def begin(self, slot: int) -> None:
        """Forget a slot's text."""
        self._texts.pop(slot, None)

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Draft]:
        """Guess for texts whose end occurred before."""
        drafts = {}
        for one in wanted:
            index = self._texts.setdefault(one.slot, NgramIndex())
            index.extend(one.tokens)
            length, place = index.longest()
            if length:
                drafts[one.slot] = Draft(index.guess(place, one.count), length.bit_length())
        return drafts

    def seconds(self, slots: int) -> float:
        """Return 0: nothing is computed."""
        return 0.0

    def debt(self, slot: int, tokens: Sequence[int]) -> float:
        """Return 0: there is nothing to catch up with."""
        return 0.0

    def close(self) -> None:
        """Forget all texts."""
        self._texts.clear()
