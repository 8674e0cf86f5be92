"""Make a loadable GGUF with random weights for an architecture of the engine.

The engine itself says which tensors the hyperparameters ask for (:mod:`bindings.synth`); the weights follow from
the seed (:mod:`orchestrator.engine.synth_weights`). The hyperparameters come from
:mod:`orchestrator.models.architectures` or, with the true shape of a known model, from
:mod:`orchestrator.models.faithful`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import bindings
from orchestrator.engine.synth_blocks import random_blocks
from orchestrator.engine.synth_metadata import encode_entries, tokenizer_keys
from orchestrator.engine.synth_weights import WEIGHTS_VERSION, byte_pieces, spread_of
from orchestrator.errors import EngineError, InputError, UnknownArchitectureError
from orchestrator.models.architectures import RECIPES, WITHOUT_EXPERTS, Recipe
from orchestrator.models.faithful import FAITHFUL, Faithful
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf_header import DEFAULT_ALIGNMENT
from orchestrator.models.gguf_writer import PlannedTensor, Progress, write_gguf
from orchestrator.models.hyperparameters import Dimensions, Value

EXPERT_WEIGHT: Final = re.compile(r"\.ffn_(up|gate|down|gate_up)_(ch)?exps\.weight$")
"""Names of the stacked expert matrices."""

MATRIX_WEIGHT: Final = re.compile(
    r"(\.(attn_(q|k|v|qkv|gate|output)|ssm_out|ffn_(up|gate|down)(_shexp)?)|^token_embd|^output)\.weight$"
)
"""Names of the other matrices that quantised files quantise; never the router."""

_FFN_EXPERTS: Final = re.compile(r"^blk\.(\d+)\.(ffn_gate_inp\b|ffn_\w+_(exps|shexp)\b|exp_probs_b\b)")
_FFN_DENSE: Final = re.compile(r"^blk\.(\d+)\.ffn_(up|gate|down)\.")
_BLOCK: Final = re.compile(r"^blk\.(\d+)\.")
_FUSED: Final = "ffn_gate_up_exps.weight"


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Order:
    """All that decides what is written."""

    architecture: str
    recipe: Recipe
    dimensions: Dimensions
    model: Faithful | None
    seed: int
    fused: bool
    scales: bool


def architectures() -> tuple[str, ...]:
    """Name the architectures that :func:`synth` can make, in the order of the table."""
    return tuple(RECIPES)


def synth(
    architecture: str,
    destination: Path,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    like: str | None = None,
    fused: bool = True,
    scales: bool | None = None,
    sizes: Mapping[str, int] | None = None,
    **overrides: int,
) -> None:
    """Write a random-weight model of an architecture, the same bytes for the same arguments.

    ``like`` takes the shape of a known model (:data:`orchestrator.models.faithful.FAITHFUL`); the architecture
    must be that model's. ``sizes`` and ``overrides`` replace fields of
    :class:`orchestrator.models.hyperparameters.Dimensions`. ``fused`` keeps gate and up matrices in one tensor
    where the architecture can; ``scales`` keeps the optional scale tensors (by default in small models, which
    are for testing, and not with ``like``, whose originals have none). Raises
    :class:`UnknownArchitectureError`, :class:`InputError` for impossible sizes, :class:`EngineError` where the
    engine refuses the hyperparameters.
    """
    model = None if like is None else _faithful(like, architecture)
    recipe = _recipe(architecture)
    start = recipe.dimensions if model is None else model.dimensions
    predicted = {**(sizes or {}), **overrides}.get("n_predict", 0)
    if not 0 <= predicted <= recipe.predicts:
        raise InputError(f"the engine computes at most {recipe.predicts} prediction layers of {architecture}")
    keep_scales = model is None if scales is None else scales
    order = _Order(
        architecture, recipe, _sized(start, {**(sizes or {}), **overrides}), model, seed, fused, keep_scales
    )
    metadata = _metadata(order)
    tensors = [_plan(shape, order) for shape in _wanted(_ask_engine(metadata, _typed(order)), order)]
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(destination, encode_entries(metadata), tensors, alignment=DEFAULT_ALIGNMENT, progress=progress)


def recipe_sha256(architecture: str, *, like: str | None = None, seed: int = 0) -> str:
    """Hash what decides the bytes of :func:`synth`'s file, without asking the engine."""
    model = None if like is None else _faithful(like, architecture)
    recipe = _recipe(architecture)
    dimensions = recipe.dimensions if model is None else model.dimensions
    order = _Order(architecture, recipe, dimensions, model, seed, fused=True, scales=model is None)
    digest = hashlib.sha256(f"weights {WEIGHTS_VERSION}, seed {seed}".encode())
    for entry in encode_entries(_metadata(order)):
        digest.update(entry)
    return digest.hexdigest()


