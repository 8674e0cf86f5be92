"""The series over architectures: what is tried, what is kept, what is shown, and how it fails."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import main
from orchestrator.engine.synth import recipe_sha256
from orchestrator.engine.upstream import source_inventory
from orchestrator.errors import ConfigError, InputError
from orchestrator.models.architectures import RECIPES, WITHOUT_EXPERTS
from orchestrator.models.catalog import Catalog
from orchestrator.models.upstream_sources import take_inventory
from orchestrator.onboarding import architectures as series
from orchestrator.onboarding.architecture_results import ArchitectureResult
from orchestrator.onboarding.architecture_table import Provenance, document, rows
from orchestrator.onboarding.architectures import SHAPES, SeriesOptions, run_architectures, untried
from orchestrator.onboarding.children import JobFailedError, run_job
from orchestrator.onboarding.cuts import CutFindings, try_cuts
from orchestrator.onboarding.descriptors import DescriptorSummary
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.steps import TokenBatch
from orchestrator.types import Contract, FloatArray, LayerDescriptor

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
QUICK = SeriesOptions(worker_counts=(2,), steps=1)
MADE = Provenance("linkcpp ...", "abc", "AVX2", "2030-01-01T00:00:00", "58 files")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))


def onboard(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["onboard", *map(str, arguments)])


# --- the denominator --------------------------------------------------------------------------------------------

SOURCES = {
    "llama-arch.cpp": '{ LLM_ARCH_A, "a" }, { LLM_ARCH_B,  "b" }, { LLM_ARCH_C, "c-moe" }, { LLM_ARCH_D, "d" },',
    "llama-model.cpp": "\n".join(
        f"        case LLM_ARCH_{name.upper()}:\n            return new llama_model_{name}(params);"
        for name in "abcd"
    ),
    "models/models.h": """
