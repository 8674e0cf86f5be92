"""Synthetic models: they load in the engine, compute something worth comparing, and are the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_cpp import Llama

from orchestrator.engine.synth import EXPERT_WEIGHT, architectures, synth
from orchestrator.engine.synth_blocks import random_blocks
from orchestrator.engine.synth_quantize import QUANTISED_TYPES, quantize
from orchestrator.engine.synth_weights import Spread, float_pieces
from orchestrator.errors import EngineError, InputError, UnknownArchitectureError
from orchestrator.models.architectures import RECIPES, WITHOUT_EXPERTS
from orchestrator.models.faithful import FAITHFUL
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf import GgufFile

PROBE = Path(__file__).with_name("synth_probe.py")

# Every kind that the hook must treat differently: fused tensors, biases, latent attention with router groups,
# weight before the expert, two calls per layer, dense lead layers, a recurrent hybrid.
SUBSET = ("llama", "qwen2moe", "qwen3moe", "deepseek2", "gpt-oss", "llama4", "grovemoe", "step35", "qwen35moe")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def probe(path: Path, *, embeds: bool = False) -> dict:
    command = [sys.executable, str(PROBE), str(path), *(["--embeds"] if embeds else [])]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-600:]
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    for architecture in SUBSET:
        synth(architecture, folder / f"{architecture}.gguf")
    return folder


def check(found: dict, n_layer: int = 2) -> None:
    assert found["finite"]
    assert found["repeatable"]
    assert found["distinct"] == 33  # no two of 33 positions answer alike
    assert found["step"] > 0.1  # neighbours differ by more than rounding
    assert found["context_effect"] > 1e-3  # the first token still matters at the last position
    assert found["moe_layers"] >= n_layer
    assert found["experts_used"] > 0.5  # in the layer that uses the fewest


@pytest.mark.parametrize("architecture", SUBSET)
def test_loads_and_is_not_degenerate(models: Path, architecture: str) -> None:
    path = models / f"{architecture}.gguf"
    assert path.stat().st_size < 20e6
    check(probe(path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in RECIPES if name not in SUBSET])
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "m.gguf"
    synth(architecture, path)
    assert path.stat().st_size < 20e6
    check(probe(path, embeds=RECIPES[architecture].embeds))


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


def test_weights_are_the_same_on_every_machine() -> None:
    (values,) = float_pieces(0, "blk.0.ffn_up.weight", (4,), Spread(0.0, 1.0))
    assert values.tobytes().hex() == "b0e47d3ffab9a3bf7489adbfbe4883bf"


def test_tokenizer_takes_any_text(models: Path) -> None:
    model = Llama(str(models / "llama.gguf"), n_ctx=64, verbose=False)
    text = "the Größe of 鯨 and \U0001f433\n".encode()
    tokens = model.tokenize(text, add_bos=False)
    assert len(tokens) < len(text)  # some words are tokens of their own
    assert model.detokenize(tokens).strip(b" ") == text


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


def test_architectures_without_experts_say_why(tmp_path: Path) -> None:
    assert not set(WITHOUT_EXPERTS) & set(RECIPES)
    with pytest.raises(InputError, match="lfm2 has no experts: shares the graph of lfm2moe"):
        synth("lfm2", tmp_path / "m.gguf")


def test_gate_and_up_can_be_apart(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synth("deepseek2", path, fused=False, scales=False)
    names = set(GgufFile.open(path).tensors)
    assert "blk.1.ffn_gate_exps.weight" in names
    assert not any("gate_up" in name or name.endswith("scale") for name in names)
    check(probe(path))


# --- shapes of known models ---------------------------------------------------------------------------------------

# layers, layers with experts, experts, top-k: of the published configurations
PUBLISHED = {
    "step-3.7-flash": (45, 42, 288, 8),
    "qwen3.5-122b": (48, 48, 256, 8),
    "glm-5.2": (78, 75, 256, 8),
    "glm-4.6": (92, 89, 160, 8),
    "minimax-m2": (62, 62, 256, 8),
    "deepseek-v3": (61, 58, 256, 8),
    "kimi-k3": (93, 92, 896, 16),
    "qwen3-235b": (94, 94, 128, 8),
    "gpt-oss-120b": (36, 36, 128, 4),
    "llama-4-maverick": (48, 24, 128, 1),
    "minimax-m3": (60, 57, 128, 4),
    "mixtral-8x22b": (56, 56, 8, 2),
}


def faithful(name: str, path: Path) -> None:
    synth(FAITHFUL[name].architecture, path, like=name)
    file = GgufFile.open(path)
    assert (file.n_layer, len(file.moe_layers), file.n_expert, file.top_k) == PUBLISHED[name]
    assert path.stat().st_size < 1e9
    check(probe(path), len(file.moe_layers))


def test_every_shape_is_checked() -> None:
    assert {*PUBLISHED, "qwen3.5-122b-layer"} == set(FAITHFUL)


def test_a_shape_of_a_known_model(tmp_path: Path) -> None:
    faithful("gpt-oss-120b", tmp_path / "m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "gpt-oss-120b"])
def test_every_shape(tmp_path: Path, name: str) -> None:
    faithful(name, tmp_path / "m.gguf")


def test_a_shape_needs_its_architecture(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kimi-k3 is of architecture kimi-k3, not llama"):
        synth("llama", tmp_path / "m.gguf", like="kimi-k3")
    with pytest.raises(InputError, match="kimi-k4"):
        synth("llama", tmp_path / "m.gguf", like="kimi-k4")


def test_a_layer_of_full_width_is_quantised_blocks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synth("qwen35moe", path, like="qwen3.5-122b-layer", n_expert=16)  # 16 of 256: the same layer, less to write
    file = GgufFile.open(path)
    experts = [info for info in file.tensors.values() if EXPERT_WEIGHT.search(info.name)]
    assert {info.type for info in experts} == {GgmlType.Q4_K}
    assert {info.shape[:2] for info in experts} == {(3072, 2048), (1024, 3072)}
    found = probe(path)
    assert found["finite"]
    assert found["experts_used"] > 0.9


@pytest.mark.parametrize("kind", [GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.Q8_0])
def test_random_blocks_have_the_wanted_spread(kind: GgmlType) -> None:
    data = b"".join(bytes(piece) for piece in random_blocks(3, "w", kind, (256, 2048), 0.25))
    rows = np.frombuffer(data, dtype=np.uint8).reshape(2048, -1)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(kind)))
    assert values.shape == (2048, 256)
    assert abs(float(values.std()) - 0.25) < 0.01
    assert np.abs(values.reshape(-1, 32).mean(axis=1)).mean() < 0.06  # no block carries an offset
    assert data == b"".join(bytes(piece) for piece in random_blocks(3, "w", kind, (256, 2048), 0.25))


# --- quantisation -------------------------------------------------------------------------------------------------

# largest relative error of the root mean square, by the bits of a value; half as much again as measured
TOLERANCE = {"F32": 0.0, "F16": 3e-4, "BF16": 2.5e-3, "Q8": 6e-3, "Q6": 0.02, "Q5": 0.045, "Q4": 0.09, "IQ4": 0.1}
TOLERANCE |= {"MX": 0.16, "Q3": 0.18, "IQ3": 0.27, "Q2": 0.33, "IQ2": 0.5, "IQ1": 0.64}
WIDE = {"n_embd": 256, "n_ff": 256, "n_ff_exp": 256, "n_expert": 2, "top_k": 1, "n_layer": 1}


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "m.gguf"
    synth("qwen2moe", path, **WIDE)
    return path


def values_of(path: Path, name: str) -> np.ndarray:
    file = GgufFile.open(path)
    info = file.tensors[name]
    data = np.fromfile(path, dtype=np.uint8, count=info.n_bytes, offset=info.offset)
    n_rows = int(np.prod(info.shape[1:]))
    return gguf.quants.dequantize(data.reshape(n_rows, -1), gguf.GGMLQuantizationType(int(info.type)))


@pytest.mark.parametrize("name", [*QUANTISED_TYPES, "Q4_K_M"])
def test_quantised_experts_are_close_to_the_floats(wide: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "q.gguf"
    quantize(wide, path, name)
    before, after = GgufFile.open(wide), GgufFile.open(path)
    changed = {n for n, info in after.tensors.items() if info.type is not before.tensors[n].type}
    experts = {n for n in before.tensors if EXPERT_WEIGHT.search(n)}
    assert changed == (set() if name == "F32" else experts)
    for tensor in experts:
        exact, near = values_of(wide, tensor), values_of(path, tensor).reshape(-1, 256)
        error = np.sqrt(((exact.reshape(-1, 256) - near) ** 2).mean() / (exact**2).mean())
        assert error <= next(limit for start, limit in TOLERANCE.items() if name.startswith(start))
    if name != "F32":
        assert path.stat().st_size < wide.stat().st_size


def test_a_mix_raises_the_down_projections_of_half_the_layers(tmp_path: Path) -> None:
    source, path = tmp_path / "m.gguf", tmp_path / "q.gguf"
    synth("qwen2moe", source, **(WIDE | {"n_layer": 8, "n_expert": 8, "top_k": 2}))
    quantize(source, path, "Q4_K_M")
    types = {n: info.type for n, info in GgufFile.open(path).tensors.items() if EXPERT_WEIGHT.search(n)}
    raised = {int(n.split(".")[1]) for n, kind in types.items() if kind is GgmlType.Q6_K}
    assert raised == {0, 3, 6, 7}  # the rule of the engine's tool for 8 layers
    assert {n.split(".")[2] for n, kind in types.items() if kind is GgmlType.Q6_K} == {"ffn_down_exps"}
    check(probe(path))


def test_chosen_tensors_get_chosen_types(wide: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    quantize(wide, path, "Q8_0", tensors={"ffn_down_exps": "MXFP4"})
    tensors = GgufFile.open(path).tensors
    assert tensors["blk.0.ffn_down_exps.weight"].type is GgmlType.MXFP4
    assert tensors["blk.0.ffn_up_exps.weight"].type is GgmlType.Q8_0


def test_rows_that_are_no_multiple_of_256(tmp_path: Path) -> None:
    source, path = tmp_path / "m.gguf", tmp_path / "q.gguf"
    synth("gpt-oss", source, n_embd=96, n_ff_exp=96)
    with pytest.raises(InputError, match="rows of 96 values are not whole blocks of Q4_K"):
        quantize(source, path, "Q4_K")
    assert not path.exists()
    quantize(source, path, "MXFP4")
    check(probe(path))


def test_quantising_twice_and_unknown_types_are_refused(wide: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    quantize(wide, path, "Q4_0")
    with pytest.raises(InputError, match="Q4_0 already"):
        quantize(path, tmp_path / "r.gguf", "Q8_0")
    with pytest.raises(InputError, match="Q4_X"):
        quantize(wide, tmp_path / "r.gguf", "Q4_X")


def test_quantising_is_deterministic(wide: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    quantize(wide, first, "IQ2_XXS")
    quantize(wide, second, "IQ2_XXS")
    assert digest(first) == digest(second)
