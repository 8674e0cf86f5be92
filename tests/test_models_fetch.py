"""Fetching parts of a model over HTTP: the bytes of the local slice, whatever the server does, or words."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from range_server import Fault, serving
from test_gguf import write_moe

from orchestrator.config import cache_dir
from orchestrator.errors import DownloadError, InputError, LinkcppError, ModelFileError
from orchestrator.models.checksums import Checksums
from orchestrator.models.fetch import fetch_slice
from orchestrator.models.gguf import GgufFile
from orchestrator.models.http_ranges import Patience
from orchestrator.models.locations import HttpLocation, HubLocation, parse_location
from orchestrator.models.slices import Selection, write_slice

QUICK = Patience(attempts=3, first_wait=0.01, connect=2.0, silence=0.5)
SHARE = Selection(experts=(3,))  # one sixteenth
EXPERTS, LAYERS, WIDTH = 16, 6, 64


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LINKCPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))


def write_parts(folder: Path) -> list[Path]:
    """Write a model in three parts whose experts make up nearly all of it."""
    numbers = np.random.default_rng(11)
    paths = []
    for part in range(3):
        path = folder / f"big-{part + 1:05d}-of-00003.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if part == 0:
            writer.add_block_count(LAYERS)
            writer.add_expert_count(EXPERTS)
            writer.add_expert_used_count(2)
            writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(500)])
            writer.add_array("tokenizer.ggml.token_type", list(range(500)))
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", LAYERS * 4 + 1)
        if part == 0:
            writer.add_tensor("token_embd.weight", numbers.standard_normal((500, WIDTH)).astype(np.float32))
        for layer in (2 * part, 2 * part + 1):
            writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(WIDTH, np.float32))
            for role in ("up", "gate", "down"):
                array = numbers.standard_normal((EXPERTS, WIDTH, WIDTH)).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.ffn_{role}_exps.weight", array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The first part of a model in three, with its manifest beside it."""
    folder = tmp_path_factory.mktemp("served")
    first = write_parts(folder)[0]
    Checksums.compute(GgufFile.open(first)).save(folder / f"{first.name}.manifest.json.gz")
    return first


@pytest.fixture
def server(model):
    with serving(model.parent) as running:
        yield running


