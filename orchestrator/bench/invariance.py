"""`linkcpp bench invariance`: does grouping tokens in another way change a byte, and what does preventing it cost?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.bench.machine import load_average
from orchestrator.bench.one_invariance import LENGTHS, SIZES, TOKENS
from orchestrator.engine.context import INVARIANT_ROWS, Context
from orchestrator.engine.model import Model
from orchestrator.errors import InputError
from orchestrator.gateway.backbone import STOCK_ROWS
from orchestrator.gateway.backend import NOT_INVARIANT
from orchestrator.models.architectures import RECIPES
from orchestrator.models.gguf_writer import Progress
from orchestrator.onboarding.children import JobFailedError, run_job
from orchestrator.onboarding.prompts import random_tokens
from orchestrator.onboarding.side_by_side import join
from orchestrator.ring.steps import Clear, one_sequence

_JOB: Final = "orchestrator.bench.one_invariance"
_LONGEST: Final = 600.0  # seconds for one architecture on a busy machine
_PROMPT: Final = 256
_STEPS: Final = 16
_OTHERS: Final = 32  # tokens that the other three sequences hold


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one architecture; ``one`` and ``several`` are None where it could not be tried.

    A model that reads the ``whole_text`` at once has no steps that could be grouped.
    """

    architecture: str
    one: bool | None
    several: bool | None
    detail: str
    whole_text: bool = False

    @property
    def expected(self) -> bool:
        """Tell whether this is no worse than what the gateway takes for granted (:data:`NOT_INVARIANT`)."""
        failed = self.one is None and not self.whole_text
        worse = self.one is False or self.several is False
        return not failed and (not worse or self.architecture in NOT_INVARIANT)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "architecture": self.architecture,
            "one_sequence": self.one,
            "several_sequences": self.several,
            "detail": self.detail,
            "expected": self.expected,
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Speed of the batch-invariant configuration, the stock one being 1: medians of alternating runs, quartiles."""

    model: str
    threads: int
    prefill: float
    prefill_quartiles: tuple[float, float]
    decode: float
    decode_quartiles: tuple[float, float]
    several: float  # decode of four sequences at once
    several_quartiles: tuple[float, float]
    several_to_one: float  # tokens/s of four sequences, one being 1; batch-invariant
    load: tuple[float, float]

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "model": self.model,
            "threads": self.threads,
            "prefill_ratio": round(self.prefill, 3),
            "prefill_quartiles": [round(value, 3) for value in self.prefill_quartiles],
            "decode_ratio": round(self.decode, 3),
            "decode_quartiles": [round(value, 3) for value in self.decode_quartiles],
            "four_sequences_ratio": round(self.several, 3),
            "four_sequences_quartiles": [round(value, 3) for value in self.several_quartiles],
            "four_sequences_to_one": round(self.several_to_one, 2),
            "load_average": list(self.load),
        }


def what_is_tried() -> str:
    """Say in one sentence what the findings rest on."""
    sizes = ", ".join(map(str, SIZES))
    return (
        f"{TOKENS} tokens in micro-batches of {sizes} against single steps; "
        f"{len(LENGTHS)} texts of {min(LENGTHS)} to {max(LENGTHS)} tokens over 4 slots, mixed, against each alone"
    )


def run_invariance(names: Sequence[str], threads: int, *, progress: Progress | None = None) -> list[Finding]:
    """Try architectures (all where ``names`` is empty), each in a process of its own.

    Raises :class:`InputError` for an unknown name.
    """
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise InputError(f"no architecture is called {unknown[0]!r}", hint=f"known: {', '.join(RECIPES)}")
    chosen = [name for name in RECIPES if not names or name in names]
    findings = []
    for number, name in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen), name)
        try:
            answer = run_job(_JOB, {"architecture": name, "threads": threads}, timeout=_LONGEST)
        except JobFailedError as error:
            findings.append(Finding(name, None, None, f"failed: {error}"))
            continue
        findings.append(finding_of(name, answer))
    return findings


def finding_of(name: str, answer: Mapping[str, object]) -> Finding:
    """Read a job's answer."""
    if answer["whole_text"]:
        return Finding(name, None, None, "reads the whole text at once: there are no steps to group", whole_text=True)
    one, several = answer["one"], answer["several"]
    if not isinstance(one, dict) or not isinstance(several, dict):
        raise TypeError("the job's findings are no objects")
    differences = [
        f"{size} rows: {_difference(figures)}" for size, figures in one.items() if not figures["identical"]
    ]
    if not several["identical"]:
        differences.append(f"side by side: {_difference(several)}")
    one_identical = all(figures["identical"] for figures in one.values())
    return Finding(name, one_identical, bool(several["identical"]), "; ".join(differences) or "every byte equal")


def _difference(figures: Mapping[str, object]) -> str:
    return f"{figures['differing']} of {figures['rows']} differ, the first is {figures['first']}"


def measure_cost(
    path: Path,
    threads: int,
    pairs: int,
    *,
    progress: Progress | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Time both configurations in turn on one model: a prompt, single steps, and steps of four sequences."""
    before = load_average()
    ratios: dict[str, list[float]] = {"prefill": [], "decode": [], "several": []}
    gains: list[float] = []
    with ExitStack() as stack:
        sides = []
        for invariant in (True, False):
            model = stack.enter_context(Model.open(path, repack=not invariant))
            rows = INVARIANT_ROWS if invariant else STOCK_ROWS
            sides.append(
                stack.enter_context(
                    Context(
                        model,
                        n_ctx=_PROMPT + 2 * _STEPS,
                        n_sequences=4,
                        n_ubatch=rows,
                        n_threads=threads,
                        batch_invariant=invariant,
                    )
                )
            )
        for number in range(pairs):
            if progress is not None:
                progress(number, pairs, f"pair {number + 1} of {pairs}")
            times: list[dict[str, float]] = [{}, {}]
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                times[side] = _time_side(sides[side], number, now)
            for what, values in ratios.items():
                values.append(times[1][what] / times[0][what])
            gains.append(4 * times[0]["decode"] / times[0]["several"])
    return Cost(
        path.name,
        threads,
        statistics.median(ratios["prefill"]),
        _quartiles(ratios["prefill"]),
        statistics.median(ratios["decode"]),
        _quartiles(ratios["decode"]),
        statistics.median(ratios["several"]),
        _quartiles(ratios["several"]),
        statistics.median(gains),
        (before, load_average()),
    )


def _time_side(context: Context, seed: int, now: Callable[[], float]) -> dict[str, float]:
    """Return seconds of the prompt, and the median ones of a single step and of a step of four sequences."""
    tokens = random_tokens(context.model.n_vocab, _PROMPT + 2 * _STEPS, seed=seed)
    starts = (_PROMPT + _STEPS, _OTHERS, _OTHERS, _OTHERS)
    context.apply(Clear())
    for slot in (1, 2, 3):
        context.decode(one_sequence(tokens[slot : slot + _OTHERS], 0, sequence=slot))
    begin = now()
    context.decode(one_sequence(tokens[:_PROMPT], 0))
    prefill = now() - begin
    single, several = [], []
    for step in range(_STEPS):
        begin = now()
        context.decode(one_sequence([tokens[_PROMPT + step]], _PROMPT + step))
        single.append(now() - begin)
    for step in range(_STEPS):
        batch = join(
            [one_sequence([tokens[step + slot]], starts[slot] + step, sequence=slot) for slot in range(len(starts))]
        )
        begin = now()
        context.decode(batch)
        several.append(now() - begin)
    return {"prefill": prefill, "decode": statistics.median(single), "several": statistics.median(several)}


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
