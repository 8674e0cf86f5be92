"""A stage's memory is its layers' share: weights and caches, hybrid models too."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from orchestrator.engine.identity import engine_identity
from orchestrator.engine.synth import synth
from orchestrator.models.gguf import GgufFile
from orchestrator.ring.client import Ring
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.steps import one_sequence
from orchestrator.workers.local_stages import LocalStages
from tests.ring_models import tokens_of

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
LAYERS = 8
SMALL, LARGE = 512, 24576
WIDE = {"n_layer": LAYERS, "n_embd": 256, "n_head": 8, "n_head_kv": 8, "head": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make models whose caches outweigh the attention mask, which every stage needs whole."""
    folder = tmp_path_factory.mktemp("wide")

    def make(architecture: str) -> Path:
        path = folder / f"{architecture}.gguf"
        if not path.exists():
            synth(architecture, path, **WIDE)
        return path

    return make


def resident(path: Path, bounds: Sequence[int], n_ctx: int) -> list[tuple[int, int]]:
    """Return (mapped model, all else) of each process of a ring, as proportional set sizes in bytes.

    Taken after a prefill that meets all experts, because the weights are mapped and come in when they are used.
    """
    layers = [[LayerRange(first, last)] for first, last in itertools.pairwise(bounds)]
    with (
        LocalStages(path, layers, options=["--ctx", str(n_ctx)]) as stages,
        Ring(stages.addresses, identity=engine_identity()) as ring,
    ):
        ring.decode(one_sequence(tokens_of(ring.facts.n_vocab, 400), 0))
        return [proportional(pid, path) for pid in stages.pids]


def proportional(pid: int, path: Path) -> tuple[int, int]:
    mapped = others = 0
    in_model = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            in_model = line.endswith(path.name)
        elif line.startswith("Pss:"):
            size = int(line.split()[1]) * 1024
            mapped, others = (mapped + size, others) if in_model else (mapped, others + size)
    return mapped, others


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_caches_and_weights_are_those_of_the_layers_held(wide: Callable[[str], Path], architecture: str) -> None:
    path = wide(architecture)
    half = LAYERS // 2
    [whole_small], [whole_large] = (resident(path, [0, LAYERS], n_ctx) for n_ctx in (SMALL, LARGE))
    small, large = (resident(path, [0, half, LAYERS], n_ctx) for n_ctx in (SMALL, LARGE))
    caches = whole_large[1] - whole_small[1]
    assert caches > 50 * MIB
    for before, after in zip(small, large, strict=True):
        assert abs(after[1] - before[1] - caches / 2) < 0.1 * caches / 2
    weights = [0, 0]
    for tensor in GgufFile.open(path).tensors.values():
        if tensor.name.startswith("blk."):
            weights[int(tensor.name.split(".")[1]) >= half] += tensor.n_bytes
    for held, expected in zip(small, weights, strict=True):
        assert abs(held[0] - expected) < 0.1 * expected


def test_a_context_fits_that_would_not_if_all_layers_had_caches(wide: Callable[[str], Path]) -> None:
    path = wide("qwen35moe")

    def start(layers: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "orchestrator", "stage", str(path), "--layers", layers, "--threads", "1"]
        command += ["--ctx", "200000", "--json"]
        # 2 of 8 layers have attention: 390 MiB of cache for each, 400 MiB are allowed besides the weights
        limited = ["sh", "-c", 'ulimit -d 900000; exec "$@"', "sh", *command]
        return subprocess.Popen(limited, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start(f"0:{LAYERS}") as process:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 3
        assert output == ""
        assert "error:" in errors
        assert "Traceback" not in errors
    with start(f"0:{LAYERS // 2}") as process:
        assert json.loads(process.stdout.readline())["ready"] is True
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
