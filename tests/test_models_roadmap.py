"""The roadmap: figures against those published for the models, statuses against recorded results, nothing claimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_gguf import write_moe
from test_models_cli import run  # noqa: F401 - a fixture
from test_models_sources import shop  # noqa: F401 - a fixture

from orchestrator.errors import ConfigError, InputError, ModelFileError
from orchestrator.models.architectures import RECIPES
from orchestrator.models.catalog import STATUSES, Catalog, locate, resolve_model
from orchestrator.models.faithful import FAITHFUL
from orchestrator.models.footprint import (
    GIB,
    USABLE,
    Attention,
    Footprint,
    declared_expert_bytes,
    declared_footprint,
    expert_types,
    file_footprint,
    wire_bytes,
)
from orchestrator.models.gguf import GgufFile
from orchestrator.models.locations import HubLocation
from orchestrator.models.roadmap import roadmap
from orchestrator.models.slices import Selection, write_slice

SHIPPED = Path(__file__).parent.parent / "models.toml"

# name: millions of parameters per expert; megabytes of one at 4.5, at 4.85 and at 8.5 bits and with a Q6_K down
# matrix; gigabytes of all at the declared type; kilobytes per token and layer of exact, F16 and INT8.
PUBLISHED = {
    "step-3.7-flash": (15.73, 8.85, 9.54, 16.7, 10.20, None, (147.5, 16.4, 8.7)),
    "qwen3.5-122b": (9.44, 5.31, 5.72, 10.0, 6.12, 70, (110.6, 12.3, 6.5)),
    "glm-5.2": (37.75, 21.2, 22.9, 40.1, 24.5, 439, (221, 24.6, 13.1)),
    "glm-4.6": (23.59, 13.3, 14.3, 25.1, 15.3, 204, (184, 20.5, 10.9)),
    "minimax-m2": (14.16, 7.96, 8.58, 15.0, 9.18, 136, (110.6, 12.3, 6.5)),
    "minimax-m3": (56.62, 31.9, 34.3, 60.2, 36.7, 250, (123, 24.6, 13.1)),
    "deepseek-v3": (44.04, 24.8, 26.7, 46.8, 28.6, 396, (258, 28.7, 15.2)),
    "kimi-k3": (33.03, 18.6, 20.0, 35.1, 21.4, 1446, (244, 14.3, 7.6)),
    "qwen3-235b": (18.87, 10.6, 11.4, 20.1, 12.2, 138, (147, 16.4, 8.7)),
    "gpt-oss-120b": (24.88, 14.0, None, 26.4, None, 61, (57.6, 11.5, 6.1)),
    "llama-4-maverick": (125.8, 70.8, 76.3, 134, 81.6, 234, (41.0, 20.5, 10.9)),
    "mixtral-8x22b": (302.0, 169.9, 183, 321, 196, 82, (73.7, 24.6, 13.1)),
}

# What the roadmap says of one expert, in megabytes; within 3 %.
ROADMAP = {
    "qwen3.5-122b": 5.3,
    "deepseek-v3": 25,
    "glm-4.6": 13,
    "minimax-m2": 8,
    "qwen3-235b": 10.6,
    "gpt-oss-120b": 14,
    "llama-4-maverick": 70,
    "mixtral-8x22b": 170,
}


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    monkeypatch.delenv("LINKCPP_MODELS", raising=False)
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))
    return Catalog.load()


def near(value: float, percent: float):
    return pytest.approx(value, rel=percent / 100)


# --- figures ------------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_roadmap(shipped):
    entries = roadmap(shipped, tokens=8192, memory=64 * GIB)
    assert {entry.row.name for entry in entries} == {*PUBLISHED, "smollm2-moe"}
    assert len(entries) == 13


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_equal_the_published_ones(shipped, name):
    """Within 0.5 % where three digits are published: that is their rounding."""
    row = shipped.row(name)
    parameters, at_4_5, at_4_85, at_8_5, with_q6, routed, wire = PUBLISHED[name]
    shape = row.shape
    assert shape.parameters_per_expert / 1e6 == near(parameters, 0.5)
    assert shape.parameters_per_expert * 4.5 / 8e6 == near(at_4_5, 0.5)
    assert max(declared_expert_bytes(shape, "Q8_0").values()) / 1e6 == near(at_8_5, 0.5)
    if at_4_85 is not None:
        sizes = declared_expert_bytes(shape, "Q4_K_M")
        # 4.85 bits are a rounded mean; a model's own layers decide how many down matrices are Q6_K.
        assert sum(sizes.values()) / len(sizes) / 1e6 == near(at_4_85, 1)
        assert max(sizes.values()) / 1e6 == near(with_q6, 0.5)
        assert min(sizes.values()) == shape.parameters_per_expert * 4.5 / 8
    if routed is not None:
        footprint = declared_footprint(shape, row.quant, row.parameters * 1e9, 8192)
        assert footprint.routed_bytes / 1e9 == near(routed, 1)
    moved = wire_bytes(shape.row_length, shape.top_k)
    assert [moved[key] / 1e3 for key in ("exact", "sum-f16", "sum-q8")] == [near(value, 0.8) for value in wire]
    assert moved["sum"] == 8 * shape.row_length


def test_types_of_which_rows_are_no_blocks_are_refused(shipped):
    with pytest.raises(InputError, match="2880 values are no whole blocks of Q4_K"):
        declared_expert_bytes(shipped.row("gpt-oss-120b").shape, "Q4_K_M")
    with pytest.raises(InputError, match="unknown quantisation 'Q9'"):
        expert_types("Q9", 0, 1)
    assert [expert_types("Q4_K_M", layer, 48)[2].name for layer in (0, 5, 6, 7, 8, 41, 42)] == [
        "Q6_K",
        "Q6_K",
        "Q4_K",
        "Q4_K",
        "Q6_K",
        "Q6_K",
        "Q6_K",
    ]


@pytest.mark.parametrize("name", [*PUBLISHED])
def test_shapes_are_those_of_the_synthetic_models(shipped, name):
    """Two files tell the same counts, for different uses."""
    shape, synthetic = shipped.row(name).shape, FAITHFUL[name]
    d = synthetic.dimensions
    assert shape.architecture == synthetic.architecture
    assert shape.architecture in RECIPES
    assert (shape.n_layer, shape.n_expert, shape.top_k) == (d.n_layer, d.n_expert, d.top_k)
    assert shape.n_lead in {0, d.n_lead}  # the recipe's number means nothing where an architecture has no such layers


def test_context_counts_windows_and_latent_rows():
    assert Attention(10, kv_heads=8, head=128).context_bytes(1000) == 10 * 1000 * 2 * 8 * 128 * 2
    assert Attention(10, latent=576).context_bytes(1000) == 10 * 1000 * 576 * 2
    window = Attention(1, kv_heads=1, head=64, window=512)
    assert window.context_bytes(100) == 100 * 256
    assert window.context_bytes(100_000) == 768 * 256  # 512 and a micro-batch of 63, in steps of 256


def test_context_of_the_large_models(shipped):
    """Against figures that follow from the published attention: bytes per token at 16 bits."""
    per_token = {"qwen3.5-122b": 24_576, "deepseek-v3": 70_272, "qwen3-235b": 192_512, "mixtral-8x22b": 229_376}
    for name, expected in per_token.items():
        assert shipped.row(name).shape.context_bytes(1) == expected
    assert shipped.row("kimi-k3").shape.context_bytes(1) is None


@pytest.mark.parametrize("memory", [8, 16, 64, 100, 700, 3000])
def test_a_fleet_is_large_enough_and_not_larger(shipped, memory):
    for entry in roadmap(shipped, tokens=8192, memory=memory * GIB):
        footprint = entry.footprint
        usable = USABLE * memory * GIB
        base = footprint.other_bytes + (footprint.context_bytes or 0)
        if entry.machines is None:
            assert base > usable or max(footprint.expert_bytes.values()) > usable
            continue
        mean = footprint.routed_bytes / (footprint.n_expert * len(footprint.expert_bytes))
        assert base + footprint.routed_bytes <= entry.machines * usable
        if entry.machines > 1:  # one less would not do, but for what is lost because experts are not cut
            assert base + footprint.routed_bytes > (entry.machines - 1) * (usable - mean)


def test_a_model_of_one_machine_and_experts_too_large_for_any():
    assert Footprint({0: 10}, 4, 5, 5, {}).machines(1000) == 1
    assert Footprint({0: 1000}, 4, 5, 5, {}).machines(100) is None
    assert Footprint({}, 0, 5, 5, {}).machines(100) == 1


# --- a file decides ---------------------------------------------------------------------------------------------


def write_catalogue(path: Path, **shape: object) -> Path:
    numbers = {
        "n_embd": 32,
        "n_layer": 2,
        "n_expert": 4,
        "top_k": 2,
        "n_ff_exp": 32,
        "n_vocab": 4,
        "n_ctx_train": 64,
        **shape,
    }
    lines = "\n".join(f"{key} = {value}" for key, value in numbers.items())
    path.write_text(f"""
