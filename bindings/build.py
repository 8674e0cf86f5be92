"""Build the patched engine once: fetch, unpack, patch, add the shim, compile one wheel, install it.

The wheel is an ordinary ``llama-cpp-python`` of the pinned version with a local version number, so that
``import llama_cpp`` is the patched engine and everything that requires llama-cpp-python is satisfied. Wheels
are kept by the hash of all that goes into them; the tree of the last build is kept too, so that a change of
the shim compiles only what it touches.

``python -m bindings.build`` needs nothing but the standard library: it is how a new machine gets its engine.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bindings.commands import Runner, output_of, run_command
from bindings.errors import BindingsError, BuildError
from bindings.patch_queue import apply
from bindings.recipe import Recipe, make_recipe, record
from bindings.upstream import NETWORK_SIGNS, fetch, synchronise, unpack

RECORD_NAME: Final = "linkcpp_build.json"
"""The file inside the installed package that says what it was built from."""

NEEDED_BYTES: Final = 1 << 30
"""Free space that a build may take at its peak, source and objects of a CPU build included."""


class Progress(Protocol):
    """Take the state of the build: ``done`` of ``total`` steps (None: not known) and what it is doing."""

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        """Show this state."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The engine that ``import llama_cpp`` would find; ``record`` is None for one that we did not build."""

    folder: Path
    record: Mapping[str, object] | None


def default_cache() -> Path:
    """Return the cache folder when nothing but the standard library is there: as ``orchestrator.config`` has it."""
    override = os.environ.get("LINKCPP_CACHE", "").strip()
    if override:
        return Path(override)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "linkcpp"
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache") / "linkcpp"


def cached_wheel(recipe: Recipe, cache: Path) -> Path | None:
    """Return the wheel of this recipe if it was built before."""
    wheels = sorted((cache / "engine" / "wheels" / recipe.key).glob("*.whl"))
    return wheels[0] if wheels else None


def build(recipe: Recipe, cache: Path, progress: Progress, run: Runner = run_command, *, force: bool = False) -> Path:
    """Return the wheel of ``recipe``, building it unless it is in ``cache``; ``force`` builds from nothing.

    Raises :class:`BuildError` with one line and what to do: no git, no network, no space, a hash or a patch
    that does not fit, a compiler's error. The full output is in ``engine/build.log`` of the cache.
    """
    wheel = cached_wheel(recipe, cache)
    if wheel is not None and not force:
        return wheel
    folder = cache / "engine"
    with locked_folder(folder, progress):
        wheel = cached_wheel(recipe, cache)  # another process may have built it while this one waited
        if wheel is not None and not force:
            return wheel
        return _build_locked(recipe, folder, progress, run, force=force)


def _build_locked(recipe: Recipe, folder: Path, progress: Progress, run: Runner, *, force: bool) -> Path:
    environment = _build_environment(recipe)
    if shutil.which("git", path=environment.get("PATH")) is None:
        raise BuildError("git is not installed", hint="apt-get install git")
    work = folder / f"work-{'patched' if recipe.is_patched else 'stock'}"
    stamp = work / "toolchain"
    if force or not stamp.is_file() or stamp.read_text(encoding="utf-8") != recipe.toolchain:
        # Objects of other flags or compilers must not be mixed in.
        shutil.rmtree(work, ignore_errors=True)
    tree, objects = work / "tree", work / "objects"
    tree.mkdir(parents=True, exist_ok=True)
    stamp.write_text(recipe.toolchain, encoding="utf-8")

    progress(0, None, f"fetching {recipe.pin.name} {recipe.pin.version}")
    sdist = fetch(recipe.pin, folder, run, environment)
    progress(0, None, "unpacking and patching")
    with tempfile.TemporaryDirectory(dir=work, prefix="fresh-") as temporary:
        fresh = Path(temporary) / "tree"
        prepare(recipe, sdist, fresh, run, environment)
        synchronise(fresh, tree)

    environment["SKBUILD_BUILD_DIR"] = str(objects)
    progress(0, None, "preparing the compiler")
    with tempfile.TemporaryDirectory(dir=work, prefix="wheel-") as temporary:
        _compile(tree, Path(temporary), folder / "build.log", progress, run, environment)
        wheels = list(Path(temporary).glob("*.whl"))
        if len(wheels) != 1:
            raise BuildError(
                f"the build made {len(wheels)} wheels instead of one", hint=f"see {folder / 'build.log'}"
            )
        _check_loads(tree / "llama_cpp" / "lib", run, environment)
        target = folder / "wheels" / recipe.key
        target.mkdir(parents=True, exist_ok=True)
        return wheels[0].replace(target / wheels[0].name)