struct llama_model_a : public llama_model_base {
    struct graph : public llm_graph_context {
    };
};
struct llama_model_b : public llama_model_base {
    using graph = llama_model_a::graph;
};
struct llama_model_c : public llama_model_a {
    // everything is a's
};
struct llama_model_d : public llama_model_a {
    struct graph : public llm_graph_context {
    };
};
""",
    "models/first.cpp": "llama_model_a::graph::graph(int x) {\n cur = build_moe_ffn(a);\n cur = build_moe_ffn(b);\n}",
    "models/second.cpp": "llama_model_d::graph::graph(int x) {\n cur = build_ffn(a);\n}",
}


def test_graphs_are_found_through_aliases_and_inheritance() -> None:
    inventory = take_inventory(SOURCES)
    assert inventory.files == ("first.cpp",)
    assert inventory.calls == 2
    assert inventory.architectures == dict.fromkeys(("a", "b", "c-moe"), ("first.cpp",))


def test_sources_without_the_tables_are_refused() -> None:
    with pytest.raises(InputError, match=re.escape("models/models.h")):
        take_inventory({name: text for name, text in SOURCES.items() if name != "models/models.h"})


def test_the_recipes_are_the_architectures_of_the_sources() -> None:
    inventory = source_inventory()
    if inventory is None:
        pytest.skip("the engine's sources are not in the cache: it was not built on this machine")
    assert set(inventory.architectures) == {*RECIPES, *WITHOUT_EXPERTS}
    for name, recipe in RECIPES.items():
        assert recipe.source in inventory.architectures[name]
    assert {recipe.source for recipe in RECIPES.values()} == set(inventory.files)
    assert f"{len(inventory.files)} files" in PAGE.read_text(encoding="utf-8")


# --- the page ---------------------------------------------------------------------------------------------------


def test_the_page_has_every_recipe_and_every_shape() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table, _, rest = text.partition("## Shapes of known models")
    assert re.findall(r"^\| ([\w-]+) \| \d", table, re.MULTILINE) == list(RECIPES)
    assert re.findall(r"^- `([\w-]+)`: no experts", table, re.MULTILINE) == list(WITHOUT_EXPERTS)
    assert re.findall(r"^\| ([\w.-]+) \| [\w-]+ \| \d", rest, re.MULTILINE) == list(SHAPES)
    assert "not tried" not in text
    assert f"**{len(RECIPES)} of {len(RECIPES)} pass `exact`**" in text


def test_a_page_says_what_failed_and_what_was_not_tried() -> None:
    failed = ArchitectureResult("gemma4", None, "gemma4.cpp", "0", built=True, reason="ended by SIGABRT", seconds=1.0)
    page = document([failed, untried("llama"), untried("lfm2")], [], MADE)
    assert "| gemma4 | - | - | - | FAILED | - | - | - | ended by SIGABRT |" in page
    assert "| llama | - | - | - | not tried |" in page
    assert "- `lfm2`: no experts" in page
    assert "0 of 2 pass" in page
    assert page.rstrip().endswith("## What failed\n\n- `gemma4`: ended by SIGABRT")


# --- descriptors ------------------------------------------------------------------------------------------------


def test_descriptors_are_summed_up_in_words() -> None:
    one = LayerDescriptor(
        layer=3,
        call=0,
        architecture="x",
        activation=8,
        n_embd=64,
        n_ff=32,
        n_expert=16,
        top_k=4,
        weight_before_ffn=True,
        clamp=7.0,
        situ_beta=0.0,
        situ_linear_beta=0.0,
        hyper_connections=4,
        tensors=(("gate_up", "g"), ("down", "d"), ("down_bias", "b"), ("down_scale", "s")),
    )
    other = replace(one, call=1, n_embd=32, tensors=(("up", "u"), ("down", "d")), clamp=0.0)
    summary = DescriptorSummary.of([one, other, replace(one, layer=4)])
    assert (summary.layers, summary.calls, summary.row) == (2, 2, 64)
    assert summary.words() == (
        "SWIGLU-OAI, fused gate_up, clamp 7, weight before the FFN, biases, scales, 4 residual streams"
    )
    assert DescriptorSummary.of([other]).words().startswith("SWIGLU-OAI, no gate")
    assert DescriptorSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


# --- running ----------------------------------------------------------------------------------------------------


def test_what_passed_is_kept_and_what_changed_is_tried_again() -> None:
    seen: list[tuple[float, float | None, str]] = []
    names = ["lfm2", "grovemoe"]
    first = run_architectures(names, QUICK, progress=lambda done, total, note="": seen.append((done, total, note)))
    assert [note for _, _, note in seen] == ["grovemoe", "lfm2", "done"]
    assert [(result.architecture, result.built, result.passed) for result in first] == [
        ("grovemoe", True, True),
        ("lfm2", False, False),
    ]
    grovemoe = first[0]
    assert grovemoe.descriptors is not None
    assert (grovemoe.descriptors.calls, grovemoe.descriptors.layers) == (2, 4)
    assert grovemoe.record is not None
    cell = grovemoe.record.contracts[Contract.EXACT][2]
    assert cell.byte_identical
    assert len(set(cell.worker_pids)) == 2
    assert not first[1].failed

    assert run_architectures(names, QUICK) == first  # the same times and processes: nothing ran
    again = run_architectures(["grovemoe"], replace(QUICK, fresh=True))
    assert again[0].passed
    assert again != first[:1]
    assert not again[0].covers(recipe_sha256("grovemoe"), (1, 2))
    assert not again[0].covers(recipe_sha256("grovemoe", seed=1), (2,))
    assert ArchitectureResult.from_json(json.loads(json.dumps(again[0].to_json()))) == again[0]
    with pytest.raises(ConfigError):
        ArchitectureResult.from_json({"format": 0})


def test_a_job_that_gives_no_answer_fails_its_row_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_LARGEST_SECONDS", 0.01)
    result = onboard("--all-architectures", "llama", "lfm2", "--json")
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    llama, lfm2 = value["architectures"]
    assert (llama["architecture"], llama["passed"], llama["built"]) == ("llama", False, True)
    assert "no answer within" in llama["reason"]
    assert (lfm2["passed"], lfm2["built"]) == (False, False)
    assert value["failed"] == ["llama"]
    shown = onboard("--all-architectures", "llama")  # a failure is no finding to keep: tried again
    assert shown.exit_code == 1
    assert "failed: llama: no answer within" in shown.stdout
    assert "0 of 1 pass" in shown.stdout


def test_the_command_shows_a_table_and_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = onboard("--all-architectures", "llama4", "--workers", "2", "--steps", "1", "--table", page)
    assert result.exit_code == 0, result.output
    assert "weights travel with the rows" in result.stdout
    assert "1 of 1 pass exact" in result.stdout
    text = page.read_text(encoding="utf-8")
    assert "| llama4 | 4 | 1 | SILU" in text
    assert f"1 of {len(RECIPES)} pass" in text


def test_findings_about_models_of_the_catalogue_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "models.toml"
    shutil.copy(Catalog.load().path, copy)
    monkeypatch.setenv("LINKCPP_MODELS", str(copy))
    before = copy.read_text(encoding="utf-8")
    arguments = ["--all-architectures", "gpt-oss", "grovemoe", "--workers", "2", "--steps", "1", "--record"]
    result = onboard(*arguments)
    assert result.exit_code == 0, result.output
    assert "recorded in the catalogue: gpt-oss\n" in result.stdout
    found = Catalog.load().results["architecture"]
    assert found["gpt-oss"]["passed"] is True
    assert "grovemoe" not in found
    assert copy.read_text(encoding="utf-8") != before
    standing = Catalog.load().standing("gpt-oss-120b")
    assert standing.status in ("architecture passes", "onboarded", "serving")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--all-architectures", "lama"),
        ("--all-shapes", "llama"),
        ("--all-architectures", "llama", "--inject", "zeros"),
        ("--all-quants", "--steps", "3"),
        ("--all-quants", "--record"),
        ("--fresh", "model.gguf"),
        (),
        ("a.gguf", "b.gguf"),
    ],
)
def test_unusable_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    result = onboard(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_a_page_that_cannot_be_written_is_said_as_such(tmp_path: Path) -> None:
    result = onboard("--all-architectures", "lfm2", "--table", tmp_path / "no" / "page.md")
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


# --- jobs -------------------------------------------------------------------------------------------------------


def test_a_job_answers_and_sees_its_environment() -> None:
    answer = run_job("tests.jobs", {"how": "well"}, timeout=60, environment={"LINKCPP_TEST_SETTING": "here"})
    assert answer == {"answer": 42, "setting": "here"}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refused", r"^these hyperparameters fit nobody$"),
        ("defect", r"exit status 1: ZeroDivisionError: a defect"),
        ("abort", r"ended by SIGABRT: .*GGML_ASSERT\(n > 0\) failed"),
        ("silent", r"^exit status 0$"),
    ],
)
def test_a_job_that_fails_says_why_in_one_line(how: str, words: str) -> None:
    with pytest.raises(JobFailedError, match=words):
        run_job("tests.jobs", {"how": how}, timeout=60)


def test_a_job_that_hangs_is_ended() -> None:
    with pytest.raises(JobFailedError, match=r"no answer within 1\.5 s"):
        run_job("tests.jobs", {"how": "hang"}, timeout=1.5)


def test_a_job_ends_with_its_parent(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = (
        "import sys\n"
        "from orchestrator.onboarding.children import run_job\n"
        "run_job('tests.jobs', {'how': 'hang', 'mark': sys.argv[1]}, timeout=60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(mark)], cwd=PAGE.parents[1])
    deadline = time.monotonic() + 60
    while not mark.exists() or not mark.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(mark.read_text()))
    parent.kill()
    parent.wait()
    child.wait(timeout=30)


def test_rows_are_of_what_can_be_made() -> None:
    assert rows([untried("lfm2")]) == []


# --- cuts into stages ---------------------------------------------------------------------------------------------


def test_cuts_that_differ_fail_their_row_and_are_named(synthetic: Callable[[str], Path]) -> None:
    found = try_cuts(synthetic("llama"))
    assert (found.identical, found.different, found.refused) == ((1, 2, 3), (), {})
    assert CutFindings.from_json(found.to_json()) == found
    unmarked = try_cuts(synthetic("nomic-bert-moe"))
    assert unmarked.passed
    assert unmarked.words().startswith("none; not in front of 1: this architecture does not mark the output")
    broken = CutFindings(5, (1, 4), (2, 3), {})
    assert broken.words() == "2 of 4 identical; FAILED in front of 2-3"
    result = ArchitectureResult("x", None, "x.cpp", "0", built=True, reason="", cuts=broken)
    assert result.failed
    assert "0 of 0 can be cut" in document([untried("llama")], [], MADE)
    assert "1 of 1 can be cut, at 4 places: 2 gave the bytes" in document([result], [], MADE)


def test_the_comparison_of_cuts_sees_one_bit(
    synthetic: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Pipeline.decode

    def flipped(ring: Pipeline, batch: TokenBatch) -> FloatArray:
        logits = honest(ring, batch).copy()
        logits.view(np.uint32)[0, 0] ^= 1
        return logits

    monkeypatch.setattr(Pipeline, "decode", flipped)
    assert try_cuts(synthetic("llama")).different == (1, 2, 3)