[models.tiny]
title = "Tiny"
quant = "Q8_0"
[models.tiny.source]
kind = "huggingface"
repository = "some/tiny-GGUF"
file = "*Q8_0*.gguf"
revision = "v1"
[models.tiny.shape]
architecture = "llama"
{lines}
attention = [{{ layers = 2, kv_heads = 1, head = 16 }}]
[models.lonely]
title = "No source"
""")
    return path


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("LINKCPP_MODELS", str(write_catalogue(tmp_path / "models.toml")))
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))
    return Catalog.load()


def entry_of(catalog):
    (entry,) = roadmap(catalog, tokens=100, memory=GIB)
    return entry


def test_a_file_replaces_what_was_declared(tiny, tmp_path):
    assert entry_of(tiny).to_json()["bytes_per_expert"] == 3 * 32 * 34
    path = write_moe(tiny.row("tiny").path, extra=lambda writer: writer.add_embedding_length(32))
    entry = entry_of(tiny)
    facts = entry.to_json()
    assert (facts["from_file"], facts["present"], facts["problem"]) == (True, True, None)
    assert facts["bytes_per_expert"] == GgufFile.open(path).bytes_per_expert(0) == 8324
    assert facts["routed_bytes"] == 2 * 4 * 8324
    assert facts["other_bytes"] == sum(
        info.n_bytes for info in GgufFile.open(path).tensors.values() if "_exps" not in info.name
    )
    assert entry.cells()[5] == "its file"
    write_slice(path, tmp_path / "slice.gguf", Selection(experts=(1,)))
    assert file_footprint(entry.shape, GgufFile.open(tmp_path / "slice.gguf"), 100) == entry.footprint


def test_a_file_that_is_another_model_is_not_believed(tiny):
    write_moe(tiny.row("tiny").path, experts=8, extra=lambda writer: writer.add_embedding_length(32))
    entry = entry_of(tiny)
    assert entry.file is None
    assert entry.problem.endswith("expert_count is 8 and not 4")
    assert entry.to_json()["bytes_per_expert"] == 3 * 32 * 34
    tiny.row("tiny").path.write_bytes(b"nothing")
    assert "not a GGUF" in entry_of(tiny).problem


def test_the_default_models_row_is_what_its_file_says(monkeypatch):
    monkeypatch.delenv("LINKCPP_MODELS", raising=False)
    row = Catalog.load().row("smollm2-moe")
    if not row.is_present:
        pytest.skip("smollm2-moe was not got on this machine")
    entry = next(entry for entry in roadmap(Catalog.load(), tokens=1, memory=GIB) if entry.row.name == row.name)
    assert entry.problem == ""
    assert entry.file is not None
    assert declared_expert_bytes(row.shape, row.quant) == entry.footprint.expert_bytes


def test_names_lead_to_files_or_to_the_hub(tiny):
    assert locate("tiny") == HubLocation("some/tiny-GGUF", "*Q8_0*.gguf", "v1")
    with pytest.raises(ModelFileError) as raised:
        resolve_model("tiny")
    assert raised.value.hint == "run `linkcpp model fetch tiny`"
    with pytest.raises(ModelFileError) as raised:
        locate("lonely")
    assert "no source is known" in raised.value.hint
    path = write_moe(tiny.row("tiny").path)
    assert locate("tiny") == resolve_model("tiny") == path
    assert locate("hf://a/b/c.gguf") == HubLocation("a/b", "c.gguf")
    with pytest.raises(InputError, match="no model 'tin'"):
        locate("tin")


# --- statuses -----------------------------------------------------------------------------------------------------


def test_a_status_is_what_was_recorded(tiny):
    def standing():
        return Catalog.load().standing("tiny")

    assert standing().status == "listed"
    tiny.record("llama", {"passed": True, "created": "2026-01-01T00:00:00Z", "engine": "e1"}, section="architecture")
    assert (standing().status, standing().since, standing().engine) == (STATUSES[1], "2026-01-01T00:00:00Z", "e1")
    tiny.record("tiny", {"passed": True}, section="like")
    assert "true shape" in standing().note
    tiny.record("tiny", {"passed": False, "created": "2026-01-02", "engine": "e2"})
    assert (standing().status, standing().note) == ("architecture passes", "its real weights failed the gate")
    tiny.record("tiny", {"passed": True, "created": "2026-01-03", "engine": "e2"})
    assert (standing().status, standing().since) == ("onboarded", "2026-01-03")
    tiny.record("tiny", {"created": "2026-01-04", "engine": "e2"}, section="serving")
    assert (standing().status, standing().since) == ("serving", "2026-01-04")
    tiny.record("tiny", {"passed": False})
    assert standing().status == "architecture passes"  # served once, and not any more
    tiny.record("llama", {"passed": False}, section="architecture")
    assert standing().status == "listed"
    with pytest.raises(InputError, match="no results of the kind"):
        tiny.record("tiny", {}, section="rumour")
    with pytest.raises(InputError, match="no model"):
        tiny.record("nobody", {"passed": True}, section="like")


def test_nothing_that_ships_claims_more_than_its_results(shipped):
    for name in shipped.rows:
        standing = shipped.standing(name)
        recorded = {section for section in shipped.results if name in shipped.results[section]}
        if standing.status in {"onboarded", "serving"}:
            assert shipped.results["gate"][name]["passed"] is True
        if standing.status == "listed":
            assert not standing.engine or "failed" in standing.note
        assert recorded <= set(shipped.results)


# --- strict reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('quant = "Q8_0"', 'quant = "Q9"', "models.tiny.quant: unknown quantisation 'Q9'"),
        ('quant = "Q8_0"', 'quant = "Q4_K"', "rows of 32 values are no whole blocks of Q4_K"),
        ("n_expert = 4", "n_expert = 0", "has a zero"),
        ("n_expert = 4", "n_experts = 4", "models.tiny.shape.n_expert must be a whole number"),
        ("n_vocab = 4", "n_vocab = 4\ncolour = 1", "shape.colour is no part of a shape"),
        ("layers = 2, kv_heads = 1, head = 16", "layers = 2", "keeps nothing"),
        ('title = "Tiny"', 'title = "Tiny"\nparameters = -1', "parameters must be a number"),
        ('title = "Tiny"', 'title = "Tiny"\ncontract = "guess"', "'guess' is no contract"),
        ('kind = "huggingface"', 'kind = "rumour"', "'rumour' is none of"),
        ("[models.lonely]", "[gate]\ntiny = 1\n[models.lonely]", "[gate] is no table of tables"),
    ],
)
def test_wrong_rows_are_named(tiny, old, new, message):
    text = tiny.path.read_text()
    assert old in text
    tiny.path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as raised:
        Catalog.load()
    assert message in str(raised.value)


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_lists_rows_as_table_and_as_json(shipped, run):  # noqa: F811
    code, out, _ = run("models", "--json", "--memory", "16", "--context", "4096")
    models = {entry["name"]: entry for entry in json.loads(out)["models"]}
    assert (code, len(models)) == (0, 13)
    for name, megabytes in ROADMAP.items():
        assert models[name]["bytes_per_expert_at_4_5_bits"] / 1e6 == near(megabytes, 3)
    deepseek = models["deepseek-v3"]
    assert deepseek["source"]["kind"] == "huggingface"
    assert deepseek["fleet"] == {"memory_gib": 16.0, "machines": None}
    assert models["qwen3-235b"]["fleet"]["machines"] == 10
    assert models["glm-5.2"]["context"] == {"tokens": 4096, "bytes": 4096 * 78 * 1152, "is_lower_bound": True}
    assert models["kimi-k3"]["context"]["bytes"] is None
    code, out, _ = run("models")
    assert code == 0
    for name in models:
        assert name in out
    assert run("model", "list", "--json")[1] == run("models", "--json")[1]
