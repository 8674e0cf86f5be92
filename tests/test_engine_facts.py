"""The facts that plans are made from, held against files and against what the engine allocates."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import FAMILIES

from bindings import library
from orchestrator.engine.context import Context
from orchestrator.engine.facts import file_facts, load_of, model_facts
from orchestrator.engine.model import Model
from orchestrator.models.architectures import RECIPES
from orchestrator.models.gguf import GgufFile

NAMED = (*FAMILIES, "grok", "glm-dsa", "glm5-next", "kimi-linear", "minimax-m3")
WHOLE_TEXT = tuple(name for name, recipe in RECIPES.items() if recipe.bidirectional)


def compute_buffer(path: Path, n_ctx: int, n_sequences: int) -> float:
    """Bytes of the buffer that the engine keeps for the values of a graph, from its log."""
    api, _ = library.load()
    lines: list[str] = []
    listener = api.llama_log_callback(lambda _level, text, _data: lines.append(text.decode("utf-8", "replace")))
    with Model.open(path) as model:
        api.llama_log_set(listener, ctypes.c_void_p(0))
        try:
            Context(model, n_ctx=n_ctx, n_sequences=n_sequences).close()
        finally:
            api.llama_log_set(library._callbacks[0], ctypes.c_void_p(0))
    return sum(float(size) for size in re.findall(r"compute buffer size = +([\d.]+) MiB", "".join(lines))) * 2**20


@pytest.mark.parametrize(
    "architecture",
    [
        *NAMED,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in sorted(RECIPES)
            if name not in NAMED and name not in WHOLE_TEXT
        ),
    ],
)
def test_working_memory_is_bounded_from_above_and_not_by_far(
    synthetic: Callable[[str], Path], architecture: str
) -> None:
    path = synthetic(architecture)
    for n_ctx, n_sequences in ((4096, 1), (16384, 1), (1024, 8)):
        facts = file_facts(GgufFile.open(path), load_of(n_ctx, n_sequences))
        found = compute_buffer(path, n_ctx, n_sequences)
        assert found <= facts.scratch + facts.output_scratch <= 20 * found


def test_weights_add_up_to_the_file(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("step35")
    file = GgufFile.open(path)
    facts = file_facts(file, load_of(256))
    total = sum(layer.weights for layer in facts.layers) + facts.input_weights + facts.output_weights
    assert total == sum(entry.n_bytes for entry in file.manifest.values())
    assert facts.n_expert_layers == len(file.moe_layers)
    for number in file.moe_layers:
        assert facts.layers[number].expert_weights == file.n_expert * file.bytes_per_expert(number)
    dense = next(layer for layer in facts.layers if not layer.has_experts)
    assert dense.read == dense.weights
    routed = next(layer for layer in facts.layers if layer.has_experts)
    share = file.top_k / file.n_expert
    assert routed.expert_read == pytest.approx(routed.expert_weights * share, rel=0.01)
    assert routed.read == routed.weights - routed.expert_weights + routed.expert_read


def test_layers_of_a_hybrid_differ(synthetic: Callable[[str], Path]) -> None:
    facts = file_facts(GgufFile.open(synthetic("qwen35moe")), load_of(256))
    kinds = [(layer.cache_per_token > 0, layer.cache_per_sequence > 0) for layer in facts.layers]
    assert kinds == ([(False, True)] * 3 + [(True, False)]) * 2


def test_cuts_come_from_the_graph(synthetic: Callable[[str], Path]) -> None:
    facts = model_facts(synthetic("step35"), load_of(256))
    assert facts.places == tuple(range(facts.n_layer + 1))
    assert all(cut.bytes_per_token > 0 for cut in facts.cuts)
    shared = model_facts(synthetic("nomic-bert-moe"), load_of(256))
    assert shared.places == (0, shared.n_layer), "it marks no layer's output, so it cannot be cut"


def test_context_is_rounded_as_the_engine_rounds_it() -> None:
    assert load_of(1).cells == 256
    assert load_of(257, 3).cells == 512