def _build_environment(recipe: Recipe) -> dict[str, str]:
    options = "-DCMAKE_PROJECT_llama_cpp_INCLUDE=vendor/llama.cpp/src/linkcpp/build_options.cmake"
    return {
        **os.environ,
        "CMAKE_ARGS": shlex.join([*recipe.flags, options]),
        "NINJA_STATUS": "[%f/%t] ",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # Upstream installs headers and a second copy of the libraries outside its package.
        "SKBUILD_WHEEL_EXCLUDE": "include/**;lib/**;bin/**",
    }


def prepare(recipe: Recipe, sdist: Path, tree: Path, run: Runner, environment: Mapping[str, str]) -> None:
    """Make the source of ``recipe`` in the new folder ``tree``: unpacked, patched, with shim, version and record."""
    unpack(sdist, tree)
    apply(tree, recipe.patches, run, environment)
    shim = tree / "vendor" / "llama.cpp" / "src" / "linkcpp"
    shim.mkdir(parents=True, exist_ok=True)
    for path in recipe.shim:
        shutil.copyfile(path, shim / path.name)
    if not recipe.is_patched:
        return
    package = tree / "llama_cpp"
    init = package / "__init__.py"
    before = init.read_text(encoding="utf-8")
    after = before.replace(f'__version__ = "{recipe.pin.version}"', f'__version__ = "{recipe.pin.local_version}"')
    if after == before:
        raise BuildError("the source does not state the pinned version in llama_cpp/__init__.py")
    init.write_text(after, encoding="utf-8")
    (package / RECORD_NAME).write_text(json.dumps(record(recipe), indent=2) + "\n", encoding="utf-8")


def _compile(
    tree: Path, wheels: Path, log: Path, progress: Progress, run: Runner, environment: Mapping[str, str]
) -> None:
    options = ["--verbose", "--no-deps", "--wheel-dir", str(wheels), str(tree)]
    run_logged([[sys.executable, "-m", "pip", "wheel", *options]], tree, log, progress, run, environment)


def run_logged(
    commands: Sequence[Sequence[str]],
    folder: Path,
    log: Path,
    progress: Progress,
    run: Runner,
    environment: Mapping[str, str],
) -> None:
    """Run the commands of a compilation with their output in ``log``; raise :class:`BuildError` with the reason."""
    lines: list[str] = []
    with log.open("w", encoding="utf-8") as file:

        def follow(line: str) -> None:
            file.write(line + "\n")
            lines.append(line)
            step = re.match(r"\s*\[(\d+)/(\d+)\]", line)
            if step:
                progress(int(step[1]), int(step[2]), f"compiling {step[1]} of {step[2]}")

        for command in commands:
            if run(command, folder=folder, environment=environment, on_line=follow) != 0:
                raise explain_failure(lines, log)


