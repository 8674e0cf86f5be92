"""Fetching from a Hugging Face hub, with the real client and a hub on loopback instead of the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from range_server import Fault, RangeServer, serving
from test_models_fetch import model  # noqa: F401 - a fixture

from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.hub import _choose
from orchestrator.models.locations import HubLocation
from orchestrator.models.slices import Selection, write_slice

COMMIT = "5ca1ab1e" * 5
RUN = "from orchestrator.cli.app import main; main()"


@pytest.fixture
def hub(model):  # noqa: F811
    """A hub whose files lie on another server, as on the real one."""
    with serving(model.parent) as hub, serving(model.parent) as store:
        hub.store = store
        names = sorted(path.name for path in model.parent.glob("big*"))
        info = {
            "id": "some/model-GGUF",
            "sha": COMMIT,
            "private": False,
            "downloads": 1,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": f"Q4/{name}"} for name in names] + [{"rfilename": "README.md"}],
        }
        page = (200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        for place in ("", "/revision/main", "/revision/v1"):
            hub.pages[f"/api/models/some/model-GGUF{place}"] = page
        refuse = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"}
        hub.pages["/api/models/some/model-GGUF/revision/v9"] = (404, refuse, b"{}")
        hub.pages["/api/models/some/private"] = (401, {"X-Error-Code": "RepoNotFound"}, b"{}")
        hub.pages["/api/models/some/gated"] = (403, {"X-Error-Code": "GatedRepo"}, b"{}")
        hub.fail = lambda asked: Fault(redirect=store.url(asked.name))
        yield hub


def fetch(hub: RangeServer | None, tmp_path: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": "http://127.0.0.1:9" if hub is None else hub.address,
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(tmp_path / "hf"),
        "LINKCPP_CACHE": str(tmp_path / "cache"),
        "LINKCPP_DATA": str(tmp_path / "data"),
    }
    command = [sys.executable, "-c", RUN, "model", "fetch", address, "-o", str(tmp_path / "slice.gguf"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "address",
    [
        "hf://some/model-GGUF/Q4/big-00001-of-00003.gguf",
        "hf://some/model-GGUF/Q4/*.gguf@v1",
        "hf://some/model-GGUF@main/Q4/big-*.gguf",
    ],
)
def test_a_share_comes_from_one_commit_with_the_token(model, hub, tmp_path, address):  # noqa: F811
    done = fetch(hub, tmp_path, address, "--experts", "5", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["revision"], report["checked"]) == (COMMIT, True)
    write_slice(model, tmp_path / "local.gguf", Selection(experts=(5,)))
    assert (tmp_path / "slice.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    # The client of the hub asks for other things of its own too.
    asked = {place: token for place, token in hub.authorization if place.startswith(("/api/models/", "/some/"))}
    assert [place for place, token in asked.items() if token != "Bearer hf_secret"] == []
    files = [place for place in asked if place.startswith("/some/")]
    assert all(place.startswith(f"/some/model-GGUF/resolve/{COMMIT}/Q4/big-") for place in files)
    assert {place.rpartition("/")[2] for place in files} >= {path.name for path in model.parent.glob("*.gguf")}
    # The token is for the hub, not for the machines that it redirects to.
    assert {token for _, token in hub.store.authorization} == {None}
    assert hub.store.total_sent < 0.15 * GgufFile.open(model).n_bytes
    assert done.stderr.count("secret") == 0


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://some/model-GGUF/Q8/*.gguf", "has no file Q8/*.gguf"),
        ("hf://some/model-GGUF/Q4/*.gguf@v9", "has no revision v9"),
        ("hf://some/private/m.gguf", "no repository some/private, or it is private"),
        ("hf://some/gated/m.gguf", "is gated"),
        ("hf://some/nothing/m.gguf", "some/nothing"),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(hub, tmp_path, address, message):
    done = fetch(hub, tmp_path, address)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_a_hub_that_cannot_be_reached(tmp_path):
    done = fetch(None, tmp_path, "hf://some/model-GGUF/m.gguf")
    assert done.returncode == 2
    assert "some/model-GGUF: the hub cannot be asked" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pattern_of_several_models_is_refused():
    names = ["Q4/m-Q4-00001-of-00002.gguf", "Q4/m-Q4-00002-of-00002.gguf", "m-Q8.gguf"]
    assert _choose(HubLocation("o/r", "Q4/*"), names) == names[0]
    assert _choose(HubLocation("o/r", "m-Q8.gguf"), names) == "m-Q8.gguf"
    with pytest.raises(InputError, match="fits several models"):
        _choose(HubLocation("o/r", "*"), names)
