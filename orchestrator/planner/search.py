"""Find which layers go onto which machines: an exact search over kinds of machines. PURE.

The places are where the layers may be cut. Machines that are alike are interchangeable, so a state of the search is
how many of each kind are used; for each state and place it keeps the time of the slowest machine. A second pass takes
the most even of the ways that are as fast. Afterwards a machine's layers are cut into as many stages as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import comb, inf, prod

import numpy as np
import numpy.typing as npt

from orchestrator.errors import PlanError
from orchestrator.planner.cost import Measures
from orchestrator.planner.inventory import Node

_MOST_STATES = 20_000
_MOST_COMPOSITIONS = 20_000
_ROUNDING = 1 + 1e-12

Row = npt.NDArray[np.float64]  # [place]
Matrix = npt.NDArray[np.float64]  # [begin, end]
State = tuple[int, ...]  # how many machines of each kind are used
Slot = tuple[Node, int]  # a machine and its number of stages


@dataclass(frozen=True, slots=True)
class Block:
    """The layers between two places (numbers into ``places``) on one machine, for so many stages."""

    node: Node
    begin: int
    end: int
    stages: int


Ways = Mapping[int, tuple[Block, ...]]  # the best way to each place that can be reached


class Search:
    """The ranges of a model as matrices, and the search over them."""

    def __init__(self, measures: Measures) -> None:
        facts = measures.facts
        self.places = facts.places
        n = len(self.places)
        self.need: Matrix = np.full((n, n), inf)  # bytes of weights, caches and the output's working memory
        self.cost: Matrix = np.zeros((n, n))
        for begin in range(n):
            for end in range(begin + 1, n):
                first, last = self.places[begin], self.places[end]
                scratch = facts.output_scratch if last == facts.n_layer else 0
                self.need[begin, end] = measures.weights_of(first, last) + measures.cache_of(first, last) + scratch
                self.cost[begin, end] = measures.cost_of(first, last)
        self.per_stage = measures.process + facts.scratch

    def seconds(self, block: Block) -> float:
        """Time of one token on a machine."""
        return float(self.cost[block.begin, block.end]) / block.node.effective_speed

    def ways(self, nodes: Sequence[Node], start: int, n_stages: int | None, *, thoroughly: bool = True) -> Ways:
        """Return the best way from ``start`` to each place, with ``n_stages`` in all (None: one on each machine).

        ``thoroughly`` also finds ways where the memory of the processes decides how many a machine can run.
        """
        most = len(nodes) if n_stages is None else min(len(nodes), n_stages)
        found = self._cover([(node, 1) for node in nodes], start, most)
        if n_stages is None:
            return found
        spread: dict[int, tuple[Block, ...]] = {}
        for end, blocks in found.items():
            more = self.spread(blocks, n_stages)
            if more is None and thoroughly and end - start >= n_stages:
                more = self._composed(nodes, start, end, n_stages)
            if more is not None:
                spread[end] = more
        return spread

    def edges(self, block: Block) -> list[int]:
        """Cut a machine's layers into its stages so that the largest costs the least; return the cuts' layers."""
        length, n = block.end - block.begin, block.stages
        best: Matrix = np.full((n + 1, length + 1), inf)
        came = np.zeros((n + 1, length + 1), np.int64)
        best[0, 0] = 0.0
        for count in range(1, n + 1):
            for end in range(count, length + 1):
                costs = self.cost[block.begin : block.begin + end, block.begin + end]
                options = np.maximum(best[count - 1, :end], costs)
                came[count, end] = at = int(np.argmin(options))
                best[count, end] = options[at]
        ends = [length]
        for count in range(n, 0, -1):
            ends.append(int(came[count, ends[-1]]))
        return [self.places[block.begin + end] for end in reversed(ends)]

    def limit(self, node: Node, stages: int) -> float:
        """Bytes that a machine has for weights and caches once so many stages run."""
        return inf if node.memory is None else float(node.memory - stages * self.per_stage)

    # --- machines ---------------------------------------------------------------------------------------------

    def _cover(self, slots: Sequence[Slot], start: int, most: int, *, everyone: bool = False) -> Ways:
        """Give machines consecutive layers from ``start`` on, each at least a place for each of its stages."""
        kinds: dict[tuple[int | None, float, int], list[Slot]] = {}
        for slot in slots:
            kinds.setdefault((slot[0].memory, slot[0].effective_speed, slot[1]), []).append(slot)
        groups = list(kinds.values())
        if prod(len(group) + 1 for group in groups) > _MOST_STATES:
            raise PlanError(
                f"{len(slots)} machines of {len(groups)} kinds are too many to search",
                hint="round their memory and speed, so that more of them are alike",
            )
        times = [self._times(*group[0]) for group in groups]
        counts = tuple(len(group) for group in groups)
        slowest = _slowest(counts, most, times, start)
        goals = [counts] if everyone else [state for state in slowest if sum(state)]
        found: dict[int, tuple[Block, ...]] = {}
        for end in range(start + 1, len(self.places)):
            bound = min(float(slowest[goal][end]) for goal in goals)
            if bound < inf:
                left = [list(group) for group in groups]
                steps = _most_even(counts, most, times, (start, end), bound * _ROUNDING, goals)
                slots_of = [(left[kind].pop(0), begin, stop) for kind, begin, stop in steps]
                found[end] = tuple(Block(node, begin, stop, stages) for (node, stages), begin, stop in slots_of)
        return found

    def _times(self, node: Node, stages: int) -> Matrix:
        """Return the seconds of all ranges on a machine, infinite where they do not fit it."""
        n = len(self.places)
        length = np.arange(n)[None, :] - np.arange(n)[:, None]
        fits = (self.need <= self.limit(node, stages)) & (length >= stages) & np.isfinite(self.need)
        return np.where(fits, self.cost / node.effective_speed, inf)

    def spread(self, blocks: tuple[Block, ...], n_stages: int) -> tuple[Block, ...] | None:
        """Give each machine its number of stages: always one more where a stage takes longest."""
        if len(blocks) > n_stages:
            return None
        counts = [1] * len(blocks)
        for _ in range(n_stages - len(blocks)):
            best: tuple[float, int] | None = None
            for index, block in enumerate(blocks):
                more = counts[index] + 1
                need = self.need[block.begin, block.end]
                if block.end - block.begin >= more and need <= self.limit(block.node, more):
                    time = self.seconds(block) / counts[index]
                    if best is None or time > best[0]:
                        best = time, index
            if best is None:
                return None
            counts[best[1]] += 1
        return tuple(
            Block(block.node, block.begin, block.end, count) for block, count in zip(blocks, counts, strict=True)
        )

    def _composed(self, nodes: Sequence[Node], start: int, end: int, n_stages: int) -> tuple[Block, ...] | None:
        """Try every number of stages on every machine."""
        if comb(n_stages + len(nodes) - 1, len(nodes) - 1) > _MOST_COMPOSITIONS:
            return None
        best: tuple[float, tuple[Block, ...]] | None = None
        for counts in _compositions(n_stages, len(nodes)):
            slots = [(node, count) for node, count in zip(nodes, counts, strict=True) if count]
            blocks = self._cover(slots, start, len(slots), everyone=True).get(end)
            if blocks is not None:
                slowest = max(map(self.seconds, blocks))
                if best is None or slowest < best[0]:
                    best = slowest, blocks
        return None if best is None else best[1]


def _states(counts: State, most: int) -> Iterator[State]:
    """Yield all states with up to ``most`` machines, each behind those with one machine less."""
    states = (state for state in product(*(range(count + 1) for count in counts)) if sum(state) <= most)
    yield from sorted(states, key=sum)


def _before(state: State) -> Iterator[tuple[int, State]]:
    """Yield (kind, state without one machine of it)."""
    for kind, count in enumerate(state):
        if count:
            yield kind, (*state[:kind], count - 1, *state[kind + 1 :])


def _slowest(counts: State, most: int, times: Sequence[Matrix], start: int) -> dict[State, Row]:
    """Return for each state and place the least possible time of the slowest machine."""
    best: dict[State, Row] = {}
    for state in _states(counts, most):
        reached: Row = np.full(len(times[0]), inf)
        if not sum(state):
            reached[start] = 0.0
        for kind, before in _before(state):
            reached = np.minimum(reached, np.maximum(best[before][:, None], times[kind]).min(axis=0))
        best[state] = reached
    return best


def _most_even(
    counts: State, most: int, times: Sequence[Matrix], span: tuple[int, int], bound: float, goals: Sequence[State]
) -> list[tuple[int, int, int]]:
    """Return the (kind, begin, end) that cover ``span`` with the least sum of squares, none above ``bound``."""
    start, end = span
    squares = [np.where(time <= bound, time, inf) ** 2 for time in times]
    best: dict[State, Row] = {}
    for state in _states(counts, most):
        reached: Row = np.full(len(times[0]), inf)
        if not sum(state):
            reached[start] = 0.0
        for kind, before in _before(state):
            reached = np.minimum(reached, (best[before][:, None] + squares[kind]).min(axis=0))
        best[state] = reached
    state = min(goals, key=lambda goal: float(best[goal][end]))
    steps: list[tuple[int, int, int]] = []
    while sum(state):
        options = [
            (float(best[before][begin] + squares[kind][begin, end]), kind, begin, before)
            for kind, before in _before(state)
            for begin in range(start, end)
        ]
        _, kind, begin, state = min(options, key=lambda option: option[0])
        steps.append((kind, begin, end))
        end = begin
    return steps[::-1]


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``total`` as a sum of ``parts`` numbers from 0 on."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