def _recipe(architecture: str) -> Recipe:
    if architecture in WITHOUT_EXPERTS:
        raise InputError(f"{architecture} has no experts: {WITHOUT_EXPERTS[architecture]}")
    recipe = RECIPES.get(architecture)
    if recipe is None:
        known = ", ".join(architectures())
        raise UnknownArchitectureError(f"no recipe for architecture {architecture!r}", hint=f"known: {known}")
    return recipe


def _faithful(like: str, architecture: str) -> Faithful:
    model = FAITHFUL.get(like)
    if model is None:
        raise InputError(f"no shape of a model {like!r}", hint=f"known: {', '.join(FAITHFUL)}")
    if model.architecture != architecture:
        raise InputError(f"{like} is of architecture {model.architecture}, not {architecture}")
    return model


def _sized(start: Dimensions, overrides: Mapping[str, int]) -> Dimensions:
    known = {field.name for field in dataclasses.fields(Dimensions)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InputError(f"unknown size {unknown[0]!r}", hint=f"known: {', '.join(sorted(known))}")
    return dataclasses.replace(start, **overrides)


def _metadata(order: _Order) -> dict[str, Value]:
    like = "" if order.model is None else f" like {order.model.name}"
    metadata: dict[str, Value] = {
        "general.architecture": order.architecture,
        "general.name": f"synthetic {order.architecture}{like}",
    }
    keys = dict(order.recipe.keys(order.dimensions))
    if order.model is not None:
        keys |= order.model.keys(order.dimensions)
    for key, value in keys.items():
        plain = key.startswith(("general.", "tokenizer."))
        metadata[key if plain else f"{order.architecture}.{key}"] = value
    return dict(tokenizer_keys(order.dimensions.n_vocab)) | metadata


def _typed(order: _Order) -> list[PlannedTensor]:
    """Name the expert matrices with their type: the engine reserves memory for what it lists, four times as much
    for F32 as for the widest type that we write instead.
    """
    if order.model is None or order.model.expert_type is GgmlType.F32:
        return []
    kind = order.model.expert_type
    block = bytes(kind.block_bytes)
    names = [
        f"blk.{layer}.ffn_{part}_exps.weight"
        for layer in range(order.dimensions.n_layer + order.dimensions.n_predict)
        for part in ("gate", "up", "down", "gate_up")
    ]
    return [PlannedTensor(name, kind, (kind.block_size,), lambda: [block]) for name in names]


def _ask_engine(metadata: Mapping[str, Value], typed: Sequence[PlannedTensor]) -> tuple[_Shape, ...]:
    """Ask the engine, in a process of its own: a failed assertion there must not end this one."""
    with tempfile.TemporaryDirectory(prefix="linkcpp-synth-") as folder:
        path = Path(folder) / "metadata.gguf"
        write_gguf(path, encode_entries(metadata), typed, alignment=DEFAULT_ALIGNMENT)
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
    return tuple(_Shape(str(name), tuple(int(length) for length in shape)) for name, _, shape in rows)


def _wanted(shapes: Sequence[_Shape], order: _Order) -> Iterator[_Shape]:
    """Leave out what real files of the architecture do not have: the engine names every optional tensor."""
    n_lead = order.dimensions.n_lead
    for shape in shapes:
        if order.recipe.either_ffn:
            experts, dense = _FFN_EXPERTS.match(shape.name), _FFN_DENSE.match(shape.name)
            if (experts and int(experts[1]) < n_lead) or (dense and int(dense[1]) >= n_lead):
                continue
        # of prediction layers the engine looks for scales only where it loads the layers, and counts what it skips
        scaled = order.scales and not (order.dimensions.n_predict and _block(shape.name) >= order.dimensions.n_layer)
        if not scaled and shape.name.endswith((".scale", ".input_scale")):
            continue
        if not order.fused and shape.name.endswith(_FUSED):
            row, width, *rest = shape.shape
            for half in ("gate", "up"):
                name = shape.name.replace("gate_up", half)
                yield _Shape(name, (row, width // 2, *rest))
            continue
        yield shape


def _block(name: str) -> int:
    found = _BLOCK.match(name)
    return int(found[1]) if found else -1


def _plan(shape: _Shape, order: _Order) -> PlannedTensor:
    kind = GgmlType.F32
    if order.model is not None:
        if EXPERT_WEIGHT.search(shape.name):
            kind = order.model.expert_type
        elif MATRIX_WEIGHT.search(shape.name):
            kind = order.model.matrix_type
    spread = spread_of(shape.name, shape.shape, order.dimensions.n_layer)

    def produce() -> Iterator[memoryview]:
        if kind in (GgmlType.F32, GgmlType.F16):
            return byte_pieces(order.seed, shape.name, shape.shape, spread, kind)
        return random_blocks(order.seed, shape.name, kind, shape.shape, spread.deviation)

    return PlannedTensor(shape.name, kind, shape.shape, produce)
