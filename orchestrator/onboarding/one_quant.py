"""The job of one quantisation type: make the models, run each in one process and over a star, compare all bytes.

Run as a module by :mod:`orchestrator.onboarding.quants`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from orchestrator.config import cache_dir
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.engine.synth import synth
from orchestrator.engine.synth_quantize import quantize
from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.children import answer_order
from orchestrator.onboarding.memory_star import open_memory_star
from orchestrator.onboarding.prompts import Prompt, random_tokens
from orchestrator.onboarding.quant_cases import SETTINGS, Body, Setting, bodies_for
from orchestrator.onboarding.star import uneven_shares
from orchestrator.onboarding.trace import Trace, replay, run_prompts
from orchestrator.types import Contract

WORKERS = 3
STEPS = 6
_LENGTHS = (96, 1, 33)  # rows: more than a micro-batch of 63, one, and enough for several of each expert
_CONTEXT = 128


def judge_quant(order: Mapping[str, object]) -> Mapping[str, object]:
    """Answer with one cell per body and setting for the order's ``type``."""
    type_name = str(order["type"])
    wanted = order.get("bodies")
    cells: list[Mapping[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="quantised-", dir=cache_dir()) as folder:
        for body in bodies_for(type_name):
            if isinstance(wanted, list) and body.name not in wanted:
                continue
            path = make_quantised(type_name, body, Path(folder))
            cells += judge_file(path, body)
            path.unlink()
    return {"cells": cells}


def make_quantised(type_name: str, body: Body, folder: Path) -> Path:
    """Write the body with its experts in a type."""
    source, path = folder / f"{body.name}-f32.gguf", folder / f"{body.name}-{type_name}.gguf"
    synth(body.architecture, source, sizes=body.sizes)
    quantize(source, path, type_name)
    source.unlink()
    return path


def judge_file(path: Path, body: Body) -> list[Mapping[str, object]]:
    """Compare one process with a star in every setting; each cell says what was equal."""
    shares = uneven_shares(GgufFile.open(path).moe_layers, GgufFile.open(path).n_expert, WORKERS)
    oracles: list[list[Trace]] = []
    cells: list[Mapping[str, object]] = []
    for setting in SETTINGS:
        oracle = _oracle(path, setting)
        oracles.append(oracle)
        with open_memory_star(
            path,
            shares,
            contract=Contract.EXACT,
            n_ctx=_CONTEXT,
            n_ubatch=setting.n_ubatch,
            repack=setting.repack,
            batch_invariant=setting.batch_invariant,
        ) as star:
            outcome = replay(star.session, oracle)
            rows = list(star.rows_by_worker().values())
        if not all(rows):
            raise InputError(f"{body.name}: a worker was never asked, so that equal bytes prove nothing")
        cells.append(
            {
                "body": body.name,
                "setting": setting.name,
                "byte_identical": outcome.comparison.byte_identical,
                "positions": outcome.comparison.positions,
                "differing": int((~outcome.comparison.identical).sum()),
                "max_difference": float(min(outcome.comparison.max_difference, 1e30)),
                "like_first_setting": _same(oracle, oracles[0]),
            }
        )
    return cells


def _oracle(path: Path, setting: Setting) -> list[Trace]:
    with (
        Model.open(path, repack=setting.repack) as model,
        Session(model, n_ctx=_CONTEXT, n_ubatch=setting.n_ubatch, batch_invariant=setting.batch_invariant) as session,
    ):
        prompts = [
            Prompt(f"{length} tokens", random_tokens(model.n_vocab, length, seed=length)) for length in _LENGTHS
        ]
        traces = run_prompts(session, prompts, STEPS)
    if not all(np.isfinite(trace.prefill).all() and np.isfinite(trace.steps).all() for trace in traces):
        raise InputError(f"{path.name} gives logits that are not finite")
    return traces


def _same(traces: Sequence[Trace], others: Sequence[Trace]) -> bool:
    return all(
        np.array_equal(one.prefill, other.prefill) and np.array_equal(one.steps, other.steps)
        for one, other in zip(traces, others, strict=True)
    )


if __name__ == "__main__":
    answer_order(judge_quant)
