"""Upstream's own server, which measurements build once; pip, cmake and the compiler are stood in for."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from test_build import SOURCE, FakeTools, ignore, make_sdist

from bindings import llama_server
from bindings.errors import BuildError
from bindings.llama_server import build_server
from bindings.recipe import BASE_FLAGS, Recipe
from bindings.upstream import Pin, file_sha256

SERVER = "vendor/llama.cpp/tools/server/CMakeLists.txt"


class Tools(FakeTools):
    """Also stands in for cmake, which finds the server's source or fails."""

    def __call__(self, command, *, folder, environment, on_line) -> int:
        if command[0] != "cmake":
            return super().__call__(command, folder=folder, environment=environment, on_line=on_line)
        self.commands.append(" ".join(command))
        self.environments.append(dict(environment))
        for line in self.lines:
            on_line(line)
        if command[1] == "--build" and self.code == 0:
            assert (folder / "tree" / SERVER).is_file()
            program = Path(command[2]) / "bin" / "llama-server"
            program.parent.mkdir(parents=True)
            program.write_text("program")
        return self.code


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    return make_sdist(tmp_path / "source.tar.gz", {**SOURCE, SERVER: "server"})


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch, sdist: Path) -> Recipe:
    found = Recipe(
        pin=Pin("llama-cpp-python", "1.2.3", file_sha256(sdist), 7),
        is_patched=False,
        patches=(),
        shim=(),
        flags=(*BASE_FLAGS, "-DGGML_CUDA=on"),
        variables=(),
        compilers=("cc: 1", "c++: 1"),
        system="linux-x86_64",
        processor="",
    )
    monkeypatch.setattr(llama_server, "make_recipe", lambda *_arguments, **_options: found)
    return found


def test_it_is_built_once_with_upstreams_defaults_and_the_users_flags(tmp_path: Path, sdist: Path) -> None:
    tools = Tools(sdist, lines=("[1/2] Building", "[2/2] Linking"))
    seen = []
    program = build_server(tmp_path / "cache", lambda done, total, note="": seen.append((done, total)), tools)
    assert program.read_text() == "program"
    configure = next(command for command in tools.commands if " -S " in command)
    assert configure.endswith("-DGGML_CUDA=on")
    assert not any(flag in configure for flag in BASE_FLAGS)
    assert "-DLLAMA_USE_PREBUILT_UI=OFF" in configure
    assert (2, 2) in seen
    again = Tools(sdist)
    assert build_server(tmp_path / "cache", ignore, again) == program
    assert again.commands == []
    assert [path.name for path in (tmp_path / "cache" / "engine").iterdir() if path.name.startswith("server-")] == []


def test_a_compilers_error_is_said_in_a_line_and_nothing_is_left(tmp_path: Path, sdist: Path) -> None:
    tools = Tools(sdist, lines=("server.cpp:1:2: error: no such thing",), code=0)

    def failing(command, *, folder, environment, on_line) -> int:
        code = tools(command, folder=folder, environment=environment, on_line=on_line)
        return 1 if command[0] == "cmake" else code

    with pytest.raises(BuildError, match="no such thing") as caught:
        build_server(tmp_path / "cache", ignore, failing)
    assert "server.log" in str(caught.value.hint)
    assert not (tmp_path / "cache" / "engine" / "server").exists()


def test_cmake_is_downloaded_for_the_build_where_it_is_missing(
    tmp_path: Path, sdist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, *more, **options: None if name == "cmake" else real(name, *more, **options)
    )
    tools = Tools(sdist)
    build_server(tmp_path / "cache", ignore, tools)
    assert tools.commands[1] == "install"
    assert tools.environments[-1]["PATH"].split(os.pathsep)[0].endswith("tools/bin")

    def offline(command, *, folder, environment, on_line) -> int:
        if command[:4] == [sys.executable, "-m", "pip", "install"]:
            on_line("Temporary failure in name resolution")
            return 1
        return tools(command, folder=folder, environment=environment, on_line=on_line)

    with pytest.raises(BuildError, match="no network"):
        build_server(tmp_path / "other", ignore, offline)
