"""Prove that the installed engine is upstream's plus our patches, and nothing else.

The last check is the one that counts: with the hook off, every logit of a run has the bytes that an unpatched
build of the same source with the same flags gives.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bindings.build import Progress, build, installed, prepare
from bindings.commands import Runner, output_of, run_command
from bindings.errors import BindingsError, BuildError
from bindings.patch_queue import added_lines, apply
from bindings.recipe import HERE, Recipe, make_recipe
from bindings.upstream import fetch, file_sha256

ROOT: Final = HERE.parent
"""The folder that ``python -m bindings.logits_probe`` must run in to find this package."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verification; ``passed`` is None where it could not be tried."""

    name: str
    passed: bool | None
    detail: str


def verify(cache: Path, model: Path | None, progress: Progress, run: Runner = run_command) -> Iterator[Check]:
    """Yield the checks one by one; each reports its own failure, so that the others still run."""
    recipe = make_recipe(os.environ, run)
    progress(0, None, "checking the patches")
    yield _guarded("patches", lambda: _check_patches(recipe, cache, run))
    yield _guarded("engine", lambda: _check_engine(recipe))
    progress(0, None, "checking the library")
    yield from library_checks(run)
    if model is None:
        yield Check("logits", None, "no model to compare with; give one with --model")
    else:
        yield _guarded("logits", lambda: _check_logits(cache, model, progress, run))


def library_checks(run: Runner = run_command) -> Iterator[Check]:
    """Yield the checks that need the installed library alone: struct sizes and functions."""
    yield _guarded("structs", lambda: _in_child("structs", run))
    yield _guarded("symbols", lambda: _in_child("symbols", run))


def _guarded(name: str, check: Callable[[], tuple[bool, str]]) -> Check:
    try:
        passed, detail = check()
    except BindingsError as error:
        return Check(name, False, str(error))
    return Check(name, passed, detail)


def _check_patches(recipe: Recipe, cache: Path, run: Runner) -> tuple[bool, str]:
    folder = cache / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    sdist = fetch(recipe.pin, folder, run, os.environ)
    with tempfile.TemporaryDirectory(dir=folder, prefix="verify-") as temporary:
        tree = Path(temporary) / "tree"
        prepare(recipe, sdist, tree, run, os.environ)
        before = _tree_hashes(tree)
        again = apply(tree, recipe.patches, run, os.environ)
        if again or _tree_hashes(tree) != before:
            return False, "applying the patches a second time changed the source"
    count = len(recipe.patches)
    return True, f"{count} patches apply without fuzz, twice; {added_lines(recipe.patches)} lines added"


def _tree_hashes(tree: Path) -> Mapping[Path, str]:
    return {path.relative_to(tree): file_sha256(path) for path in sorted(tree.rglob("*")) if path.is_file()}


def _check_engine(recipe: Recipe) -> tuple[bool, str]:
    engine = installed()
    if engine is None:
        return False, "no engine is installed; run `linkcpp engine build`"
    if engine.record is None:
        return False, f"{engine.folder} is a stock llama-cpp-python; run `linkcpp engine build`"
    if engine.record.get("source") != recipe.source:
        return False, "the installed engine was built from other patches; run `linkcpp engine build`"
    return True, f"{engine.record.get('version')} in {engine.folder}"


def _in_child(what: str, run: Runner) -> tuple[bool, str]:
    """Ask the library in a process of its own: one that cannot be loaded must not end this one."""
    command = [sys.executable, "-m", "bindings.abi_probe", what]
    code, lines = output_of(run, command, folder=ROOT, environment=os.environ)
    return code == 0, (lines or [f"the check of the {what} said nothing"])[-1]


def stock_package(cache: Path, progress: Progress, run: Runner = run_command) -> Path:
    """Return a folder that holds upstream's own ``llama_cpp``, built with our flags, to put on a path."""
    recipe = make_recipe(os.environ, run, patched=False)
    folder = cache / "engine" / "stock" / recipe.key
    if not folder.is_dir():
        wheel = build(recipe, cache, progress, run)
        with tempfile.TemporaryDirectory(dir=cache / "engine", prefix="stock-") as temporary:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(temporary) / "package")
            folder.parent.mkdir(parents=True, exist_ok=True)
            (Path(temporary) / "package").replace(folder)
        shutil.rmtree(cache / "engine" / "work-stock", ignore_errors=True)
    return folder


def _check_logits(cache: Path, model: Path, progress: Progress, run: Runner) -> tuple[bool, str]:
    engine = installed()
    if engine is None:
        return False, "no engine is installed"
    stock = stock_package(cache, progress, run)
    progress(0, None, "comparing logits")
    with tempfile.TemporaryDirectory(prefix="linkcpp-verify-") as temporary:
        files: list[bytes] = []
        for folder in (engine.folder.parent, stock):
            output = Path(temporary) / f"{len(files)}.f32"
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            command = [sys.executable, "-m", "bindings.logits_probe", str(model.resolve()), str(output)]
            code, lines = output_of(run, command, folder=ROOT, environment=environment)
            if code != 0:
                raise BuildError(f"the run of {folder} failed: {(lines or ['no reason given'])[-1]}")
            if lines[-1:] != [str(folder / "llama_cpp")]:
                raise BuildError(f"the run took the engine in {lines[-1:]} instead of {folder}")
            files.append(output.read_bytes())
    same = bool(files[0]) and files[0] == files[1]
    count = len(files[0]) // 4
    return same, f"{count} logits of {model.name} " + ("byte-identical to an unpatched build" if same else "DIFFER")
