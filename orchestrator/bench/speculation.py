"""`linkcpp bench speculation`: what guessing ahead gains, and that it never costs much, over short and long ways.

Each pair is an answer without guesses and the same one with as many as pay, one after the other in turn, over the
same stages or workers behind a process that delays the bytes. A task that copies shows what there is to gain, one
that does not what there is to lose.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.bench.delay import delayed
from orchestrator.bench.machine import load_average
from orchestrator.gateway.backbone import Backbone, open_backbone
from orchestrator.gateway.drafters.opening import NO_SPECULATION, SpeculationSettings
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.ring_backbone import RingBackbone, open_ring
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import Finished, GenerationRequest, TextDelta
from orchestrator.gateway.template import ChatMessage, ChatTemplate
from orchestrator.models.deployment import Deployment, GatewayEntry, StageEntry
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_writer import Progress
from orchestrator.ring.layout import LayerRange
from orchestrator.workers.local import LocalWorkers
from orchestrator.workers.local_stages import LocalStages

DELAYS_MS: Final = (0.0, 5.0, 25.0, 80.0)
LAYOUTS: Final = ("ring", "star", "process")
MOST_LOST: Final = 0.05
"""The part of its speed that an answer may lose by guessing, at any delay."""

_CONTEXT: Final = 512
_CODE: Final = """class Store:
    def __init__(self, name):
        self.name = name
        self.items = {}

    def add(self, item, count):
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item, count):
        self.items[item] = self.items.get(item, 0) - count
"""
TASKS: Final = {
    "copy": f"Repeat this class and change nothing:\n```python\n{_CODE}```",
    "chat": "Write a short story about a lighthouse keeper.",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One delay, task and drafter; ``gains`` are speeds of decoding with guesses, without being 1, one per pair."""

    delay_ms: float
    task: str
    drafter: str
    gains: tuple[float, ...]
    tokens_per_step: float
    acceptance: float  # part of the guesses that came true; 0 where there were none
    same: bool

    @property
    def gain(self) -> float:
        """The median of the pairs."""
        return statistics.median(self.gains)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "delay_ms": self.delay_ms,
            "task": self.task,
            "drafter": self.drafter,
            "gain": round(self.gain, 3),
            "gains": [round(gain, 3) for gain in self.gains],
            "tokens_per_step": round(self.tokens_per_step, 2),
            "acceptance": round(self.acceptance, 3),
            "same_tokens": self.same,
        }


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """All cases of one model in one layout."""

    model: str
    layout: str
    cases: tuple[Case, ...]
    load: tuple[float, float]

    @property
    def is_good(self) -> bool:
        """Tell whether all answers were the same, and none lost more than :data:`MOST_LOST`."""
        return all(case.same and case.gain >= 1 - MOST_LOST for case in self.cases)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "model": self.model,
            "layout": self.layout,
            "cases": [case.to_json() for case in self.cases],
            "most_lost": MOST_LOST,
            "good": self.is_good,
            "load_average": list(self.load),
        }


def measure_speculation(
    path: Path,
    drafters: Sequence[tuple[str, SpeculationSettings]],
    *,
    layout: str = LAYOUTS[0],
    delays_ms: Sequence[float] = DELAYS_MS,
    pairs: int = 5,
    tokens: int = 80,
    progress: Progress | None = None,
) -> SpeculationReport:
    """Measure all tasks with each drafter (name, settings) at each delay; a process of its own knows no delay."""
    before = load_average()
    delays = delays_ms if layout != "process" else (0.0,)
    cases: list[Case] = []
    for delay in delays:
        with _opened(path, layout, delay / 1e3) as backbone:
            for name, settings in drafters:
                if progress is not None:
                    progress(len(cases), len(delays) * len(drafters) * len(TASKS), f"{delay:g} ms, {name}")
                cases += _measure(backbone, delay, name, settings, pairs, tokens)
    return SpeculationReport(path.stem, layout, tuple(cases), (before, load_average()))


@contextmanager
def _opened(path: Path, layout: str, seconds: float) -> Iterator[Backbone | RingBackbone]:
    """Open the model with ``seconds`` added to each round trip: one per token of a ring, one per layer of a star."""
    with ExitStack() as stack:
        if layout == "process":
            yield stack.enter_context(open_backbone(path, n_ctx=_CONTEXT))
        elif layout == "star":
            workers = stack.enter_context(LocalWorkers(path, 1))
            addresses = stack.enter_context(delayed(workers.addresses, seconds))
            yield stack.enter_context(open_backbone(path, addresses, n_ctx=_CONTEXT))
        else:
            n_layer = GgufFile.open(path).n_layer
            half = n_layer // 2
            first = LayerRange(0, half)
            stages = stack.enter_context(LocalStages(path, [[first]], options=("--ctx", str(_CONTEXT))))
            (address,) = stack.enter_context(delayed(stages.addresses, seconds))
            plan = Deployment(
                str(path),
                _CONTEXT,
                1,
                gateway=GatewayEntry(((half, n_layer),)),
                stages=(StageEntry("stage-1", ((0, half),), address),),
            )
            yield stack.enter_context(open_ring(path, plan))


def _measure(
    backbone: Backbone | RingBackbone, delay: float, name: str, settings: SpeculationSettings, pairs: int, tokens: int
) -> list[Case]:
    # Both gateways empty the sequence before each prompt, so they can take turns on one backend.
    without = backbone.gateway(reuse_prefix=False, speculate=NO_SPECULATION)
    guessing = backbone.gateway(reuse_prefix=False, speculate=settings)
    template = ChatTemplate(backbone.model.chat_template or "{{ messages[0].content }}")
    cases = []
    try:
        for task, text in TASKS.items():
            rendered = template.render([ChatMessage("user", text)])
            prompt = tuple(backbone.model.tokenize(rendered, add_special=False, parse_special=True))
            before = guessing.state()
            gains, same = [], True
            _answer(without, prompt, 8)  # a warm-up
            for number in range(pairs):
                sides = [without, guessing]
                times, answers = {}, []
                for gateway in sides if number % 2 == 0 else reversed(sides):
                    times[gateway], answer = _answer(gateway, prompt, tokens)
                    answers.append(answer)
                gains.append(times[without] / times[guessing])
                same = same and answers[0] == answers[1]
            after = guessing.state()
            drafted = after.drafted - before.drafted
            cases.append(
                Case(
                    delay,
                    task,
                    name,
                    tuple(gains),
                    (after.generated_tokens - before.generated_tokens) / (after.turns - before.turns),
                    (after.accepted - before.accepted) / drafted if drafted else 0.0,
                    same,
                )
            )
    finally:
        guessing.close()
    return cases


def _answer(gateway: Gateway, prompt: tuple[int, ...], count: int) -> tuple[float, list[int]]:
    """Return the seconds for each token after the first, and the tokens."""
    generation = gateway.submit(GenerationRequest(prompt, count, SamplingParameters(temperature=0)))
    while gateway.step():
        pass
    found: list[int] = []
    seconds = 0.0
    for event in generation:
        if isinstance(event, TextDelta):
            found += [record.token for record in event.tokens]
        elif isinstance(event, Finished):
            seconds = event.timings.decode / max(1, event.usage.completion_tokens - 1)
    return seconds, found
