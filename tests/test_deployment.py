"""Deployment files: what is written is read again, and what is wrong is said in words."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError, InputError
from orchestrator.models.deployment import (
    Deployment,
    GatewayEntry,
    StageEntry,
    WorkerEntry,
    is_loopback,
    read_deployment,
    write_deployment,
)
from orchestrator.types import Boundary

FULL = """
model = "m.gguf"
context = 512
sequences = 8
boundary = "f16"
[gateway]
layers = "0:2, 43:45"
node = "a"
[[stage]]
name = "first"
layers = "2:24"
address = "10.0.0.1:7101"
node = "a"
threads = 4
[[stage]]
layers = "24:43"
address = "[fd00::2]:7101"
[[spare]]
layers = "24:43"
address = "10.0.0.9:7101"
[[spare]]
address = "10.0.0.10:7101"
memory = "64GB"
[[worker]]
experts = "0-127"
layers = "2-23"
address = "10.0.0.3:7201"
stage = "first"
"""


def test_a_full_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(FULL)
    found = read_deployment(path)
    assert found == Deployment(
        model=str(tmp_path / "m.gguf"),
        context=512,
        sequences=8,
        gateway=GatewayEntry(((0, 2), (43, 45)), "a"),
        stages=(
            StageEntry("first", ((2, 24),), "10.0.0.1:7101", "a", 4),
            StageEntry("stage-2", ((24, 43),), "[fd00::2]:7101"),
        ),
        spares=(
            StageEntry("spare-1", ((24, 43),), "10.0.0.9:7101"),
            StageEntry("spare-2", (), "10.0.0.10:7101", memory="64GB"),
        ),
        workers=(WorkerEntry("worker-1", "0-127", "2-23", "10.0.0.3:7201", stage="first"),),
        boundary=Boundary.F16,
    )
    assert found.n_ranges == 4
    assert found.nodes == ("a",)
    assert found.workers_of("first") == found.workers
    assert found.workers_of("") == ()
    write_deployment(path, found, ["a comment", "and another"])
    assert read_deployment(path) == found
    assert path.read_text().startswith("# a comment\n# and another\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["deployment.toml"]


names = st.text("abc-123", min_size=1, max_size=5)


@settings(deadline=None)
@given(
    edges=st.lists(st.integers(1, 200), min_size=1, max_size=8, unique=True),
    threads=st.one_of(st.none(), st.integers(1, 64)),
    node=st.one_of(st.just(""), names),
    sequences=st.integers(1, 256),
)
def test_what_is_written_is_read_again(tmp_path_factory, edges, threads, node, sequences) -> None:
    path = tmp_path_factory.mktemp("deployments") / "d.toml"
    places = [0, *sorted(edges)]
    stages = tuple(
        StageEntry(f"s{i}", ((first, last),), f"host:{7000 + i}", node, threads)
        for i, (first, last) in enumerate(pairwise(places))
    )
    written = Deployment(model="name", context=4096, sequences=sequences, stages=stages)
    write_deployment(path, written)
    assert read_deployment(path) == written
    assert "boundary" not in path.read_text(), "exact is the default, and not written"


def stage(layers: str, address: str = "h:1", name: str = "") -> str:
    return f'[[stage]]\nlayers = "{layers}"\naddress = "{address}"\n' + (f'name = "{name}"\n' if name else "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model = 3", "has no text as 'model'"),
        ("", "needs 'model'"),
        ('model = "m"', "names no process"),
        ('model = "m"\nmodle = 1', "did you mean 'model'"),
        ('model = "m"\ncontext = 0\n' + stage("0:1"), "context must be a whole number"),
        ('model = "m"\nsequences = true\n' + stage("0:1"), "sequences must be a whole number"),
        ('model = "m"\nstage = 3', "write each stage as a table of its own"),
        ('model = "m"\n[stage]\nlayers = "0:1"', "write each stage as a table of its own"),
        ('model = "m"\n' + stage("0-3"), "'0-3' is no range of layers"),
        ('model = "m"\n' + stage("3:3"), "'3:3' is no range of layers"),
        ('model = "m"\n' + stage("0:3", "nowhere"), "the address 'nowhere' is not HOST:PORT"),
        ('model = "m"\n' + stage("0:3", "h:70000"), "is not HOST:PORT"),
        ('model = "m"\n' + stage("1:3"), "nobody holds the layers 0:1"),
        ('model = "m"\n' + stage("0:3") + stage("4:6", "h:2"), "nobody holds the layers 3:4"),
        ('model = "m"\n' + stage("0:3") + stage("2:6", "h:2"), "layer 2 is held by stage-1 and by stage-2"),
        ('model = "m"\n' + stage("0:3") + stage("3:6"), "two processes listen on h:1"),
        ('model = "m"\n' + stage("0:3", name="x") + stage("3:6", "h:2", "x"), "two processes are called 'x'"),
        ('model = "m"\n[gateway]\nlayers = "2:4"\n' + stage("0:3"), "layer 2 is held by stage-1 and by the gateway"),
        (
            'model = "m"\n' + stage("0:3") + '[[spare]]\nlayers = "0:2"\naddress = "h:2"',
            "could take no stage's place",
        ),
        ('model = "m"\n' + stage("0:3") + '[[worker]]\nstage = "no"\naddress = "h:2"', "no stage is called so"),
        ('model = "m"\n' + stage("0:3") + '[[worker]]\nexperts = "a"\naddress = "h:2"', "not a list of numbers"),
        ('model = "m"\n[[stage]]\nlayers = "0:3"', "needs 'address'"),
        ('model = "m"\n[[stage]]\naddress = "h:1"', "needs 'layers'"),
        ('model = "m"\n' + stage("0:3") + 'memory = "much"', "memory 'much' is no size"),
        ('model = "m"\n[[stage]]\nadress = "h:1"', "did you mean 'address'"),
        ('model = "m"\n[gateway]\nlayers = "0:1"\n[[worker]]\naddress = "h:2"', "holds all layers"),
        ('model = "m"\nboundary = "f8"\n' + stage("0:1"), "unknown boundary 'f8' known are f32, f16"),
        ('model = "m"\nboundary = "f16"\n[[worker]]\naddress = "h:2"', "there is no [[stage]]"),
        ("model = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_deployment(path)
    assert problem in f"{caught.value} {caught.value.hint}"


@settings(deadline=None, max_examples=200)
@given(spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4), gateway=st.booleans())
def test_every_map_of_layers_is_whole_or_refused_in_words(tmp_path_factory, spans, gateway) -> None:
    path = tmp_path_factory.mktemp("maps") / "d.toml"
    own = f'[gateway]\nlayers = "{spans[0][0]}:{spans[0][1]}"\n' if gateway else ""
    rest = spans[1:] if gateway else spans
    stages = "".join(stage(f"{first}:{last}", f"h:{i}") for i, (first, last) in enumerate(rest, 1))
    path.write_text(f'model = "m"\n{own}{stages}')
    ordered = sorted(spans)
    is_whole = ordered[0][0] == 0 and all(first < last for first, last in spans)
    is_whole = is_whole and all(before[1] == after[0] for before, after in pairwise(ordered)) and bool(rest)
    if is_whole:
        found = read_deployment(path)
        assert [span for entry in found.stages for span in entry.layers] == rest
    else:
        with pytest.raises(ConfigError):
            read_deployment(path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_deployment(tmp_path / "none" / "d.toml", Deployment("m"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:0", True), ("[::1]:5", True), ("localhost:1", True), ("10.0.0.1:1", False), ("box:1", False)],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
