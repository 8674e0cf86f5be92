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
    file = GgufFile.open(path)
    for n_ctx, n_sequences in ((16000, 1), (256, 64)):
        caches = layer_caches(file, n_sequences)
        cells = n_sequences * context_cells(n_ctx)
        found = allocated(path, n_ctx, n_sequences)
        # The log rounds each buffer to a hundredth of a MiB.
        assert cells * sum(cache.per_token for cache in caches) == pytest.approx(found["KV"], rel=0.01, abs=20_000)
        if not RECIPES[architecture].source.startswith("deepseek4"):
            states = n_sequences * sum(cache.per_sequence for cache in caches)
            assert states == pytest.approx(found["RS"], rel=0.005, abs=10_000)
