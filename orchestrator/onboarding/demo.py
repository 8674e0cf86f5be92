"""The main job on one screen: workers, verdict, answer, figures, and whether the bytes are those of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.gateway.template import ChatMessage, ChatTemplate, missing_template
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.answer import Answer, TextStream, generate, repeat
from orchestrator.onboarding.findings import GateRecord
from orchestrator.onboarding.meter import Progress
from orchestrator.onboarding.options import GateOptions
from orchestrator.onboarding.prompts import MICRO_BATCH
from orchestrator.onboarding.records import verdict
from orchestrator.onboarding.run import run_gate
from orchestrator.onboarding.star import Counters, Fleet, Star, open_fleet
from orchestrator.types import Contract
from orchestrator.verification.gate import compare
from orchestrator.workers.ownership import split_evenly

QUESTION = "Why is the sky blue? Answer in one sentence."
"""A question that the default model, with its 135 million weights, answers sensibly."""

_CONTEXT = 512
_QUICK_STEPS = 4
_QUICK_PROMPTS = ("short", "code")  # the code is longer than a micro-batch


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo shows; ``limit`` is the most tokens of the answer."""

    workers: int = 3
    contract: Contract = Contract.EXACT
    question: str = QUESTION
    limit: int = 96
    threads: int = 1


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found; ``bytes_per_token_layer`` counts both directions and all workers, in decode steps."""

    model: str
    workers: int
    contract: Contract
    byte_identical: bool
    logits_sha256: str
    oracle_sha256: str
    worker_pids: tuple[int, ...]
    rows_by_worker: dict[str, int]
    text: str
    tokens: int
    tokens_per_second_star: float
    tokens_per_second_local: float
    round_trips_per_token: float
    bytes_per_token_layer: float
    gate: str  # the verdict in words

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "model": self.model,
            "workers": self.workers,
            "contract": self.contract.value,
            "byte_identical": self.byte_identical,
            "logits_sha256": self.logits_sha256,
            "oracle_sha256": self.oracle_sha256,
            "worker_pids": list(self.worker_pids),
            "rows_by_worker": self.rows_by_worker,
            "text": self.text,
            "tokens": self.tokens,
            "tokens_per_second_star": round(self.tokens_per_second_star, 2),
            "tokens_per_second_local": round(self.tokens_per_second_local, 2),
            "round_trips_per_token": self.round_trips_per_token,
            "bytes_per_token_layer": round(self.bytes_per_token_layer, 1),
            "gate": self.gate,
        }


class DemoView(Protocol):
    """Who watches the demo; called in this order."""

    def fleet(self, fleet: Fleet) -> None:
        """The workers are up."""

    def verdict(self, sentence: str) -> None:
        """The gate has spoken."""

    def text(self, piece: str) -> None:
        """A piece of the answer."""

    def result(self, result: DemoResult) -> None:
        """All figures are known."""


def run_demo(
    path: Path,
    options: DemoOptions,
    view: DemoView,
    *,
    progress: Progress | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> DemoResult:
    """Answer one question over local workers, answer it again in one process, and compare every logit."""
    file = GgufFile.open(path)
    file.require_moe()
    sentence = _gate(path, options, progress)
    with open_fleet(file, split_evenly(file, options.workers), threads=options.threads) as fleet:
        view.fleet(fleet)
        view.verdict(sentence)
        with fleet.connect(options.contract, n_ctx=_CONTEXT) as star:
            answer, text, spent = _ask(star, options, view, now)
            prompt = _prompt(star.model, options.question)
            rows = star.rows_by_worker()
        pids = fleet.pids
    # The workers are gone: both sides have the machine to themselves when they are timed.
    local = _answer_alone(path, prompt, answer, options.threads, now)
    result = DemoResult(
        model=path.name,
        workers=options.workers,
        contract=options.contract,
        byte_identical=compare(answer.logits, local.logits).byte_identical,
        logits_sha256=answer.sha256,
        oracle_sha256=local.sha256,
        worker_pids=pids,
        rows_by_worker=rows,
        text=text,
        tokens=len(answer.tokens),
        tokens_per_second_star=answer.tokens_per_second,
        tokens_per_second_local=local.tokens_per_second,
        round_trips_per_token=spent.round_trips / max(len(answer.tokens), 1),
        bytes_per_token_layer=(spent.bytes_in + spent.bytes_out) / max(spent.round_trips, 1),
        gate=sentence,
    )
    view.result(result)
    return result


def _gate(path: Path, options: DemoOptions, progress: Progress | None) -> str:
    """Say what the gate found: what is on record, else a shortened run that is not kept."""
    known = verdict(path, options.contract)
    if known is not None:
        return _sentence(known, options.contract, f"recorded {known.created[:10]}")
    quick = GateOptions(
        contracts=(options.contract,),
        worker_counts=(options.workers,),
        steps=_QUICK_STEPS,
        prompts=_QUICK_PROMPTS,
        threads=options.threads,
        noise_floor=options.contract is not Contract.EXACT,
        invariance=False,
    )
    report = run_gate(path, quick, progress=progress)
    return _sentence(report.record, options.contract, "a shortened run; `linkcpp onboard` does all of it")


def _sentence(record: GateRecord, contract: Contract, origin: str) -> str:
    cells = record.contracts[contract]
    counts = ", ".join(str(count) for count in sorted(cells))
    positions = min(cell.positions for cell in cells.values())
    word = "passed" if record.passes(contract) else "FAILED"
    return f"{word} for {contract.value} at {counts} workers, {positions} positions ({origin})"


def _prompt(model: Model, question: str) -> list[int]:
    if model.chat_template is None:
        raise missing_template()
    bos, eos = (model.piece(token, special=True).decode("utf-8", "replace") for token in (model.bos, model.eos))
    text = ChatTemplate(model.chat_template, bos=bos, eos=eos).render([ChatMessage("user", question)])
    # A template that writes the start token itself must not get a second one.
    return model.tokenize(text, add_special=not (bos and text.startswith(bos)), parse_special=True)


def _ask(star: Star, options: DemoOptions, view: DemoView, now: Callable[[], float]) -> tuple[Answer, str, Counters]:
    stream = TextStream(star.model.piece, view.text)
    before: list[Counters] = []
    answer = generate(
        star.session,
        _prompt(star.model, options.question),
        limit=options.limit,
        is_end=star.model.is_end_of_generation,
        emit=stream,
        now=now,
        prefilled=lambda: before.append(star.counters()),
    )
    return answer, stream.text, star.counters() - before[0]


def _answer_alone(path: Path, prompt: list[int], answer: Answer, threads: int, now: Callable[[], float]) -> Answer:
    with (
        Model.open(path) as model,
        Session(model, n_ctx=_CONTEXT, n_ubatch=MICRO_BATCH, n_threads=threads) as session,
    ):
        return repeat(session, prompt, answer.tokens, now=now)
