"""How many tokens it pays to guess: measured rates of right guesses against measured times of steps. PURE.

A step with guesses takes longer, and gives a token more for each guess that is right. With r the rate of right
guesses an answer gets ``1 + r + r^2 + ... + r^k`` tokens of a step with k guesses (Leviathan et al. 2023, equation
1); what the step takes is known from the steps that were made. The depth is the one that gives the most tokens per
second to all answers together, and 0 where none gives more than single steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_REMEMBERED: Final = 15
"""Times of each size of which the median counts: one that another program disturbed does not."""

_LEAST: Final = 1e-6
"""A factor is never less, whatever a clock says."""

_FEWEST: Final = 3
"""Steps of a size without which nothing is known of it."""

_ROW_SHARE: Final = 0.1
"""What one more row is taken to cost before it was tried, as a part of a step."""

_FORGOTTEN: Final = 256
"""A size that was not seen for so many steps may take something else by now."""

_MEMORY: Final = 0.95
"""What a guess counts for one guess later: about 20 of them matter."""

_PRIOR_WEIGHT: Final = 4.0
"""So many guesses is it worth what is known of other answers."""

MARGIN: Final = 1.03
"""How much better than single steps a depth must look, because all of it is estimated."""

COSTLY_MARGIN: Final = 1.10
"""The same where drafting takes time of its own."""


def micro_batches(lengths: Mapping[int, int], n_chunk: int) -> list[int]:
    """Return the rows of the micro-batches into which the engine cuts segments (slot -> tokens).

    It takes equally many tokens of neighbouring sequences at a time (``llama_batch_allocr::split_equal``): segments
    of different lengths cost a graph for each length, and in a star its round trips.
    """
    if len(lengths) == 1:
        (only,) = lengths.values()
        return [n_chunk] * (only // n_chunk) + ([only % n_chunk] if only % n_chunk else [])
    left = dict(sorted(lengths.items()))
    rows = []
    while left:
        first = next(iter(left))
        run = [slot for index, slot in enumerate(left) if slot == first + index][:n_chunk]
        count = min(n_chunk // len(run), *(left[slot] for slot in run))
        rows.append(count * len(run))
        for slot in run:
            left[slot] -= count
            if not left[slot]:
                del left[slot]
    return rows


class StepTimes:
    """What micro-batches of each size took lately, in seconds.

    A machine gets slower and faster as a whole, with other programs and with the length of texts: that is one factor
    for all sizes. So a size that was seen long ago is compared with one that was seen now as if both were seen now.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}  # by size, without the factor
        self._typical: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._count = 0
        self._factors: deque[float] = deque(maxlen=3)  # of three the median: one disturbed step does not count
        self._factor = 1.0

    def observe(self, rows: Sequence[int], seconds: float) -> None:
        """Note a step of these micro-batches; those of different sizes cannot be told apart and are left out."""
        self._count += 1
        if self._count % _FORGOTTEN == 0:
            for old in [size for size, seen in self._seen.items() if self._count - seen > _FORGOTTEN]:
                del self._recent[old], self._typical[old], self._seen[old]
        if len(set(rows)) != 1:
            return
        size, each = rows[0], seconds / len(rows)
        if self._typical.get(size):
            self._factors.append(each / self._typical[size])
            self._factor = math.sqrt(self._factor * max(statistics.median(self._factors), _LEAST))
        recent = self._recent.setdefault(size, deque(maxlen=_REMEMBERED))
        recent.append(each / self._factor)
        self._typical[size] = statistics.median(recent)
        self._seen[size] = self._count

    def age(self, rows: int) -> int | None:
        """Return how many steps ago one of this size was seen, None: not lately, or too seldom to be relied on."""
        if len(self._recent.get(rows, ())) < _FEWEST:
            return None
        return self._count - self._seen[rows]

    def seconds(self, rows: Iterable[int]) -> float | None:
        """Return what a step of these micro-batches probably takes, None before any was seen."""
        if not self._typical:
            return None
        return self._factor * sum(self._one(count) for count in rows)

    def _one(self, rows: int) -> float:
        known = self._typical
        if rows in known:
            return known[rows]
        below = sorted((count for count in known if count < rows), reverse=True)
        above = min((count for count in known if count > rows), default=None)
        if not below:
            return known[above] if above is not None else 0.0
        if above is not None:
            share = (rows - below[0]) / (above - below[0])
            return known[below[0]] + share * (known[above] - known[below[0]])
        if len(below) > 1:
            slope = (known[below[0]] - known[below[1]]) / (below[0] - below[1])
        else:
            slope = _ROW_SHARE * known[below[0]]
        return known[below[0]] + max(0.0, slope) * (rows - below[0])


