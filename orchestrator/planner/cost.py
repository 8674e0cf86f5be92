"""What ranges of layers take and cost, and what a token costs in a star and in a ring. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def memory_of(self, ranges: Sequence[tuple[int, int]], *, experts: bool = True) -> int:
        """What a process takes that holds these ranges: weights, caches and the rest; ``experts``: theirs too."""
        held = sum(self.weights_of(*span) + self.cache_of(*span) for span in ranges)
        if not experts:
            held -= sum(layer.expert_weights for span in ranges for layer in self.facts.layers[slice(*span)])
        return held + self.overhead_of(ranges)

    def cost_of(self, first: int, last: int) -> int:
        """Bytes that one token reads of these layers, with its cache half full."""
        total = self.costs[last] - self.costs[first]
        return total + (self.facts.output_read if last == self.facts.n_layer else 0)


def cache_bytes(layer: Layer, load: Load) -> int:
    """Return what a layer's caches take under a load."""
    return load.sequences * (load.cells * layer.cache_per_token + layer.cache_per_sequence)


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))


def with_times(facts: ModelFacts, times: Mapping[tuple[int, int], float]) -> tuple[ModelFacts, float]:
    """Replace what layers read by what would take as long as was measured, the output's share with the last layer's.

    ``times`` has the seconds of one token of (first, last) layers, all layers once. Returns the facts and the bytes
    per second of the machine that was measured.
    """
    total = sum(layer.read for layer in facts.layers) + facts.output_read
    speed = total / max(sum(times.values()), 1e-9)
    layers = list(facts.layers)
    for (first, last), seconds in times.items():
        output = facts.output_read if last == facts.n_layer else 0
        read = max(sum(layer.read for layer in layers[first:last]) + output, 1)
        for number in range(first, last):
            own = layers[number].read + (output if number == last - 1 else 0)
            factor = seconds * speed / read
            layers[number] = replace(
                layers[number], read=int(own * factor), expert_read=int(layers[number].expert_read * factor)
            )
    return replace(facts, layers=tuple(layers), output_read=0, measured=True), speed
