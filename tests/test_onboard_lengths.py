"""The default model at lengths around and far beyond a micro-batch, over up to five workers with uneven shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.models.gguf import GgufFile
from orchestrator.models.sources import get_model
from orchestrator.onboarding.prompts import Prompt, build_prompts, random_tokens
from orchestrator.onboarding.star import open_fleet, uneven_shares
from orchestrator.onboarding.trace import Trace, follow, replay, run_prompts
from orchestrator.types import Contract
from orchestrator.verification.gate import NoiseFloor, judge

LENGTHS = (1, 33, 512, 700)
STEPS = 64
CONTEXT = 1024


@pytest.fixture(scope="module")
def model_file() -> GgufFile:
    return GgufFile.open(get_model("smollm2-moe"))


@pytest.fixture(scope="module")
def oracle(model_file: GgufFile) -> list[Trace]:
    with Model.open(model_file.path) as model, Session(model, n_ctx=CONTEXT) as session:
        texts = build_prompts(model.tokenize, model.n_vocab, longest=CONTEXT)
        tokens = [token for prompt in texts for token in prompt.tokens]
        tokens += random_tokens(model.n_vocab, max(LENGTHS) - len(tokens), seed=5)
        prompts = [Prompt(f"{length} tokens", tuple(tokens[:length])) for length in LENGTHS]
        return run_prompts(session, prompts, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_exact_is_byte_identical_at_every_length(model_file: GgufFile, oracle: list[Trace], workers: int) -> None:
    shares = uneven_shares(model_file.moe_layers, model_file.n_expert, workers)
    with open_fleet(model_file, shares) as fleet, fleet.connect(Contract.EXACT, n_ctx=CONTEXT) as star:
        outcome = replay(star.session, oracle)
        rows = star.rows_by_worker()
    assert outcome.comparison.positions == sum(LENGTHS) + len(LENGTHS) * STEPS
    assert outcome.comparison.byte_identical
    assert outcome.logits_sha256 == outcome.oracle_sha256
    assert len(rows) == workers
    assert all(count > 0 for count in rows.values())


@pytest.mark.slow
def test_sum_stays_within_the_noise_floor(model_file: GgufFile, oracle: list[Trace]) -> None:
    floor = stock_noise(model_file.path, oracle)
    shares = uneven_shares(model_file.moe_layers, model_file.n_expert, 3)
    with open_fleet(model_file, shares) as fleet, fleet.connect(Contract.SUM, n_ctx=CONTEXT) as star:
        outcome = replay(star.session, oracle)
    verdict = judge(Contract.SUM, outcome.comparison, floor)
    assert verdict.passed, verdict.reason


def stock_noise(path: Path, oracle: list[Trace]) -> NoiseFloor:
    """The stock configuration at micro-batches of 512 and of 16 rows."""
    with Model.open(path, repack=True) as model:
        with Session(model, n_ctx=CONTEXT, n_ubatch=16, batch_invariant=False) as session:
            reference = follow(session, oracle)
        with Session(model, n_ctx=CONTEXT, n_ubatch=512, batch_invariant=False) as session:
            comparison = replay(session, reference).comparison
    return NoiseFloor.of(comparison, micro_batches=(512, 16), repacked=True)
