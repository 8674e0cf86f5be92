"""`linkcpp model`: each command as a user runs it, in this process, with its exit code."""

from __future__ import annotations

import json

import pytest
from range_server import serving
from test_gguf import write_moe
from test_models_sources import shop, write_dense  # noqa: F401 - a fixture

from orchestrator.cli.app import main
from orchestrator.models.gguf import GgufFile
from orchestrator.models.inspection import size_text


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line; return exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["linkcpp", *map(str, arguments)])
        with pytest.raises(SystemExit) as raised:
            main()
        captured = capsys.readouterr()
        return raised.value.code or 0, captured.out, captured.err

    return run


def test_get_and_list(shop, run):  # noqa: F811
    def listed():
        return [
            (row["name"], row["present"]) for row in json.loads(run("model", "list", "--json")[1])["without_experts"]
        ]

    assert listed() == [("dense", False), ("moe", False)]
    code, out, err = run("model", "get", "moe", "--json")
    assert (code, json.loads(out)["path"]) == (0, str(shop / "data" / "models" / "moe.gguf"))
    assert "getting moe" in err  # progress goes beside the result
    assert listed() == [("dense", True), ("moe", True)]
    code, out, _ = run("model", "list")
    assert code == 0
    assert "dense" in out
    code, _, err = run("model", "get", "mo")
    assert code == 2
    assert "did you mean moe?" in err


def test_inspect(tmp_path, run):
    path = write_moe(tmp_path / "moe.gguf")
    code, out, _ = run("model", "inspect", path, "--json", "--tensors")
    facts = json.loads(out)
    assert code == 0
    assert (facts["architecture"], facts["layers"], facts["moe_layers"]) == ("llama", 2, [0, 1])
    assert (facts["experts"], facts["top_k"], facts["expert_types"]) == (4, 2, {"F32": 8})
    assert facts["bytes_per_expert"] == {"0": 8324, "1": 8324}
    assert facts["expert_bytes"] == 2 * 4 * 8324
    assert facts["chat_template"] is False
    assert [tensor["name"] for tensor in facts["tensor_list"]] == list(GgufFile.open(path).tensors)
    code, out, _ = run("model", "inspect", path)
    assert code == 0
    assert "4, top-2" in out
    assert "8.32 kB per layer" in out


def test_upcycle_slice_and_inspect_again(tmp_path, run):
    dense = write_dense(tmp_path / "dense.gguf")
    moe, backbone = tmp_path / "moe.gguf", tmp_path / "backbone.gguf"
    code, out, _ = run("model", "upcycle", dense, "-o", moe, "--shards", 4, "--copies", 2, "--seed", 9)
    assert code == 0
    assert "8 experts per layer, top-4" in out
    assert GgufFile.open(moe).metadata["linkcpp.upcycle.seed"] == "9"
    code, _, _ = run("model", "slice", moe, "--without-experts", "-o", backbone)
    assert code == 0
    facts = json.loads(run("model", "inspect", backbone, "--json")[1])
    assert (facts["absent_tensors"], facts["experts"], facts["moe_layers"]) == (6, 8, [0, 1])
    assert facts["held"] == []
    code, out, _ = run("model", "slice", moe, "--experts", "2-3,7", "--layers", "1", "-o", tmp_path / "worker.gguf")
    assert code == 0
    assert "wrote" in out
    facts = json.loads(run("model", "inspect", tmp_path / "worker.gguf", "--json")[1])
    assert facts["held"] == [{"layers": "1", "experts": "2-3,7"}]
    assert "dense model" in run("model", "inspect", dense)[1]


def test_fetch_and_manifest(tmp_path, run, monkeypatch):
    monkeypatch.setenv("LINKCPP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    path = write_moe(tmp_path / "served" / "moe.gguf")
    hashes, part = tmp_path / "served" / "moe.gguf.manifest.json.gz", tmp_path / "part.gguf"
    with serving(tmp_path / "served") as server:
        code, out, err = run("model", "fetch", server.url("moe.gguf"), "--experts", "1", "-o", part)
        assert code == 0
        assert "not checked: there is no manifest" in out
        assert "fetching part.gguf" in err
        code, out, _ = run("model", "manifest", path, "-o", hashes)
        assert (code, "hashes" in out) == (0, True)
        code, out, _ = run("model", "fetch", server.url("moe.gguf"), "--experts", "1-2", "-o", part, "--json")
        report = json.loads(out)
        assert (code, report["checked"], report["path"]) == (0, True, str(part))
        assert report["from_cache"] > 0
    assert run("model", "manifest", part, "--check", hashes)[:2] == (0, "16 pieces are right\n")
    data = bytearray(part.read_bytes())
    data[-40] ^= 1
    part.write_bytes(data)
    code, _, err = run("model", "manifest", part, "--check", hashes)
    assert (code, "is damaged" in err) == (2, True)
    code, _, err = run("model", "fetch", path, "-o", part)
    assert (code, "model slice" in err) == (2, True)
    assert run("model", "manifest", path)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "missing.gguf"), "no such file"),
        (("inspect", "a-name-nobody-uses"), "no model"),
        (("inspect", "{text}"), "not a GGUF"),
        (("slice", "{dense}", "--without-experts", "-o", "{out}"), "dense model"),
        (("slice", "{dense}", "-o", "{out}"), "--without-experts"),
        (("upcycle", "{dense}", "-o", "{out}", "--shards", "3"), "power of two"),
        (("upcycle", "{dense}", "-o", "{folder}"), "is a folder"),
        (("upcycle", "{dense}"), "--output"),
        (("synth", "llama", "-o", "{out}", "--set", "seed=3"), "--set"),
        (("synth", "llama"), "--output"),
        (("synth", "no-such-architecture", "-o", "{out}"), "no-such-architecture"),
    ],
)
def test_unusable_input_ends_with_two_and_a_line(tmp_path, run, arguments, message):
    (tmp_path / "text.gguf").write_text("hello")
    names = {
        "text": tmp_path / "text.gguf",
        "dense": write_dense(tmp_path / "dense.gguf"),
        "out": tmp_path / "out.gguf",
        "folder": tmp_path,
    }
    code, out, err = run("model", *(argument.format(**names) for argument in arguments))
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out.gguf").exists()


def test_sizes_are_written_with_three_digits():
    pairs = [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_996, "10.0 kB"), (98_362_432, "98.4 MB")]
    pairs += [(999_600, "1.00 MB"), (70_000_000_000, "70.0 GB"), (3 * 10**15, "3000 TB")]
    assert [(count, size_text(count)) for count, _ in pairs] == pairs
