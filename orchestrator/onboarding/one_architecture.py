"""The job of one row of the table: make the model, put it through the gate, read its layer descriptors.

Run as a module by :mod:`orchestrator.onboarding.architectures`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.config import cache_dir
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.engine.synth import synth
from orchestrator.errors import ComputeError
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.children import answer_order
from orchestrator.onboarding.cuts import try_cuts
from orchestrator.onboarding.descriptors import DescriptorSummary
from orchestrator.onboarding.options import GateOptions
from orchestrator.onboarding.run import run_gate
from orchestrator.onboarding.traffic import measure_traffic
from orchestrator.types import ExpertBatch, FloatArray, LayerDescriptor


def judge_architecture(order: Mapping[str, object]) -> Mapping[str, object]:
    """Answer with the gate's record and the summary of the descriptors; of a known model's shape also the traffic,
    of an architecture what becomes of its cuts into stages.

    The order holds ``architecture``, ``like`` (a model's shape or None), ``workers`` (numbers) and ``steps``.
    """
    architecture, like = str(order["architecture"]), order["like"]
    workers, steps = order["workers"], order["steps"]
    if not isinstance(workers, list) or not isinstance(steps, int):
        raise TypeError("workers must be a list and steps a number")
    with tempfile.TemporaryDirectory(prefix="synthetic-", dir=cache_dir()) as folder:
        path = Path(folder) / f"{architecture}.gguf"
        synth(architecture, path, like=None if like is None else str(like))
        report = run_gate(path, GateOptions(worker_counts=tuple(workers), steps=steps))
        descriptors = descriptors_of(path)
        row = max(descriptor.n_embd for descriptor in descriptors)
        traffic = measure_traffic(GgufFile.open(path), row, workers) if like is not None else ()
        cuts = try_cuts(path) if like is None else None
        with Model.open(path, without_experts=True) as model:
            facts = {"hybrid": model.is_hybrid, "whole_text": model.reads_whole_text, "embeds": model.embeds}
    return {
        "record": report.record.to_json(),
        "descriptors": DescriptorSummary.of(descriptors).to_json(),
        "traffic": [each.to_json() for each in traffic],
        "cuts": None if cuts is None else cuts.to_json(),
        **facts,
    }


def descriptors_of(path: Path) -> tuple[LayerDescriptor, ...]:
    """Return what a backbone would tell its workers about a model; no expert is read."""
    with (
        Model.open(path, without_experts=True) as model,
        Session(model, n_ctx=64, exchange=_Nobody()) as session,
    ):
        return session.descriptors


class _Nobody:
    """An exchange that is never asked: making a context builds the graph, and no token is decoded."""

    def begin_step(self) -> None:
        pass

    def dispatch(self, batch: ExpertBatch) -> None:
        raise ComputeError("nothing was to be computed")

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        raise ComputeError("nothing was to be computed")

    def abort_step(self) -> None:
        pass


if __name__ == "__main__":
    answer_order(judge_architecture)
