"""Every architecture over a star inside one process: `exact` gives the bytes of the model alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.models.architectures import RECIPES
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.descriptors import ACTIVATIONS, DescriptorSummary
from orchestrator.onboarding.memory_star import open_memory_star
from orchestrator.onboarding.one_architecture import descriptors_of
from orchestrator.onboarding.prompts import Prompt, random_tokens
from orchestrator.onboarding.star import uneven_shares
from orchestrator.onboarding.trace import Trace, replay, run_prompts
from orchestrator.onboarding.whole_text import decoder_of
from orchestrator.types import Contract

Make = Callable[[str], Path]

SUBSET = (
    "llama",  # softmax router, scale tensors
    "deepseek2",  # sigmoid router with groups, shared expert, fused gate and up
    "deepseek4",  # square root of softplus, clamp, four residual streams; grouping decides its bytes
    "gpt-oss",  # SWIGLU-OAI, biases
    "grok",  # GELU
    "grovemoe",  # two calls per layer
    "kimi-k3",  # SITU, a latent row, recurrent layers, residuals over blocks of layers
    "llama4",  # weight before the expert
    "nemotron_h_moe",  # RELU², no gate
    "nomic-bert-moe",  # an encoder: embeddings of the whole text
    "qwen35moe",  # recurrent layers, shared expert with a gate
    "smallthinker",  # RELU, routed by the layer's input
    "step35",  # dense lead layers, sliding window
)
"""The named subset that `make test` runs: each kind of router, activation, tensor and memory once."""

STEPS = 4
SIZE = 62  # a multiple of two sequences: hybrid models keep a backup


def oracle_of(path: Path) -> list[Trace]:
    with Model.open(path) as model, Session(model, n_ctx=128, n_ubatch=SIZE) as session:
        prompts = [Prompt(f"{n}", random_tokens(model.n_vocab, n, seed=n)) for n in (80, 1)]
        return run_prompts(decoder_of(session), prompts, STEPS)


def compare(path: Path, oracle: list[Trace], workers: int, contract: Contract = Contract.EXACT):
    file = GgufFile.open(path)
    with open_memory_star(
        path,
        uneven_shares(file.moe_layers, file.n_expert, workers),
        contract=contract,
        n_ctx=128,
        n_ubatch=SIZE,
        repack=False,
        batch_invariant=True,
    ) as star:
        comparison = replay(decoder_of(star.session), oracle).comparison
        assert all(star.rows_by_worker().values())
    assert comparison.positions == 80 + 1 + 2 * STEPS
    return comparison


@pytest.mark.parametrize("architecture", SUBSET)
def test_exact_is_byte_identical_over_three_workers(synthetic: Make, architecture: str) -> None:
    path = synthetic(architecture)
    oracle = oracle_of(path)
    assert compare(path, oracle, 3).byte_identical
    if GgufFile.open(path).top_k > 1:  # the comparison sees a change of the order of additions
        assert not compare(path, oracle, 3, Contract.SUM).byte_identical


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 5])
@pytest.mark.parametrize("architecture", list(RECIPES))
def test_every_architecture_is_byte_identical(synthetic: Make, architecture: str, workers: int) -> None:
    path = synthetic(architecture)
    assert compare(path, oracle_of(path), workers).byte_identical


def test_the_subset_has_every_activation(synthetic: Make) -> None:
    named = {DescriptorSummary.of(descriptors_of(synthetic(name))).activation for name in SUBSET}
    page = (Path(__file__).parent.parent / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert named == {name for name in ACTIVATIONS if f"| {name} |" in page or f"| {name}, " in page}