def explain_failure(lines: Sequence[str], log: Path) -> BuildError:
    """Say in one line why the compilation failed, from its output."""
    text = "\n".join(lines)
    if "No space left on device" in text:
        return _disk_error(log.parent)
    if re.search(r"Killed signal terminated|internal compiler error: Killed", text):
        return BuildError(
            "the compiler ran out of memory", hint="try again with CMAKE_BUILD_PARALLEL_LEVEL=1 in the environment"
        )
    compiler = [line for line in lines if re.search(r"(?:\berror:|undefined reference|CMake Error)", line)]
    first = next((line for line in compiler if not line.strip().startswith("error: subprocess")), None)
    if first is not None and "CMake Error" in first:
        after = lines[lines.index(first) + 1 :][:3]
        first = " ".join([first.strip(), *(line.strip() for line in after)])
    if first is None and any(sign in text for sign in NETWORK_SIGNS):
        return BuildError(
            "the build tools (scikit-build-core, cmake, ninja) could not be downloaded: no network, or the package "
            "index is out of reach",
            hint="connect and try again",
        )
    reason = (first or (lines[-1] if lines else "pip said nothing")).strip()
    return BuildError(f"the engine does not compile: {reason}", hint=f"the whole output is in {log}")


def _disk_error(folder: Path) -> BuildError:
    return BuildError(
        f"not enough disk space for the build below {folder}",
        hint="free 1 GiB, or set LINKCPP_CACHE to a folder on another disk",
    )


def _check_loads(folder: Path, run: Runner, environment: Mapping[str, str]) -> None:
    """Load the new library in a process of its own: a function that the shim lacks shows here, not at first use."""
    libraries = [path for path in folder.glob("libllama.*") if path.suffix in {".so", ".dylib"}]
    if not libraries:
        raise BuildError(f"the build left no libllama in {folder}")
    code = f"import ctypes; ctypes.CDLL({str(libraries[0])!r})"
    status, lines = output_of(run, [sys.executable, "-c", code], folder=folder, environment=environment)
    if status != 0:
        raise BuildError(f"the new engine cannot be loaded: {(lines or ['no reason given'])[-1]}")


def installed() -> Installed | None:
    """Return the engine of this Python without loading it, or None where there is none."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        content = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    return Installed(folder, content if isinstance(content, dict) else None)


def is_installed(recipe: Recipe) -> bool:
    """Tell whether the engine of this Python is the one of ``recipe``."""
    engine = installed()
    return engine is not None and engine.record is not None and engine.record.get("key") == recipe.key


def install(wheel: Path, run: Runner = run_command) -> None:
    """Install the wheel in this Python in place of any other llama-cpp-python."""
    lines: list[str] = []
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", "--no-index", str(wheel)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if run(command, folder=wheel.parent, environment=environment, on_line=lines.append) != 0:
        reason = next((line for line in lines if line.lower().startswith("error")), "pip failed")
        raise BuildError(f"{wheel.name} cannot be installed: {reason}", hint="use a virtual environment: make setup")


@contextmanager
def locked_folder(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of the folder of builds, waiting for whoever has it; say in words what is wrong with its disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(0, None, "waiting for another build to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            if shutil.disk_usage(folder).free < NEEDED_BYTES:
                raise _disk_error(folder)
            yield
    except OSError as error:
        if error.errno == 28:  # ENOSPC
            raise _disk_error(folder) from error
        raise BuildError(
            f"cannot write the build below {folder}: {error.strerror}", hint="set LINKCPP_CACHE"
        ) from error


class _Bar:
    """A bar of plain characters on a terminal, else a line for each fifth of the way."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        share = done / total if total else 0.0
        if sys.stderr.isatty():
            bar = "#" * int(30 * share)
            sys.stderr.write(f"\r\x1b[Kengine [{bar:<30}] {share:4.0%} {note}")
        else:
            step = f"compiling, {int(share * 5) * 20} %" if total else note
            if step != self._last:
                sys.stderr.write(f"engine: {step}\n")
            self._last = step
        sys.stderr.flush()

    def close(self) -> None:
        """End the line of the bar."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")


def main() -> int:
    """Build the engine and install it in this Python unless it is there; return the exit code."""
    bar = _Bar()
    try:
        recipe = make_recipe(os.environ)
        if not is_installed(recipe):
            wheel = build(recipe, default_cache(), bar)
            install(wheel)
    except BindingsError as error:
        bar.close()
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 3
    except (KeyboardInterrupt, subprocess.SubprocessError):
        bar.close()
        return 130
    bar.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
