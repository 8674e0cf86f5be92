"""The catalogue: strict reading, comments kept, names and paths resolved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, InputError, ModelFileError
from orchestrator.models import catalog as catalog_module
from orchestrator.models.catalog import Catalog, resolve_model
from orchestrator.models.catalog_rows import PackageSource, UpcycleSource
from orchestrator.models.results import own_results_path, write_result

REPOSITORY = Path(__file__).parent.parent

EXAMPLE = """\
# The first comment.

[models.base]  # a comment behind
title = "Base"
license = "MIT"
file = "base.gguf"
size = 4   # four bytes
sha256 = "{zeros}"

[models.base.source]
kind = "pypi"
package = "a-package"
version = "1.0"
sha256 = "{zeros}"
size = 100
member = "a/b.gguf"

# About the second.
[models.made]
title = "Made"
license = "MIT"
file = "made.gguf"
size = 8
sha256 = "{zeros}"

[models.made.source]
kind = "upcycle"
base = "base"
shards = 2
copies = 2
seed = 0
""".format(zeros="0" * 64)


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "models.toml"
    path.write_text(EXAMPLE)
    monkeypatch.setenv("LINKCPP_MODELS", str(path))
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))
    return path


def test_the_catalogue_that_ships_is_the_repositorys_and_has_the_default_model(monkeypatch):
    monkeypatch.delenv("LINKCPP_MODELS", raising=False)
    shipped = Catalog.load()
    assert shipped.path.resolve() == REPOSITORY / "models.toml"
    assert shipped.row("smollm2-moe").source == UpcycleSource("smollm2", 8, 2, 0)
    assert isinstance(shipped.row("smollm2").source, PackageSource)


def test_rows_are_read(path):
    rows = Catalog.load().rows
    assert list(rows) == ["base", "made"]
    assert rows["base"].source == PackageSource("a-package", "1.0", "0" * 64, 100, "a/b.gguf")
    assert (rows["made"].title, rows["made"].size, rows["made"].gate) == ("Made", 8, {})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size = 4 ", 'size = "4" ', "models.base.size must be a whole number"),
        ('title = "Made"', "", "models.made.title must be a text"),
        ('kind = "upcycle"', 'kind = "magic"', "models.made.source.kind: 'magic' is none of"),
        ('base = "base"', 'base = "nothing"', "made is made from 'nothing'"),
        ('file = "made.gguf"', 'file = "../made.gguf"', "not a plain file name"),
        (f'sha256 = "{"0" * 64}"', 'sha256 = "0"', "must be 64 hex digits"),
        ("[models.base.source]", "[models.base.origin]", "models.base.origin is no part of a row"),
        ("[models.base]", "[models.base", "not valid TOML"),
    ],
)
def test_a_wrong_row_is_named(path, old, new, message):
    assert old in EXAMPLE
    path.write_text(EXAMPLE.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(message)):
        Catalog.load()


def test_recording_adds_the_result_and_keeps_every_line(path):
    Catalog.load().record("base", {"exact": {"passed": True, "cosine_min": 0.5, "workers": [1, 2]}, "nothing": None})
    written = path.read_text()
    assert written.startswith(EXAMPLE)
    assert written[len(EXAMPLE) :].lstrip().startswith("[gate.base")
    assert Catalog.load().row("base").gate == {"exact": {"passed": True, "cosine_min": 0.5, "workers": [1, 2]}}
    assert Catalog.load().row("made").gate == {}


def test_recording_again_replaces(path):
    catalog_module.record("made", {"passed": False, "old": 1})
    catalog_module.record("made", {"passed": True})
    catalog_module.record("base", {"passed": True})
    assert Catalog.load().row("made").gate == {"passed": True}
    assert Catalog.load().row("base").gate == {"passed": True}
    assert path.read_text().count("# About the second.") == 1


def test_recording_follows_a_link(path, tmp_path, monkeypatch):
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    monkeypatch.setenv("LINKCPP_MODELS", str(link))
    catalog_module.record("base", {"passed": True})
    assert link.is_symlink()
    assert "passed = true" in path.read_text()


def test_an_unknown_name_suggests_the_nearest(path):
    with pytest.raises(InputError, match="no model 'maid'") as raised:
        catalog_module.record("maid", {})
    assert raised.value.hint == "did you mean made?"
    with pytest.raises(InputError) as raised:
        resolve_model("qqqqqqqq")
    assert raised.value.hint == "known: base, made; a file is named by its path"


def test_names_and_paths_are_resolved(path, tmp_path, monkeypatch):
    with pytest.raises(ModelFileError, match="base is not on this machine yet") as raised:
        resolve_model("base")
    assert raised.value.hint == "run `linkcpp model get base`"
    there = Catalog.load().row("base").path
    there.write_bytes(b"123")
    with pytest.raises(ModelFileError):  # a file of the wrong size is no model
        resolve_model("base")
    there.write_bytes(b"1234")
    assert resolve_model("base") == there
    with pytest.raises(ModelFileError, match="no such file"):
        resolve_model("missing.gguf")
    with pytest.raises(ModelFileError, match="no such file"):
        resolve_model(tmp_path / "folder" / "missing")
    with pytest.raises(ModelFileError, match="too long"):
        resolve_model("n" * 5000)
    (tmp_path / "here").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("here") == Path("here")


def test_results_of_this_machine_count_and_the_later_one_holds(path):
    catalog_module.record("made", {"passed": False, "created": "2026-01-02"})
    own = own_results_path()
    write_result(own, "gate", "made", {"passed": True, "created": "2026-01-03", "engine": "e"})
    assert Catalog.load().standing("made").status == "onboarded"
    write_result(own, "serving", "made", {"created": "2026-01-04", "engine": "e"})
    standing = Catalog.load().standing("made")
    assert (standing.status, standing.since) == ("serving", "2026-01-04")
    assert Catalog.load(path).standing("made").status == "listed", "another catalogue has its own results only"
    catalog_module.record("made", {"passed": False, "created": "2026-01-05"})
    assert Catalog.load().standing("made").status == "listed"


def test_damaged_results_of_this_machine_are_named(path):
    own_results_path().parent.mkdir(parents=True, exist_ok=True)
    own_results_path().write_text("[gate\n")
    with pytest.raises(ConfigError, match=r"results\.toml"):
        Catalog.load()
    with pytest.raises(ConfigError, match=r"results\.toml"):
        write_result(own_results_path(), "gate", "made", {})
