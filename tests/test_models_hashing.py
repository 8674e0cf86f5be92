"""File hashes are right, kept, and dropped as soon as the file is another one."""

from __future__ import annotations

import hashlib
import os

import pytest
from test_gguf import write_moe

from orchestrator.errors import ModelFileError
from orchestrator.models.hashing import file_sha256, model_sha256


@pytest.fixture(autouse=True)
def private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LINKCPP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counted(path):
    """Hash and tell how many bytes were read for it."""
    read = []
    digest = file_sha256(path, progress=lambda done, total, note="": read.append(done))
    return digest, read[-1] if read else 0


def test_the_second_time_nothing_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000_000)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert counted(path) == (expected, 10_000_000)
    assert counted(path) == (expected, 0)


def test_a_changed_file_is_hashed_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert counted(path) == (hashlib.sha256(b"two").hexdigest(), 3)
    replacement = tmp_path / "new"  # same size and time, another inode
    replacement.write_bytes(b"six")
    os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    os.replace(replacement, path)
    assert counted(path) == (hashlib.sha256(b"six").hexdigest(), 3)
    assert first == hashlib.sha256(b"one").hexdigest()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"x": 3}', b"\xff\xfe"])
def test_a_damaged_cache_is_as_good_as_none(tmp_path, private_cache, damage):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    file_sha256(path)
    (private_cache / "hashes.json").write_bytes(damage)
    assert counted(path)[0] == hashlib.sha256(b"abc").hexdigest()


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ModelFileError, match="nothing-here"):
        file_sha256(tmp_path / "nothing-here")


def test_a_models_hash_is_its_files(tmp_path):
    path = write_moe(tmp_path / "moe.gguf")
    assert model_sha256(path) == file_sha256(path)
