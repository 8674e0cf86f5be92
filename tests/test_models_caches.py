"""What the caches of a model take, held against what the engine allocates for it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import FAMILIES

from bindings import library
from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.models.architectures import RECIPES
from orchestrator.models.caches import context_cells, layer_caches
from orchestrator.models.gguf import GgufFile

HYBRIDS = ("kimi-linear", "granitehybrid", "lfm2moe", "minimax-01", "qwen4exp")
SPARSE = ("glm-dsa", "minimax-m3", "deepseek4")
NAMED = (*FAMILIES, *HYBRIDS, *SPARSE)


def allocated(path: Path, n_ctx: int, n_sequences: int) -> dict[str, float]:
    """Bytes of the attention caches ("KV") and recurrent states ("RS"), from the engine's own log."""
    api, _ = library.load()
    lines: list[str] = []
    listener = api.llama_log_callback(lambda _level, text, _data: lines.append(text.decode("utf-8", "replace")))
    with Model.open(path) as model:
        api.llama_log_set(listener, ctypes.c_void_p(0))
        try:
            Context(model, n_ctx=n_ctx, n_sequences=n_sequences).close()
        finally:
            api.llama_log_set(library._callbacks[0], ctypes.c_void_p(0))
    text = "".join(lines)
    return {
        kind: sum(float(size) for size in re.findall(rf"{kind} buffer size = +([\d.]+) MiB", text)) * 2**20
        for kind in ("KV", "RS")
    }


@pytest.mark.parametrize(
    "architecture",
    [*NAMED, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(RECIPES) if name not in NAMED)],
)
def test_caches_are_as_large_as_the_engine_makes_them(synthetic: Callable[[str], Path], architecture: str) -> None:
    path = synthetic(architecture)
    caches = layer_caches(GgufFile.open(path))
    per_token = sum(cache.per_token for cache in caches)
    per_sequence = sum(cache.per_sequence for cache in caches)
    found = allocated(path, 16_000, 1)
    # The log rounds each buffer to a hundredth of a MiB.
    assert context_cells(16_000) * per_token == pytest.approx(found["KV"], rel=0.01, abs=20_000)
    found = allocated(path, 256, 64)
    if architecture == "deepseek4":  # what is constant there is part of the same buffers, and rounded up
        assert found["KV"] <= 64 * (256 * per_token + per_sequence)
        return
    assert 64 * 256 * per_token == pytest.approx(found["KV"], rel=0.005, abs=20_000)
    assert 64 * per_sequence == pytest.approx(found["RS"], rel=0.005, abs=10_000)
