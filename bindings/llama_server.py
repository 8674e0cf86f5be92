"""Build upstream's own server of the pinned source, unpatched: what the throughput of a gateway is held against.

It is upstream's build with upstream's defaults, without the page (whose files would be downloaded) and without TLS.
Nothing but measurements uses it, so nothing but a measurement builds it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from bindings.build import Progress, locked_folder, run_logged
from bindings.commands import Runner, output_of, run_command
from bindings.errors import BuildError
from bindings.recipe import BASE_FLAGS, Recipe, make_recipe
from bindings.upstream import NETWORK_SIGNS, UNUSED_FOLDERS, fetch, unpack

SERVER_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
"""What to build of it; how it computes is left to upstream."""

_UNUSED: Final = tuple(folder for folder in UNUSED_FOLDERS if folder != "vendor/llama.cpp/tools")
_TARGET: Final = "llama-server"


def build_server(cache: Path, progress: Progress, run: Runner = run_command) -> Path:
    """Return the server's program, built unless it is in ``cache``.

    ``CMAKE_ARGS`` of the environment is passed on, as to the engine. Raises :class:`BuildError` as
    :func:`bindings.build.build` does.
    """
    engine = make_recipe(os.environ, run, patched=False)
    recipe = replace(engine, flags=(*SERVER_FLAGS, *engine.flags[len(BASE_FLAGS) :]), shim=())
    folder = cache / "engine"
    program = folder / "server" / recipe.key / _TARGET
    if program.is_file():
        return program
    with locked_folder(folder, progress):
        if not program.is_file():  # else another process built it while this one waited
            progress(0, None, f"fetching {recipe.pin.name} {recipe.pin.version}")
            sdist = fetch(recipe.pin, folder, run, os.environ)
            with tempfile.TemporaryDirectory(dir=folder, prefix="server-") as temporary:
                built = _compile(recipe, sdist, Path(temporary), folder / "server.log", progress, run)
                program.parent.mkdir(parents=True, exist_ok=True)
                built.replace(program)
    return program


def _compile(recipe: Recipe, sdist: Path, work: Path, log: Path, progress: Progress, run: Runner) -> Path:
    progress(0, None, "unpacking")
    unpack(sdist, work / "tree", _UNUSED)
    environment = _with_tools(work / "tools", run)
    source, objects = work / "tree" / "vendor" / "llama.cpp", work / "objects"
    commands = [
        ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(objects), *recipe.flags],
        ["cmake", "--build", str(objects), "--target", _TARGET],
    ]
    run_logged(commands, work, log, progress, run, environment)
    return objects / "bin" / _TARGET


def _with_tools(folder: Path, run: Runner) -> Mapping[str, str]:
    """Return an environment with cmake and ninja, which are downloaded for this build where they are missing."""
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if shutil.which("cmake") and shutil.which("ninja"):
        return environment
    command = [sys.executable, "-m", "pip", "install", "--target", str(folder), "cmake", "ninja"]
    code, lines = output_of(run, command, folder=folder.parent, environment=environment)
    if code != 0:
        offline = any(sign in line for line in lines for sign in NETWORK_SIGNS)
        reason = (
            "no network, or the package index is out of reach" if offline else (lines or ["pip said nothing"])[-1]
        )
        raise BuildError(
            f"cmake and ninja could not be downloaded: {reason}", hint="apt-get install cmake ninja-build"
        )
    path = os.pathsep.join([str(folder / "bin"), environment.get("PATH", "")])
    modules = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    return {**environment, "PATH": path, "PYTHONPATH": modules}