@pytest.fixture
def bare(model, tmp_path):
    """A server of the same files without a manifest."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for path in model.parent.glob("*.gguf"):
        os.link(path, folder / path.name)
    with serving(folder) as running:
        yield running


def fetch(server, destination, selection=SHARE, name="big-00001-of-00003.gguf", **options):
    options.setdefault("patience", QUICK)
    return fetch_slice(HttpLocation(server.url(name)), destination, selection, **options)


def local(model, tmp_path, selection=SHARE) -> bytes:
    write_slice(model, tmp_path / "local.gguf", selection)
    return (tmp_path / "local.gguf").read_bytes()


def headers_of(model) -> int:
    return sum(header.data_at for header in GgufFile.open(model).headers)


# --- what comes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selection",
    [
        SHARE,
        Selection(experts=(0, 1, 2, 7, 15), layers=(1, 4)),
        Selection(without_experts=True),
        Selection(layers=(2, 3)),
        Selection(),
    ],
    ids=["one expert", "some experts", "no experts", "layers", "everything"],
)
def test_the_fetched_slice_is_the_local_one(model, server, tmp_path, selection):
    report = fetch(server, tmp_path / "slice.gguf", selection)
    assert (tmp_path / "slice.gguf").read_bytes() == local(model, tmp_path, selection)
    assert report.checked
    assert report.n_bytes == (tmp_path / "slice.gguf").stat().st_size
    assert report.source_bytes == sum(path.stat().st_size for path in model.parent.glob("*.gguf"))
    assert sorted(path.name for path in tmp_path.glob("slice*")) == ["slice.gguf"]


def test_only_the_share_is_downloaded(model, server, tmp_path):
    """One sixteenth of the experts of three parts: the share, the headers and one per cent at most."""
    report = fetch(server, tmp_path / "slice.gguf")
    file = GgufFile.open(model)
    share = sum(file.bytes_per_expert(layer) for layer in file.moe_layers)
    sent = sum(count for name, count in server.sent.items() if name.endswith(".gguf"))
    manifest = (model.parent / f"{model.name}.manifest.json.gz").stat().st_size
    assert share + headers_of(model) <= sent
    # 8 KiB of each header's last window besides: a hundredth of any share that is worth a network.
    assert sent <= 1.01 * share + headers_of(model) + 3 * 8192
    assert report.downloaded == sent + manifest


def test_requests_run_at_once_and_headers_take_few(server, tmp_path):
    server.fail = lambda asked: Fault(wait=0.002)
    fetch(server, tmp_path / "slice.gguf", Selection(layers=(0, 3, 5)), connections=3)
    assert server.most_open == 3
    assert len([asked for asked in server.asked if asked.start < 20_000]) < 20


def test_a_second_run_finds_everything_there(server, tmp_path):
    fetch(server, tmp_path / "slice.gguf")
    before = (tmp_path / "slice.gguf").stat()
    server.sent.clear()
    report = fetch(server, tmp_path / "slice.gguf")
    assert (tmp_path / "slice.gguf").stat().st_ino == before.st_ino
    assert server.total_sent == report.downloaded
    assert {name for name, count in server.sent.items() if count > 8192} <= {
        "big-00001-of-00003.gguf.manifest.json.gz"
    }


def test_pieces_of_another_share_come_from_the_cache(model, server, tmp_path):
    fetch(server, tmp_path / "first.gguf", Selection(experts=(3, 4)))
    report = fetch(server, tmp_path / "second.gguf", Selection(experts=(4, 5)))
    assert report.from_cache == sum(GgufFile.open(model).bytes_per_expert(layer) for layer in range(LAYERS))
    assert (tmp_path / "second.gguf").read_bytes() == local(model, tmp_path, Selection(experts=(4, 5)))


def test_the_cache_helps_without_a_manifest_and_damage_in_it_is_noticed(model, bare, tmp_path):
    report = fetch(bare, tmp_path / "first.gguf")
    assert not report.checked
    (tmp_path / "first.gguf").unlink()
    pieces = sorted(path for path in (cache_dir() / "pieces").rglob("*") if path.is_file())
    assert len(pieces) == 3 * LAYERS
    damaged = bytearray(pieces[0].read_bytes())
    damaged[100] ^= 1
    pieces[0].write_bytes(damaged)
    report = fetch(bare, tmp_path / "second.gguf")
    assert report.from_cache == (3 * LAYERS - 1) * 4 * WIDTH * WIDTH
    assert (tmp_path / "second.gguf").read_bytes() == local(model, tmp_path)


def test_the_cache_keeps_its_limit(bare, tmp_path, monkeypatch):
    piece = 4 * WIDTH * WIDTH
    monkeypatch.setenv("LINKCPP_CACHE_LIMIT", str(20 * piece))
    fetch(bare, tmp_path / "first.gguf", Selection(experts=(0,)))
    fetch(bare, tmp_path / "second.gguf", Selection(experts=(1,)))
    files = [path for path in (cache_dir() / "pieces").rglob("*") if path.is_file()]
    assert len(files) == 20
    monkeypatch.setenv("LINKCPP_CACHE_LIMIT", "0")
    fetch(bare, tmp_path / "third.gguf", Selection(experts=(2,)))
    assert not [path for path in (cache_dir() / "pieces").rglob("*") if path.is_file()]


# --- a bad server -------------------------------------------------------------------------------------------------


def test_a_connection_that_drops_is_taken_up_where_it_stopped(model, server, tmp_path):
    server.fail = lambda asked: Fault(drop_after=90_000)
    report = fetch(server, tmp_path / "slice.gguf", Selection(layers=(0, 4)))
    assert (tmp_path / "slice.gguf").read_bytes() == local(model, tmp_path, Selection(layers=(0, 4)))
    assert report.retries > 10
    sent = sum(count for name, count in server.sent.items() if name.endswith(".gguf"))
    assert sent < 1.05 * report.n_bytes + headers_of(model) + 3 * 8192  # nothing comes twice


@pytest.mark.parametrize(
    "fault",
    [
        Fault(drop_after=0),
        Fault(stall_after=2000),
        Fault(status=503),
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(shorter_by=700),
        Fault(wait=0.001),
    ],
    ids=["dropped at once", "stalled", "503", "429", "shorter than asked", "slow"],
)
def test_troubles_that_pass_are_overcome(model, server, tmp_path, fault):
    server.fail = lambda asked: fault if asked.number % 3 == 1 and asked.end - asked.start > 1000 else None
    fetch(server, tmp_path / "slice.gguf", connections=1)
    assert (tmp_path / "slice.gguf").read_bytes() == local(model, tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(drop_after=0), "connection ended before the answer did.*3 attempts at byte"),
        (Fault(stall_after=0), r"no byte came within 0\.5 seconds.*3 attempts"),
        (Fault(status=500), "answers 500.*3 attempts"),
        (Fault(status=416), "nothing at byte .* shorter than it should be"),
        (Fault(whole=True), "ignores ranges and sends the whole file"),
        (Fault(etag='"another"'), 'changed on the server while it was read .*"another"'),
        (Fault(content_range="bytes 7-99/1000"), "another range"),
        (Fault(content_range="nonsense"), "another range .nonsense"),
        (Fault(status=403), "answers 403: it wants to know who asks"),
        (Fault(status=404), "no such file"),
        (Fault(status=418), "answers 418"),
    ],
)
def test_troubles_that_stay_are_named(model, server, tmp_path, fault, message):
    weights = GgufFile.open(model).headers[0].data_at + 100_000
    server.fail = lambda asked: fault if asked.start > weights else None
    with pytest.raises(DownloadError, match=message) as raised:
        fetch(server, tmp_path / "slice.gguf")
    assert server.address in str(raised.value)
    assert not (tmp_path / "slice.gguf").exists()
    server.fail = lambda asked: None
    report = fetch(server, tmp_path / "slice.gguf")
    assert report.n_bytes == len(local(model, tmp_path))


def test_no_ranges_at_all_and_no_server_are_told_at_once(server, tmp_path):
    server.fail = lambda asked: Fault(whole=True)
    with pytest.raises(DownloadError, match="ignores ranges") as raised:
        fetch(server, tmp_path / "slice.gguf")
    assert "model slice" in raised.value.hint
    assert server.total_sent < 5_000_000  # not the whole file
    server.close()
    with pytest.raises(DownloadError, match=r"cannot connect to 127\.0\.0\.1"):
        fetch(server, tmp_path / "slice.gguf")


def test_a_flipped_byte_is_refused_and_a_passing_one_overcome(model, server, tmp_path):
    file = GgufFile.open(model)
    _, offset, _ = file.expert_range(file.expert_tensors(1)[2], 3)
    server.fail = lambda asked: Fault(flip=offset + 17) if asked.name.startswith("big-00001") else None
    with pytest.raises(DownloadError, match=r"expert 3 of blk\.1\.ffn_down_exps\.weight is not what the manifest"):
        fetch(server, tmp_path / "slice.gguf")
    assert not (tmp_path / "slice.gguf").exists()
    once = iter([True])
    server.fail = lambda asked: (
        Fault(flip=offset + 17) if asked.start <= offset < asked.end and next(once, False) else None
    )
    report = fetch(server, tmp_path / "slice.gguf")
    assert report.resumed > 0
    assert (tmp_path / "slice.gguf").read_bytes() == local(model, tmp_path)


def test_a_flipped_byte_in_the_header_is_another_model(server, tmp_path):
    server.fail = lambda asked: Fault(flip=150) if asked.name.endswith("of-00003.gguf") else None
    with pytest.raises(LinkcppError, match=r"the manifest is about|damaged|models/big-00001") as raised:
        fetch(server, tmp_path / "slice.gguf")
    assert str(tmp_path) not in str(raised.value)


def test_an_interrupted_fetch_goes_on_in_another_process_and_from_another_server(model, server, tmp_path):
    code = "import sys; from orchestrator.cli.app import main; sys.argv[0] = 'linkcpp'; main()"
    arguments = ["model", "fetch", server.url(model.name), "--layers", "0-5", "-o", str(tmp_path / "slice.gguf")]
    server.fail = lambda asked: Fault(wait=0.004) if asked.end - asked.start > 50_000 else None
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    journal = tmp_path / "slice.gguf.partial.journal"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (journal.exists() and journal.read_bytes().count(b"\n") > 30):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "slice.gguf").exists()
    lines = journal.read_bytes().count(b"\n") - 1
    assert lines >= 30
    with serving(model.parent) as other:
        selection = Selection(layers=range(6))
        report = fetch(other, tmp_path / "slice.gguf", selection)
        assert report.resumed >= lines * 256
        assert other.total_sent < report.n_bytes - report.resumed + 1_000_000
    assert (tmp_path / "slice.gguf").read_bytes() == local(model, tmp_path, selection)
    assert not journal.exists()


def test_what_a_crash_lost_is_fetched_again(model, server, tmp_path):
    """The last writes before a crash may never have reached the disk, whatever the journal says."""
    file = GgufFile.open(model)
    end = file.expert_range(file.expert_tensors(5)[2], 3)[1]
    server.fail = lambda asked: Fault(status=404) if asked.name.startswith("big-00003") and asked.end > end else None
    with pytest.raises(DownloadError):
        fetch(server, tmp_path / "slice.gguf", connections=1)
    partial = tmp_path / "slice.gguf.partial"
    data = bytearray(partial.read_bytes())
    start = GgufFile.open(partial).tensors["blk.0.ffn_gate_exps.weight"].offset
    data[start : start + 5000] = bytes(5000)
    partial.write_bytes(data)
    server.fail = lambda asked: None
    report = fetch(server, tmp_path / "slice.gguf")
    assert 0 < report.resumed < report.n_bytes - 4 * WIDTH * WIDTH
    assert (tmp_path / "slice.gguf").read_bytes() == local(model, tmp_path)


def test_a_file_that_changed_on_the_server_starts_over(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    path = write_moe(folder / "m.gguf", experts=8)
    weights = GgufFile.open(path).headers[0].data_at
    with serving(folder) as server:
        server.fail = lambda asked: Fault(status=404) if asked.start > weights else Fault(drop_after=40_000)
        with pytest.raises(DownloadError):
            fetch(server, tmp_path / "slice.gguf", Selection(), "m.gguf")
        assert (tmp_path / "slice.gguf.partial.journal").read_bytes().count(b"\n") > 5
        server.fail = lambda asked: None
        data = bytearray(path.read_bytes())
        data[weights + 5] ^= 1
        path.write_bytes(data)
        report = fetch(server, tmp_path / "slice.gguf", Selection(), "m.gguf")
    assert report.resumed == 0
    write_slice(path, tmp_path / "local.gguf", Selection())
    assert (tmp_path / "slice.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()


def test_two_at_once_do_not_write_the_same_file(model, server, tmp_path):
    from orchestrator.models.partial_file import PartialFile

    with (
        PartialFile(tmp_path / "slice.gguf", "other", 10, []),
        pytest.raises(InputError, match="another process is making"),
    ):
        fetch(server, tmp_path / "slice.gguf")


# --- parts ----------------------------------------------------------------------------------------------------------


def test_parts_on_a_server_are_told_apart_like_those_on_a_disk(model, tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    names = [path.name for path in sorted(model.parent.glob("*.gguf"))]
    for name in names:
        (folder / name).write_bytes((model.parent / name).read_bytes())
    with serving(folder) as server:

        def failure(name=names[0]):
            with pytest.raises(LinkcppError) as raised:
                fetch(server, tmp_path / "slice.gguf", name=name)
            assert str(tmp_path) not in f"{raised.value} {raised.value.hint}"
            return str(raised.value)

        assert failure(names[1]) == f"{server.url(names[1])} is part 2 of 3"
        (folder / "joined.gguf").write_bytes(b"".join((folder / name).read_bytes() for name in names))
        assert "several GGUF files joined end to end" in failure("joined.gguf")
        (folder / "renamed.gguf").write_bytes((folder / names[0]).read_bytes())
        assert "part 1 of 3 and its name does not say so" in failure("renamed.gguf")
        third = (folder / names[2]).read_bytes()
        (folder / names[2]).write_bytes((folder / names[1]).read_bytes())
        assert f"{server.url(names[2])} is not part 3 of 3" in failure()
        (folder / names[2]).unlink()
        message = failure()
        assert message.startswith("part 3 of 3: ")
        assert "no such file" in message
        (folder / names[2]).write_bytes(third[:-5000])
        assert "truncated" in failure()
        (folder / "page.gguf").write_text("<!DOCTYPE html>")
        assert "HTML" in failure("page.gguf")
        (folder / "empty.gguf").touch()
        assert "empty" in failure("empty.gguf") or "nothing at byte 0" in failure("empty.gguf")


# --- manifests ------------------------------------------------------------------------------------------------------


def test_a_manifest_checks_the_model_and_every_slice_of_it(model, tmp_path):
    sums = Checksums.load(model.parent / f"{model.name}.manifest.json.gz")
    assert sums.check(GgufFile.open(model)) == LAYERS * (3 * EXPERTS + 1) + 1
    sliced = tmp_path / "slice.gguf"
    write_slice(model, sliced, Selection(experts=(2, 9)))
    assert sums.check(GgufFile.open(sliced)) == LAYERS * 3 * 2
    of_slice = Checksums.compute(GgufFile.open(sliced))
    assert of_slice.digests["blk.3.ffn_up_exps.weight"][9] == sums.digests["blk.3.ffn_up_exps.weight"][9]
    assert of_slice.digest("blk.3.ffn_up_exps.weight", 3) is None
    data = bytearray(sliced.read_bytes())
    data[-50] ^= 1
    sliced.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"expert 9 of blk\.5\.ffn_down_exps\.weight is damaged"):
        sums.check(GgufFile.open(sliced))


def test_a_manifest_of_another_model_and_no_manifest_are_refused(model, server, tmp_path):
    other = GgufFile.open(write_moe(tmp_path / "other.gguf"))
    Checksums.compute(other).save(tmp_path / "other.json")
    with pytest.raises(ModelFileError, match="the manifest is about tiny"):
        fetch(server, tmp_path / "slice.gguf", manifest=str(tmp_path / "other.json"))
    for text, message in [("{", "not JSON"), ("[]", "no manifest"), ('{"pieces": {}}', "another format")]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match=message):
            fetch(server, tmp_path / "slice.gguf", manifest=str(tmp_path / "bad.json"))
    with pytest.raises(DownloadError, match="no such file"):
        fetch(server, tmp_path / "slice.gguf", manifest=server.url("none.json"))
    packed = (model.parent / f"{model.name}.manifest.json.gz").read_bytes()
    (tmp_path / "bad.json").write_bytes(packed[:-20])
    with pytest.raises(InputError, match="not JSON, or not whole"):
        Checksums.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_bytes(gzip.compress(bytes(300_000_000), 1))
    with pytest.raises(InputError, match="not JSON, or not whole"):
        Checksums.load(tmp_path / "bad.json")
    good = json.loads(gzip.decompress(packed))
    good["pieces"]["token_embd.weight"] = "AAAA"
    (tmp_path / "bad.json").write_text(json.dumps(good))
    with pytest.raises(InputError, match=r"hashes of token_embd\.weight are damaged"):
        Checksums.load(tmp_path / "bad.json")


def test_a_manifest_comes_from_a_server_without_ranges_too(server, tmp_path):
    with serving(tmp_path) as other:
        other.pages["/models/sums.json"] = (
            200,
            {},
            (server.folder / "big-00001-of-00003.gguf.manifest.json.gz").read_bytes(),
        )
        assert fetch(server, tmp_path / "slice.gguf", manifest=other.url("sums.json")).checked


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://h/a/m.gguf?x=1", HttpLocation("https://h/a/m.gguf?x=1")),
        ("hf://o/r/m.gguf", HubLocation("o/r", "m.gguf")),
        ("hf://o/r/Q4/m.gguf@v1", HubLocation("o/r", "Q4/m.gguf", "v1")),
        ("hf://o/r@v1/m.gguf", HubLocation("o/r", "m.gguf", "v1")),
        ("models/m.gguf", Path("models/m.gguf")),
    ],
)
def test_addresses(text, expected):
    assert parse_location(text) == expected


@pytest.mark.parametrize("text", ["https://", "https://h/", "ftp://h/m.gguf", "hf://o/r", "hf://o", "hf://o/r/m@a b"])
def test_what_is_no_address(text):
    with pytest.raises(InputError):
        parse_location(text)


def test_an_address_keeps_its_query_in_all_parts(model, server, tmp_path):
    location = HttpLocation(server.url(model.name) + "?signature=a%2Fb")
    fetch_slice(location, tmp_path / "slice.gguf", SHARE, patience=QUICK)
    assert (tmp_path / "slice.gguf").read_bytes() == local(model, tmp_path)
