"""The queue of patches over upstream's source: ``patches/series`` names them in order, one a line.

Patches must apply to the pinned source exactly: `git apply` takes no fuzz, and applies all or nothing. That
also makes a second run harmless, because a tree with the whole queue applied is recognised by reversing it.
"""

from __future__ import annotations

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
    if _git_apply(tree, patches[::-1], run, environment, "--reverse", "--check") is None:
        return False
    reason = _git_apply(tree, patches, run, environment)
    if reason is None:
        return True
    for count in range(1, len(patches) + 1):
        first = _git_apply(tree, patches[:count], run, environment, "--check")
        if first is not None:
            raise BuildError(
                f"{patches[count - 1].name} does not apply to the pinned source: {first}",
                hint="the patch or patches/UPSTREAM was changed; refresh the patch against the pinned source",
            )
    raise BuildError(f"the patches do not apply: {reason}")


def _git_apply(
    tree: Path, patches: Sequence[Path], run: Runner, environment: Mapping[str, str], *options: str
) -> str | None:
    """Return None if git took the patches, else its first complaint."""
    # A repository around the tree would make git look for the files there.
    quiet = {**environment, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent), "LC_ALL": "C"}
    command = ["git", "apply", "--whitespace=nowarn", *options, *(str(patch.resolve()) for patch in patches)]
    code, lines = output_of(run, command, folder=tree, environment=quiet)
    if code == 0:
        return None
    complaints = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (complaints or lines or ["git apply failed"])[0]
