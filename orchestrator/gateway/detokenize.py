"""Turn token pieces into text as they come: whole characters only, and never a piece of a stop string.

A token's piece is bytes and may end inside a character, and a stop string may be spread over several tokens. Both are
solved by holding text back until it is certain. The result does not depend on how the text was cut into tokens:
of several stop strings the one that is complete first wins, and of two that end together the longer.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TextDecoder:
    """Decode UTF-8 incrementally; an incomplete character waits for its rest, wrong bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        """Return the characters that are complete now."""
        return self._decoder.decode(piece)

    # There is no flush: an answer that is cut inside a character ends before that character.


class StopScanner:
    """Hold back what may become a stop string; ``matched`` once one is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Return the text that is certain now; after a match that is the text in front of the stop string."""
        if self.matched:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.matched = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back; call once, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class Released(Generic[Item]):
    """Text that may be shown, and the items (one per token) whose text starts in it."""

    text: str
    items: tuple[Item, ...]


class Detokenizer(Generic[Item]):
    """Pieces and their items in, certain text and its items out.

    An item (the token's record with its log probability) is released together with the first character of its token,
    so items of a stop string never appear.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = TextDecoder()
        self._scanner = StopScanner(stops)
        self._waiting: deque[tuple[int, Item]] = deque()  # (number of the token's first character, item)
        self._decoded = 0  # characters decoded so far
        self._released = 0  # characters released so far

    @property
    def stopped(self) -> bool:
        """Tell whether a stop string is complete; nothing is released afterwards."""
        return self._scanner.matched

    def feed(self, piece: bytes, item: Item) -> Released[Item]:
        """Take one token's bytes and return what is certain now."""
        self._waiting.append((self._decoded, item))
        text = self._decoder.feed(piece)
        self._decoded += len(text)
        return self._release(self._scanner.feed(text))

    def finish(self) -> Released[Item]:
        """Return the rest when the answer ends without a stop string."""
        if self.stopped:
            return Released("", ())
        text = self._scanner.flush()
        items = tuple(item for _, item in self._waiting)
        self._waiting.clear()
        self._released += len(text)
        return Released(text, items)

    def _release(self, text: str) -> Released[Item]:
        self._released += len(text)
        items: list[Item] = []
        while self._waiting and self._waiting[0][0] < self._released:
            items.append(self._waiting.popleft()[1])
        return Released(text, tuple(items))
