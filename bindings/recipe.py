"""What goes into an engine: pin, patches, shim, flags, compilers, machine; and the hash that stands for it."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bindings.commands import Runner, output_of, run_command
from bindings.errors import BuildError
from bindings.patch_queue import read_series
from bindings.upstream import Pin, read_pin

HERE: Final = Path(__file__).parent
SHIM_FOLDER: Final = HERE / "shim"
PATCHES_FOLDER: Final = HERE / "patches"

SHIM_SUFFIXES: Final = frozenset({".cpp", ".h", ".cmake"})

BASE_FLAGS: Final = ("-DLLAVA_BUILD=OFF", "-DGGML_LLAMAFILE=OFF", "-DGGML_OPENMP=OFF")
"""Flags of every build: no vision tools, and the two switches that the numbers contract and waiting rest on."""

FLAG_VARIABLES: Final = (
    "CFLAGS",
    "CXXFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "CUDAFLAGS",
    "CUDACXX",
    "CMAKE_GENERATOR",
    "SOURCE_DATE_EPOCH",  # upstream turns native code off where it is set
)
"""Variables of the environment that CMake heeds besides ``CMAKE_ARGS``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides how an engine turns out; equal keys mean interchangeable wheels."""

    pin: Pin
    is_patched: bool
    patches: tuple[Path, ...]
    shim: tuple[Path, ...]
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    compilers: tuple[str, ...]
    system: str
    processor: str

    @property
    def source(self) -> str:
        """Hash of what the engine is made of: pin, patches and shim, but no flags and no machine."""
        return _digest(
            self.pin.sha256, *(part for path in (*self.patches, *self.shim) for part in (path.name, _text(path)))
        )

    @property
    def toolchain(self) -> str:
        """Hash of what compiles it: flags, compilers, system and, if the build is native, the processor."""
        return _digest(*self.flags, *self.variables, *self.compilers, self.system, self.processor)

    @property
    def key(self) -> str:
        """Hash of all of it."""
        return _digest(self.version, self.source, self.toolchain)

    @property
    def version(self) -> str:
        """The version of the wheel: ours, or upstream's for the build to compare with."""
        return self.pin.local_version if self.is_patched else self.pin.version


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def make_recipe(environment: Mapping[str, str], run: Runner = run_command, *, patched: bool = True) -> Recipe:
    """Collect the inputs of a build on this machine; raise :class:`BuildError` if there is no compiler.

    ``CMAKE_ARGS`` of the environment is appended to our flags. With ``patched=False`` the recipe is upstream's
    own source with the same flags.
    """
    flags = (*BASE_FLAGS, *shlex.split(environment.get("CMAKE_ARGS", "")))
    compilers = tuple(
        _compiler_version(environment, run, variable, names)
        for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++")))
    )
    return Recipe(
        pin=read_pin(PATCHES_FOLDER / "UPSTREAM"),
        is_patched=patched,
        patches=read_series(PATCHES_FOLDER) if patched else (),
        shim=tuple(
            sorted(
                path for path in SHIM_FOLDER.iterdir() if path.suffix in (SHIM_SUFFIXES if patched else {".cmake"})
            )
        ),
        flags=flags,
        variables=tuple(f"{name}={environment[name]}" for name in FLAG_VARIABLES if environment.get(name)),
        compilers=compilers,
        system=sysconfig.get_platform(),
        processor=_processor() if is_native(flags) else "",
    )


def is_native(flags: Sequence[str]) -> bool:
    """Tell whether the flags leave upstream's default, code for exactly this processor, switched on."""
    native = True
    for flag in flags:
        found = re.fullmatch(r"-DGGML_NATIVE(?::\w+)?=(.*)", flag)
        if found:
            native = found[1].upper() not in {"OFF", "0", "NO", "FALSE", "N"}
    return native


def _processor() -> str:
    """Return the processor's model and features; two machines with equal text run each other's native code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    first = {name: line for line in reversed(lines) for name in wanted if line.startswith(name)}
    return "\n".join(first[name] for name in sorted(first)) or platform.machine()


def _compiler_version(environment: Mapping[str, str], run: Runner, variable: str, names: Sequence[str]) -> str:
    wanted = shlex.split(environment.get(variable, ""))
    candidates = [wanted] if wanted else [[name] for name in names]
    for command in candidates:
        if shutil.which(command[0], path=environment.get("PATH")):
            code, lines = output_of(run, [*command, "--version"], folder=HERE, environment=environment)
            if code == 0 and lines:
                return f"{shlex.join(command)}: {lines[0]}"
    language = "C++" if variable == "CXX" else "C"
    place = f"{variable}={shlex.join(wanted)} does not run" if wanted else "none is on the PATH"
    raise BuildError(f"no {language} compiler: {place}", hint="apt-get install g++")


def record(recipe: Recipe) -> dict[str, object]:
    """Return what a wheel says about itself, in JSON's types."""
    return {
        "version": recipe.version,
        "key": recipe.key,
        "source": recipe.source,
        "flags": [*recipe.flags, *recipe.variables],
        "compilers": list(recipe.compilers),
        "system": recipe.system,
        "native": bool(recipe.processor),
        "patches": [path.name for path in recipe.patches],
    }
