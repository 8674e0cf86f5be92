"""What ranges of layers take and cost, and what a token costs in a star and in a ring. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.planner.inventory import Layer, Load, ModelFacts


@dataclass(frozen=True, slots=True)
class Measures:
    """Prefix sums over the layers of a model under a load: what any range takes, in constant time."""

    facts: ModelFacts
    load: Load
    process: int
    weights: tuple[int, ...]
    caches: tuple[int, ...]
    costs: tuple[int, ...]

    @classmethod
    def of(cls, facts: ModelFacts, load: Load, process: int) -> Measures:
        """Add up; ``process`` is what a process takes before it holds anything."""
        return cls(
            facts,
            load,
            process,
            _sums(layer.weights for layer in facts.layers),
            _sums(cache_bytes(layer, load) for layer in facts.layers),
            _sums(layer.read + load.cells // 2 * layer.cache_per_token for layer in facts.layers),
        )

    def weights_of(self, first: int, last: int) -> int:
        """Weights of the layers first to last - 1, with the embeddings and the output where they belong."""
        total = self.weights[last] - self.weights[first]
        total += self.facts.input_weights if first == 0 else 0
        return total + (self.facts.output_weights if last == self.facts.n_layer else 0)

    def cache_of(self, first: int, last: int) -> int:
        """Caches of these layers."""
        return self.caches[last] - self.caches[first]

    def overhead_of(self, ranges: Sequence[tuple[int, int]]) -> int:
        """What a process with these ranges takes besides: itself, and working memory for each range."""
        end = any(last == self.facts.n_layer for _, last in ranges)
        return self.process + len(ranges) * self.facts.scratch + (self.facts.output_scratch if end else 0)

    def cost_of(self, first: int, last: int) -> int:
        """Bytes that one token reads of these layers, with its cache half full."""
        total = self.costs[last] - self.costs[first]
        return total + (self.facts.output_read if last == self.facts.n_layer else 0)


def cache_bytes(layer: Layer, load: Load) -> int:
    """Return what a layer's caches take under a load."""
    return load.sequences * (load.cells * layer.cache_per_token + layer.cache_per_sequence)


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))
