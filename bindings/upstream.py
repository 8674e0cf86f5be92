"""The pinned upstream source: what it is, how it is fetched, checked and unpacked.

The pin is one source distribution of llama-cpp-python, because the ctypes structs of its Python half fit
exactly the llama.cpp that it vendors. ``patches/UPSTREAM`` names it in lines of ``key: value``.
"""

from __future__ import annotations

import filecmp
import hashlib
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from bindings.commands import Runner
from bindings.errors import BuildError

UNUSED_FOLDERS: Final = (
    ".git",  # a repository inside the tree would make `git apply` and upstream's build info look at the wrong one
    "docker",
    "docs",
    "examples",
    *(
        f"vendor/llama.cpp/{name}"
        for name in ("app", "benches", "conversion", "docs", "examples", "models", "pocs", "tests", "tools")
    ),
)
"""Parts of the source that no target of ours needs: four fifths of its size."""

NETWORK_SIGNS: Final = (
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Connection refused",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Read timed out",
    "ProxyError",
    "SSLError",
)


@dataclass(frozen=True, slots=True)
class Pin:
    """The upstream release that is patched, and the number of our revision of it."""

    name: str
    version: str
    sha256: str
    revision: int

    @property
    def local_version(self) -> str:
        """The version of the patched wheel (PEP 440, satisfies ``==`` of upstream's version)."""
        return f"{self.version}+linkcpp.{self.revision}"

    @property
    def file_name(self) -> str:
        """The file name of the source distribution."""
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"


def read_pin(path: Path) -> Pin:
    """Read ``patches/UPSTREAM``; raise :class:`BuildError` if a line or a key is not as it should be."""
    values: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BuildError(f"cannot read {path}: {error.strerror}", hint="install linkcpp again") from error
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        key, colon, value = line.partition(":")
        if not colon:
            raise BuildError(f"{path}: {line!r} is not `key: value`")
        values[key.strip()] = value.strip()
    if set(values) != {"name", "version", "sha256", "revision"} or not values["revision"].isdecimal():
        raise BuildError(f"{path} must give name, version, sha256 and a number as revision")
    return Pin(values["name"], values["version"], values["sha256"], int(values["revision"]))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(pin: Pin, folder: Path, run: Runner, environment: Mapping[str, str]) -> Path:
    """Return the source distribution in ``folder``, downloading it with pip unless it is there with the right hash.

    Raises :class:`BuildError` if there is no network, no such release, or the hash differs.
    """
    path = folder / pin.file_name
    if path.is_file() and file_sha256(path) == pin.sha256:
        return path
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as temporary:
        lines: list[str] = []
        options = ["--no-deps", "--no-binary", pin.name, "--dest", temporary]
        code = run(
            [sys.executable, "-m", "pip", "download", *options, f"{pin.name}=={pin.version}"],
            folder=folder,
            environment=environment,
            on_line=lines.append,
        )
        fetched = Path(temporary) / pin.file_name
        if code != 0 or not fetched.is_file():
            raise _download_error(pin, folder, lines)
        found = file_sha256(fetched)
        if found != pin.sha256:
            raise BuildError(
                f"{pin.file_name} has SHA-256 {found}, but {pin.sha256} is pinned",
                hint="the package index gave another file than the pinned one; do not use it",
            )
        fetched.replace(path)
    return path


def _download_error(pin: Pin, folder: Path, lines: list[str]) -> BuildError:
    if any(sign in line for line in lines for sign in NETWORK_SIGNS):
        return BuildError(
            f"{pin.name} {pin.version} could not be downloaded: no network, or the package index is out of reach",
            hint=f"connect, or put {pin.file_name} into {folder}",
        )
    if any("No space left" in line for line in lines):
        return BuildError("the disk is full", hint=f"free 1 GiB where {folder} and the temporary files are")
    reasons = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["pip said nothing"]
    return BuildError(
        f"{pin.name} {pin.version} could not be downloaded: {reasons[0].removeprefix('ERROR:').strip()}"
    )


def unpack(sdist: Path, destination: Path, unused: Sequence[str] = UNUSED_FOLDERS) -> None:
    """Unpack a source distribution without its ``unused`` folders; refuse names outside it, links and devices."""
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                inside = _path_inside(member)
                if inside is None or any(inside.is_relative_to(folder) for folder in unused):
                    continue
                target = destination / inside
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    raise BuildError(f"{sdist.name} holds {member.name!r}, which is neither a file nor a folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
                if member.mode & 0o100:
                    target.chmod(0o755)
    except (tarfile.TarError, EOFError) as error:
        raise BuildError(f"{sdist} is damaged: {error}", hint="delete it and try again") from error


def _path_inside(member: tarfile.TarInfo) -> PurePosixPath | None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise BuildError(f"the source distribution holds the unsafe name {member.name!r}")
    inside = PurePosixPath(*path.parts[1:])
    return inside if inside.parts else None


def synchronise(source: Path, destination: Path) -> int:
    """Make ``destination`` equal to ``source``, touching only files that differ; return how many were written.

    Untouched files keep their time, so that the next build compiles only what changed.
    """
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for path in sorted(destination.rglob("*"), reverse=True):
        if path.is_symlink() or path.is_file():
            if path.relative_to(destination) not in wanted:
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()
    written = 0
    for relative in sorted(wanted):
        target = destination / relative
        if target.is_file() and filecmp.cmp(source / relative, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / relative, target)
        written += 1
    return written
