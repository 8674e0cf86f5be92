"""The router of every layer decides over remote experts what it decides in one process, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Contract
from tests.conftest import FAMILIES
from tests.inprocess import InProcessExchange

TOKENS = 40  # one micro-batch
PROBE = Path(__file__).with_name("router_probe.py")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_experts_and_weights_are_those_of_one_process(
    synthetic: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    path = synthetic(architecture)
    with (
        ExpertStore(path, None) as store,
        Model.open(path, without_experts=True) as model,
        Session(model, n_ctx=64, exchange=(exchange := InProcessExchange([store], Contract.EXACT))) as session,
    ):
        exchange.describe(session.descriptors)
        n_expert = {(descriptor.layer, descriptor.call): descriptor.n_expert for descriptor in session.descriptors}
        tokens = [int(token) for token in np.random.default_rng(5).integers(3, model.n_vocab, TOKENS)]
        logits = session.decode(tokens, all_logits=True)

    out = tmp_path / "router.npz"
    subprocess.run([sys.executable, PROBE, path, out, *map(str, tokens)], check=True, capture_output=True)
    with np.load(out) as alone:
        assert alone["logits"].tobytes() == logits.tobytes()
        assert {batch.layer for batch in exchange.seen} == set(GgufFile.open(path).moe_layers)
        for batch in exchange.seen:
            key = f"{batch.layer}-{batch.call}"
            # grovemoe's second call has one adjugate expert for each group of routed ones
            group = n_expert[batch.layer, 0] // n_expert[batch.layer, batch.call]
            assert np.array_equal(alone[f"experts-{key}"] // group, batch.experts), f"experts of layer and call {key}"
            assert alone[f"weights-{key}"].tobytes() == batch.weights.tobytes(), f"weights of layer and call {key}"
