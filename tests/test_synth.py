"""Synthetic models: they load in the engine, compute something worth comparing, and are the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.engine.synth import architectures, synth
from orchestrator.errors import EngineError, InputError, UnknownArchitectureError

PROBE = Path(__file__).with_name("synth_probe.py")

# Every kind that the hook must treat differently: fused tensors, biases, latent attention with router groups,
# weight before the expert, two calls per layer, dense lead layers, a recurrent hybrid.
SUBSET = ("llama", "qwen2moe", "qwen3moe", "deepseek2", "gpt-oss", "llama4", "grovemoe", "step35", "qwen35moe")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def probe(path: Path) -> dict:
    answer = subprocess.run([sys.executable, str(PROBE), str(path)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-600:]
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    for architecture in SUBSET:
        synth(architecture, folder / f"{architecture}.gguf")
    return folder


@pytest.mark.parametrize("architecture", SUBSET)
def test_loads_and_is_not_degenerate(models: Path, architecture: str) -> None:
    path = models / f"{architecture}.gguf"
    assert path.stat().st_size < 20e6
    found = probe(path)
    assert found["finite"]
    assert found["repeatable"]
    assert found["distinct"] == 33  # no two of 33 positions answer alike
    assert found["step"] > 0.1  # neighbours differ by more than rounding
    assert found["context_effect"] > 1e-3  # the first token still matters at the last position
    assert found["moe_layers"] >= 2
    assert found["experts_used"] > 0.5


@pytest.mark.parametrize("architecture", ["llama", "step35"])
def test_same_arguments_same_bytes(models: Path, tmp_path: Path, architecture: str) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    synth(architecture, again)
    synth(architecture, other, seed=1)
    assert digest(again) == digest(models / f"{architecture}.gguf")
    assert digest(other) != digest(again)


def test_sizes_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synth("qwen3moe", path, n_expert=6, top_k=2, n_layer=3)
    found = probe(path)
    assert found["moe_layers"] == 3
    assert found["finite"]


def test_progress_ends_at_the_sum(tmp_path: Path) -> None:
    seen: list[tuple[float, float | None]] = []
    synth("llama", tmp_path / "m.gguf", progress=lambda done, total, note="": seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_unknown_names_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match="qwen2moo"):
        synth("qwen2moo", tmp_path / "m.gguf")
    with pytest.raises(InputError, match="n_experts"):
        synth("llama", tmp_path / "m.gguf", n_experts=4)
    assert list(tmp_path.iterdir()) == []


def test_an_assertion_in_the_engine_is_an_error_here(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="n_expert_used_max"):
        synth("llama", tmp_path / "m.gguf", n_expert=2, top_k=4)
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_what_can_be_made() -> None:
    assert set(SUBSET) <= set(architectures())
