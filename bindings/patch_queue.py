"""The queue of patches over upstream's source: ``patches/series`` names them in order, one a line.

Patches must apply to the pinned source exactly, and `git apply` takes no fuzz. The queue is tried on copies of
the files that it touches, one patch after the other, so that a tree has all of it or nothing. A second run is
harmless: a tree with the whole queue applied is recognised by taking the patches back, last first.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bindings.commands import Runner, output_of
from bindings.errors import BuildError


def read_series(folder: Path) -> tuple[Path, ...]:
    """Return the patches that ``folder/series`` names, in order; raise :class:`BuildError` if one is absent."""
    try:
        lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BuildError(
            f"cannot read {folder / 'series'}: {error.strerror}", hint="install linkcpp again"
        ) from error
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    patches = tuple(folder / name for name in names)
    for patch in patches:
        if not patch.is_file():
            raise BuildError(f"{folder / 'series'} names {patch.name}, which is not there")
    return patches


def added_lines(patches: Sequence[Path]) -> int:
    """Count the lines that the patches add to upstream's files."""
    return sum(
        line.startswith("+") and not line.startswith("+++")
        for patch in patches
        for line in patch.read_text(encoding="utf-8").splitlines()
    )


def apply(tree: Path, patches: Sequence[Path], run: Runner, environment: Mapping[str, str]) -> bool:
    """Apply the whole queue to ``tree``; return False if it was applied already.

    Raises :class:`BuildError` that names the first patch that does not fit; the tree is then unchanged.
    """
    if not patches:
        return False
    touched = sorted({path for patch in patches for path in touched_files(patch, run, environment)})
    with tempfile.TemporaryDirectory(prefix="linkcpp-patches-") as temporary:
        backwards, forwards = Path(temporary) / "backwards", Path(temporary) / "forwards"
        for scratch in (backwards, forwards):
            _copy(touched, tree, scratch)
        if all(_git_apply(backwards, patch, run, environment, "--reverse") is None for patch in reversed(patches)):
            return False
        for patch in patches:
            reason = _git_apply(forwards, patch, run, environment)
            if reason is not None:
                raise BuildError(
                    f"{patch.name} does not apply to the pinned source: {reason}",
                    hint="the patch or patches/UPSTREAM was changed; refresh the patch against the pinned source",
                )
        _copy(touched, forwards, tree)
    return True


def touched_files(patch: Path, run: Runner, environment: Mapping[str, str]) -> list[str]:
    """Return the files that a patch changes; raise :class:`BuildError` if it is not a patch."""
    command = ["git", "apply", "--numstat", str(patch.resolve())]
    code, lines = output_of(
        run, command, folder=patch.parent, environment=_outside_repositories(patch.parent, environment)
    )
    rows = [line.split("\t") for line in lines]
    if code != 0 or not rows or any(len(row) != 3 for row in rows):
        raise BuildError(f"{patch.name} is not a patch: {(lines or ['it is empty'])[0].removeprefix('error: ')}")
    return [row[2] for row in rows]


def _copy(names: Sequence[str], source: Path, destination: Path) -> None:
    destination.mkdir(exist_ok=True)
    for name in names:
        if (source / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, destination / name)


def _git_apply(folder: Path, patch: Path, run: Runner, environment: Mapping[str, str], *options: str) -> str | None:
    """Return None if git took the patch, else its first complaint."""
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch.resolve())]
    code, lines = output_of(run, command, folder=folder, environment=_outside_repositories(folder, environment))
    if code == 0:
        return None
    complaints = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (complaints or lines or ["git apply failed"])[0]


def _outside_repositories(folder: Path, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Keep git from taking a repository around ``folder`` for the place that the patch is meant for."""
    return {**environment, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "LC_ALL": "C"}
