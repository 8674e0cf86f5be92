"""Make a loadable GGUF with random weights for an architecture of the engine.

The engine itself says which tensors the hyperparameters ask for (:mod:`bindings.synth`); the weights follow from
the seed (:mod:`orchestrator.engine.synth_weights`). The hyperparameters come from
:mod:`orchestrator.models.architectures`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import bindings
from orchestrator.engine.synth_file import PlannedTensor, encode_metadata, write_gguf
from orchestrator.engine.synth_tokenizer import tokenizer_keys
from orchestrator.engine.synth_weights import byte_pieces
from orchestrator.errors import EngineError, InputError, UnknownArchitectureError
from orchestrator.models.architectures import RECIPES, Dimensions, Recipe, Value

Progress = Callable[[float, float | None, str], None]

EXPERT_WEIGHT: Final = re.compile(r"\.ffn_(up|gate|down|gate_up)_(ch)?exps\.weight$")
"""Names of the stacked expert matrices."""

_FFN_EXPERTS: Final = re.compile(r"^blk\.(\d+)\.(ffn_gate_inp\b|ffn_\w+_(exps|shexp)\b|exp_probs_b\b)")
_FFN_DENSE: Final = re.compile(r"^blk\.(\d+)\.ffn_(up|gate|down)\.")


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str
    kind: int
    shape: tuple[int, ...]


def architectures() -> tuple[str, ...]:
    """Name the architectures that :func:`synth` can make, in the order of the table."""
    return tuple(name for name, recipe in RECIPES.items() if recipe.reason is None)


def synth(
    architecture: str,
    destination: Path,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    **overrides: int,
) -> None:
    """Write a random-weight model of an architecture, the same bytes for the same arguments.

    ``overrides`` replace fields of :class:`orchestrator.models.architectures.Dimensions`. Raises
    :class:`UnknownArchitectureError`, :class:`InputError` for impossible sizes, :class:`EngineError` where the
    engine refuses the hyperparameters.
    """
    recipe = _recipe(architecture)
    dimensions = _dimensions(recipe, overrides)
    metadata = _metadata(architecture, recipe, dimensions)
    shapes = _wanted(_ask_engine(metadata), recipe, dimensions)
    tensors = [_plan(shape, seed) for shape in shapes]
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(destination, encode_metadata(metadata), len(metadata), tensors, progress)


def _recipe(architecture: str) -> Recipe:
    recipe = RECIPES.get(architecture)
    if recipe is None:
        raise UnknownArchitectureError(
            f"no recipe for architecture {architecture!r}", hint=f"known: {', '.join(architectures())}"
        )
    if recipe.reason is not None:
        raise InputError(f"{architecture} cannot be made from metadata: {recipe.reason}")
    return recipe


def _dimensions(recipe: Recipe, overrides: Mapping[str, int]) -> Dimensions:
    known = {field.name for field in dataclasses.fields(Dimensions)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InputError(f"unknown size {unknown[0]!r}", hint=f"known: {', '.join(sorted(known))}")
    return dataclasses.replace(recipe.dimensions, **overrides)


def _metadata(architecture: str, recipe: Recipe, dimensions: Dimensions) -> dict[str, Value]:
    metadata: dict[str, Value] = {
        "general.architecture": architecture,
        "general.name": f"synthetic {architecture}",
    }
    for key, value in recipe.keys(dimensions).items():
        plain = key.startswith(("general.", "tokenizer."))
        metadata[key if plain else f"{architecture}.{key}"] = value
    return dict(tokenizer_keys(dimensions.n_vocab)) | metadata


def _ask_engine(metadata: Mapping[str, Value], typed: Sequence[PlannedTensor] = ()) -> tuple[_Shape, ...]:
    """Ask the engine, in a process of its own: a failed assertion there must not end this one."""
    with tempfile.TemporaryDirectory(prefix="linkcpp-synth-") as folder:
        path = Path(folder) / "metadata.gguf"
        write_gguf(path, encode_metadata(metadata), len(metadata), typed)
        command = [sys.executable, "-m", "bindings.synth", str(path)]
        # the working folder comes first on the child's module path, wherever the packages were installed
        root = Path(bindings.__file__).parents[1]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    if answer.returncode != 0:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if "GGML_ASSERT" in line or "error" in line]
        said = (telling or lines or [f"exit status {answer.returncode}"])[0]
        raise EngineError(f"the engine refuses these hyperparameters: {said}")
    rows = (json.loads(line) for line in answer.stdout.splitlines())
    return tuple(_Shape(str(name), int(kind), tuple(int(n) for n in shape)) for name, kind, shape in rows)


def _wanted(shapes: Sequence[_Shape], recipe: Recipe, dimensions: Dimensions) -> Iterator[_Shape]:
    """Leave out what real files of the architecture do not have."""
    for shape in shapes:
        if recipe.either_ffn:
            experts, dense = _FFN_EXPERTS.match(shape.name), _FFN_DENSE.match(shape.name)
            if (experts and int(experts[1]) < dimensions.n_lead) or (dense and int(dense[1]) >= dimensions.n_lead):
                continue
        yield shape


def _plan(shape: _Shape, seed: int) -> PlannedTensor:
    def produce() -> Iterator[npt.NDArray[np.uint8]]:
        return byte_pieces(seed, shape.name, shape.shape)

    return PlannedTensor(shape.name, shape.kind, shape.shape, 4 * int(np.prod(shape.shape)), produce)
