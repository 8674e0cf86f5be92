"""Many answers at once over a long way against one: what batching and steps in flight are worth.

The workers of a star, or the far one of a ring's two stages, are behind a process that adds a round trip. One answer
alone waits for it at each token (a star: at each MoE layer); several should wait together. Both sides ask the same
prompts in turn, and the texts must be the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from orchestrator.bench.delay import delayed
from orchestrator.bench.machine import load_average
from orchestrator.gateway.backbone import Backbone, open_backbone
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.ring_backbone import RingBackbone, open_ring
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.models.deployment import Deployment, StageEntry
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_writer import Progress
from orchestrator.workers.deployment import DeployedProcesses
from orchestrator.workers.local import LocalWorkers

Way = Literal["star", "ring"]

WANTED: Final = 7.0
"""What eight streams should give, one being 1."""

_PROMPT: Final = 6  # tokens: eight such prompts fit into one micro-batch, as one does
_TOKENS: Final[dict[Way, int]] = {"star": 5, "ring": 64}
_GREEDY: Final = SamplingParameters(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Tokens per second of one answer and of ``streams`` at once, per round, from submission to the last token."""

    model: str
    way: Way
    rtt_ms: float
    streams: int
    tokens: int
    one: tuple[float, ...]
    many: tuple[float, ...]
    same_texts: bool
    load: tuple[float, float]

    @property
    def ratio(self) -> float:
        """How many times the tokens of one answer all of them get: the median of the rounds."""
        return statistics.median(many / one for one, many in zip(self.one, self.many, strict=True))

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "model": self.model,
            "way": self.way,
            "rtt_ms": self.rtt_ms,
            "streams": self.streams,
            "tokens": self.tokens,
            "tokens_per_second_one": [round(value, 3) for value in self.one],
            "tokens_per_second_all": [round(value, 3) for value in self.many],
            "ratio": round(self.ratio, 3),
            "same_texts": self.same_texts,
            "load_average": list(self.load),
        }


def measure_scaling(
    path: Path,
    way: Way,
    *,
    rtt_ms: float = 80.0,
    streams: int = 8,
    rounds: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Scaling:
    """Time one answer and ``streams`` of them in turn; what was learned of a step's cost stays between rounds."""
    tokens = _TOKENS[way]
    before = load_average()
    rates: tuple[list[float], list[float]] = ([], [])
    same = True
    with _opened(path, way, rtt_ms / 1000, streams) as backbone, backbone.gateway(reuse_prefix=False) as gateway:
        rng = np.random.default_rng(seed)
        prompts = rng.integers(0, backbone.model.n_vocab, (rounds + 1, streams, _PROMPT)).tolist()
        _run(gateway, prompts[rounds], tokens)  # untimed
        for number in range(rounds):
            if progress is not None:
                progress(number, rounds, f"{way}, round {number + 1} of {rounds}")
            alone = number % streams
            sides = [prompts[number][alone : alone + 1], prompts[number]]
            texts: list[list[list[int]]] = [[], []]
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                begin = time.perf_counter()
                texts[side] = _run(gateway, sides[side], tokens)
                rates[side].append(tokens * len(sides[side]) / (time.perf_counter() - begin))
            same = same and texts[0][0] == texts[1][alone]
    return Scaling(
        path.stem, way, rtt_ms, streams, tokens, tuple(rates[0]), tuple(rates[1]), same, (before, load_average())
    )


@contextmanager
def _opened(path: Path, way: Way, rtt: float, streams: int) -> Iterator[Backbone | RingBackbone]:
    n_ctx = 256
    if way == "star":
        with (
            LocalWorkers(path, 1) as workers,
            delayed(workers.addresses, rtt) as addresses,
            open_backbone(path, addresses, n_ctx=n_ctx, n_sequences=streams) as backbone,
        ):
            yield backbone
        return
    end = GgufFile.open(path).n_layer
    middle = end // 2
    stages = tuple(
        StageEntry(name, (span,), "127.0.0.1:0") for name, span in (("near", (0, middle)), ("far", (middle, end)))
    )
    with DeployedProcesses(Deployment(str(path), n_ctx, streams, stages=stages), path, threads=1) as processes:
        near, far = processes.deployment.stages
        with delayed([far.address], rtt) as [address]:
            plan = replace(processes.deployment, stages=(near, replace(far, address=address)))
            with open_ring(path, plan) as ring:
                yield ring


def _run(gateway: Gateway, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Answer all prompts at once; return the tokens of the answers."""
    generations = [
        gateway.submit(GenerationRequest(tuple(prompt), tokens, _GREEDY, ignore_end=True)) for prompt in prompts
    ]
    return [
        [record.token for event in generation if isinstance(event, TextDelta) for record in event.tokens]
        for generation in generations
    ]
