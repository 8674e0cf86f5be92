"""Where files live: overrides, users without a home, folders that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import config
from orchestrator.errors import ConfigError

REPOSITORY = Path(__file__).parent.parent
PRINT_FOLDERS = "from orchestrator import config; print(config.data_dir()); print(config.cache_dir())"


@pytest.mark.parametrize(
    ("variable", "function"), [("LINKCPP_DATA", config.data_dir), ("LINKCPP_CACHE", config.cache_dir)]
)
def test_the_variable_names_the_folder_and_it_is_created(monkeypatch, tmp_path, variable, function):
    monkeypatch.setenv(variable, str(tmp_path / "a" / "b"))
    assert function() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def test_a_relative_override_is_taken_from_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINKCPP_DATA", "here")
    assert config.data_dir() == tmp_path / "here"


def test_an_unusable_override_is_an_error_and_not_silently_replaced(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="LINKCPP_DATA"):
        config.data_dir()


def test_a_blank_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("LINKCPP_DATA", "  ")
    assert config.setting("LINKCPP_DATA") is None


def test_a_home_that_cannot_be_written_falls_back_to_a_private_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("LINKCPP_DATA", raising=False)
    monkeypatch.setattr(config.platformdirs, "user_data_dir", lambda *_, **__: str(tmp_path / "file" / "x"))
    folder = config.data_dir()
    assert folder.name == "data"
    assert folder.parent.name == f"linkcpp-{os.getuid()}"
    assert os.access(folder, os.W_OK)


def test_a_fallback_that_is_a_link_made_by_somebody_is_refused(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"linkcpp-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    monkeypatch.delenv("LINKCPP_CACHE", raising=False)
    monkeypatch.setattr(config, "_user_folder", lambda _: None)
    monkeypatch.setattr(config, "_fallbacks", lambda kind: iter([tmp_path / f"linkcpp-{os.getuid()}" / kind]))
    with pytest.raises(ConfigError, match="belongs to somebody else") as raised:
        config.cache_dir()
    assert raised.value.hint == "set LINKCPP_CACHE"


def test_an_empty_environment_and_a_cwd_that_is_gone_do_not_matter(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"import os, sys; os.rmdir({str(gone)!r}); sys.path[0] = {str(REPOSITORY)!r}; {PRINT_FOLDERS}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=gone, env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert Path(line).is_absolute()
        assert Path(line).is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="changing the user needs root")
def test_a_user_without_passwd_entry_gets_a_private_temporary_folder(tmp_path):
    # Imports come before setuid: the interpreter itself may lie in a folder that the new user cannot read.
    imports = "import os, sys, platformdirs, pwd; from orchestrator import config; platformdirs.user_data_dir()"
    script = f"import sys; sys.path[0] = {str(REPOSITORY)!r}; {imports}; os.setuid(54321); {PRINT_FOLDERS}"
    done = subprocess.run(
        [sys.executable, "-B", "-c", script], cwd="/", env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    data, cache = map(Path, done.stdout.split())
    try:
        assert data.parent == cache.parent
        assert data.parent.name == "linkcpp-54321"
        assert data.parent.stat().st_mode & 0o077 == 0
    finally:
        for folder in (cache, data, data.parent):
            folder.rmdir()


def test_broken_toml_is_a_config_error_with_the_path(tmp_path):
    (tmp_path / "a.toml").write_text("x = [")
    with pytest.raises(ConfigError, match=r"a\.toml"):
        config.load_toml(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match=r"b\.toml"):
        config.load_toml(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_text('[a]\nb = "c"\n')
    assert config.load_toml(tmp_path / "c.toml") == {"a": {"b": "c"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1500", 1500),
        ("500MB", 500_000_000),
        ("1.5 GB", 1_500_000_000),
        ("20GiB", 20 << 30),
        ("2t", 2 * 10**12),
    ],
)
def test_sizes(monkeypatch, text, expected):
    monkeypatch.setenv("LINKCPP_CACHE_LIMIT", text)
    assert config.cache_limit() == expected


@pytest.mark.parametrize("text", ["-1", "much", "1 XB", "1..5", "1e9", "9" * 40])
def test_what_is_no_size(monkeypatch, text):
    monkeypatch.setenv("LINKCPP_CACHE_LIMIT", text)
    with pytest.raises(ConfigError, match="LINKCPP_CACHE_LIMIT"):
        config.cache_limit()