class Rates:
    """How often guesses turn out right, by kind: what the drafter says about how sure it is."""

    def __init__(self, prior: float | Rates) -> None:
        self._prior = prior
        self._right: dict[int, float] = {}
        self._made: dict[int, float] = {}

    def observe(self, kind: int, *, right: bool) -> None:
        """Note one guess whose token is known now."""
        self._right[kind] = _MEMORY * self._right.get(kind, 0.0) + right
        self._made[kind] = _MEMORY * self._made.get(kind, 0.0) + 1.0
        if isinstance(self._prior, Rates):
            self._prior.observe(kind, right=right)

    def rate(self, kind: int) -> float:
        """Return the probability that the next guess of a kind is right."""
        prior = self._prior.rate(kind) if isinstance(self._prior, Rates) else self._prior
        made = self._made.get(kind, 0.0)
        return (self._right.get(kind, 0.0) + _PRIOR_WEIGHT * prior) / (made + _PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer that may get guesses: its slot, at most how many, their rate, and what it takes to begin.

    ``debt`` is what the drafter must do beforehand, in seconds, for the next ``steps`` steps.
    """

    slot: int
    most: int
    rate: float
    debt: float = 0.0
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A depth and the slots that get it; ``gain`` is in tokens per second, those of single steps being 1.

    ``seconds`` is what the first such step takes, all debts included, and ``plain`` what its tokens take without it.
    """

    depth: int
    slots: tuple[int, ...]
    gain: float
    seconds: float
    plain: float


def best_choice(
    candidates: Sequence[Candidate],
    lengths: Mapping[int, int],
    times: StepTimes,
    *,
    n_chunk: int,
    streams: int,
    draft_seconds: float = 0.0,
) -> Choice | None:
    """Return the best depth above 0 for a step of segments (slot -> tokens), None where there is none to have.

    ``streams`` answers get a token of the step in any case. Those with the best rates come first; all get the same
    depth, because every other length costs a micro-batch. A guess for each of them takes ``draft_seconds``.
    """
    single = times.seconds(micro_batches(lengths, n_chunk))
    free = n_chunk - sum(lengths.values())
    if single is None or not candidates or free < 1:
        return None
    ranked = sorted(candidates, key=lambda one: (-one.rate, one.slot))
    more = [0.0] * len(ranked)  # tokens that each may expect of its guesses
    power = [1.0] * len(ranked)
    best: tuple[float, int, list[int], float, float] | None = None
    for depth in range(1, min(free, max(one.most for one in ranked)) + 1):
        if best is not None and depth > best[1] + 2:
            break  # it gets worse: what guesses give shrinks with the depth, and what rows take does not
        chosen = dict(lengths)
        slots: list[int] = []
        expected, cost, debt = float(streams), depth * draft_seconds, 0.0
        for index, one in enumerate(ranked):
            power[index] *= one.rate
            more[index] += power[index]
            if one.most < depth or (len(slots) + 1) * depth > free:
                continue
            chosen[one.slot] += depth
            slots.append(one.slot)
            expected += more[index]
            cost += one.debt / one.steps
            debt += one.debt - one.debt / one.steps
            seconds = (times.seconds(micro_batches(chosen, n_chunk)) or 0.0) + cost
            gain = (expected * single) / (streams * seconds) if seconds and single else 1.0
            if best is None or gain > best[0]:
                best = gain, depth, slots.copy(), seconds + debt, single * expected / streams
    if best is None:
        return None
    gain, depth, slots, taken, plain = best
    return Choice(depth, tuple(slots), gain, taken, plain)
