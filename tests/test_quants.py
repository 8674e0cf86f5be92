"""Quantisation types of experts: `exact` gives the bytes of one process, with repacking and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import main
from orchestrator.engine.synth import EXPERT_WEIGHT
from orchestrator.engine.synth_quantize import QUANTISED_TYPES
from orchestrator.errors import ConfigError, InputError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding import quants
from orchestrator.onboarding.memory_star import open_memory_star
from orchestrator.onboarding.one_quant import STEPS, _oracle, judge_file, judge_quant, make_quantised
from orchestrator.onboarding.quant_cases import BODIES, MIX, SETTINGS, bodies_for
from orchestrator.onboarding.star import uneven_shares
from orchestrator.onboarding.trace import replay
from orchestrator.types import Contract, Ownership

PAGE = Path(__file__).parent.parent / "docs" / "numbers.md"
POSITIONS = 96 + 1 + 33 + 3 * STEPS

# A float, a type that is repacked in blocks of 32 over rows that are no multiple of 256, fused super-blocks, one with
# a table of values, biases, and a mix.
SUBSET = (
    ("BF16", "plain"),
    ("Q4_0", "odd"),
    ("Q4_K", "fused"),
    ("IQ4_XS", "scaled"),
    ("MXFP4", "biased"),
    (MIX, "plain"),
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKCPP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def repacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose type is repacked on common machines."""
    return make_quantised("Q4_0", BODIES[0], tmp_path_factory.mktemp("repacked"))


def check(cells: object, n_bodies: int) -> None:
    assert isinstance(cells, list)
    assert len(cells) == n_bodies * len(SETTINGS)
    for cell in cells:
        assert cell["byte_identical"], cell
        assert cell["positions"] == POSITIONS


@pytest.mark.parametrize(("type_name", "body"), SUBSET)
def test_a_star_gives_the_same_bytes(type_name: str, body: str) -> None:
    check(judge_quant({"type": type_name, "bodies": [body]})["cells"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("type_name", quants.TYPES)
def test_every_type_in_every_body(type_name: str) -> None:
    check(judge_quant({"type": type_name})["cells"], len(bodies_for(type_name)))


def test_the_types_are_all_that_were_asked_for() -> None:
    floats, blocks = ("F32", "F16", "BF16"), ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
    supers = [f"Q{bits}_K" for bits in range(2, 7)]
    assert {*floats, *blocks, *supers, MIX} <= set(quants.TYPES)
    assert sum(name.startswith("IQ") for name in quants.TYPES) == 9
    assert {name for name in quants.TYPES if "odd" in [body.name for body in bodies_for(name)]} == {
        name for name in QUANTISED_TYPES if GgmlType[name].block_size <= 32
    }


def test_a_mixed_file_is_mixed(tmp_path: Path) -> None:
    path = make_quantised(MIX, bodies_for(MIX)[0], tmp_path)
    types = {info.type for name, info in GgufFile.open(path).tensors.items() if EXPERT_WEIGHT.search(name)}
    assert types == {GgmlType.Q4_K, GgmlType.Q6_K}


# --- the comparison can fail ------------------------------------------------------------------------------------


def _differs(path: Path, oracle_setting: int, star_setting: int, shares: tuple[Ownership, ...]) -> bool:
    setting = SETTINGS[star_setting]
    oracle = _oracle(path, SETTINGS[oracle_setting])
    with open_memory_star(
        path,
        shares,
        contract=Contract.EXACT,
        n_ctx=128,
        n_ubatch=setting.n_ubatch,
        repack=setting.repack,
        batch_invariant=setting.batch_invariant,
    ) as star:
        return not replay(star.session, oracle).comparison.byte_identical


def test_repacking_on_one_side_only_is_seen(repacked: Path) -> None:
    file = GgufFile.open(repacked)
    if all(cell["like_first_setting"] for cell in judge_file(repacked, BODIES[0])[:2]):
        pytest.skip("the engine repacks no Q4_0 on this machine")
    shares = uneven_shares(file.moe_layers, file.n_expert, 3)
    assert _differs(repacked, 0, 1, shares)
    assert not _differs(repacked, 1, 1, shares)


def test_a_worker_with_a_single_expert_repacks_it_too(repacked: Path) -> None:
    file = GgufFile.open(repacked)
    others = range(1, file.n_expert)
    shares = tuple(Ownership.product(file.moe_layers, experts) for experts in ([0], others))
    assert not _differs(repacked, 1, 1, shares)


# --- the series and its page ------------------------------------------------------------------------------------


def test_the_command_runs_types_and_writes_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{quants.BEGIN}\nold\n{quants.END}\nafter\n", encoding="utf-8")
    arguments = ["onboard", "--all-quants", "F16", "--json", "--table", str(page)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.stdout)["quants"]
    assert (entry["type"], entry["passed"]) == ("F16", True)
    assert {cell["body"] for cell in entry["cells"]} == {body.name for body in BODIES}
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{quants.BEGIN}\n**1 of 1 types")
    assert text.endswith(f"{quants.END}\nafter\n")
    assert "| F16 | identical | identical | identical | identical | identical |" in text
    assert "old" not in text


def test_a_type_without_an_answer_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quants, "_LARGEST_SECONDS", 0.01)
    result = CliRunner().invoke(main, ["onboard", "--all-quants", "Q4_K"])
    assert result.exit_code == 1
    assert "failed: Q4_K: no answer within" in result.stdout
    assert "FAILED" in result.stdout


def test_a_difference_is_named() -> None:
    cell = quants.QuantCell("plain", "repacked", False, 148, 3, 0.5, False)
    result = quants.QuantResult("Q4_0", (cell,), "plain, repacked: 3 of 148 positions differ", 1.0)
    assert not result.passed
    text = quants.section([result], engine="e", isa="i", date="2030-01-01")
    assert "DIFFERS: repacked" in text
    assert "- Q4_0: plain, repacked: 3 of 148 positions differ" in text


def test_unknown_types_and_pages_without_a_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Q4_X"):
        quants.run_quants(["Q4_X"])
    (tmp_path / "page.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ConfigError, match="no place"):
        quants.write_section(tmp_path / "page.md", "text")


def test_the_page_has_every_type() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(quants.BEGIN)[2].partition(quants.END)[0]
    named = [line.split("|")[1].split("(")[0].strip() for line in text.splitlines() if line.startswith("| ")]
    assert named == ["type", *quants.TYPES]
    assert f"**{len(quants.TYPES)} of {len(quants.TYPES)} types" in text
