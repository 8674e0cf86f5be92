"""One row of the catalogue: a model's name, source, shape and file, read strictly from TOML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.config import models_dir
from orchestrator.errors import ConfigError, InputError
from orchestrator.models.footprint import Attention, ModelShape, declared_expert_bytes
from orchestrator.types import Contract

_HASH: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHAPE_NUMBERS: Final = ("n_embd", "n_layer", "n_expert", "top_k", "n_ff_exp", "n_vocab", "n_ctx_train")
_SHAPE_OPTIONS: Final = ("n_lead", "n_shared", "n_ff_shared", "n_ff_dense", "n_mtp", "n_latent")
_ROW: Final = {"title", "license", "file", "size", "sha256", "source", "shape", "quant", "parameters", "contract"}
_ATTENTION: Final = ("layers", "kv_heads", "head", "latent", "window")


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A GGUF that a wheel on the Python package index carries; ``size`` and ``sha256`` are the wheel's."""

    package: str
    version: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True, slots=True)
class UpcycleSource:
    """A MoE model made from another row's dense one."""

    base: str
    shards: int
    copies: int
    seed: int


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a Hugging Face repository; ``file`` may be a pattern."""

    repository: str
    file: str
    revision: str | None = None


Source = PackageSource | UpcycleSource | HubSource


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of the catalogue; ``file`` is its name in the data folder, ``size`` its bytes (0: not known).

    ``quant`` is what its experts are said to be while there is no file, ``parameters`` its published total,
    ``contract`` what a worker may return for it unless somebody asks for another.
    """

    name: str
    title: str
    license: str  # empty where it is not recorded
    file: str
    size: int
    sha256: str  # empty where it is not known
    source: Source | None
    gate: Mapping[str, object]
    shape: ModelShape | None = None
    quant: str = ""
    parameters: float = 0.0
    contract: Contract = Contract.EXACT

    @property
    def path(self) -> Path:
        """Where the file is, or will be once it was got."""
        return models_dir() / self.file

    @property
    def is_present(self) -> bool:
        """Tell whether the file is there with the right size; its hash was checked when it was got."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return False
        return self.size in {0, size}


def read_row(path: Path, name: str, table: object, gate: Mapping[str, object]) -> ModelRow:
    """Read ``[models.NAME]``; raise :class:`ConfigError` naming the key that is wrong."""
    reader = _Reader(f"{path}: models.{name}", table)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: {name!r} cannot be a model's name")
    for key in reader.table:
        if key not in _ROW:
            raise ConfigError(f"{reader.place}.{key} is no part of a row")
    file = reader.text("file", f"{name}.gguf")
    if not _NAME.fullmatch(file):
        raise ConfigError(f"{reader.place}.file: {file!r} is not a plain file name")
    source = _source(reader)
    made = isinstance(source, PackageSource | UpcycleSource)
    shape = _shape(reader)
    quant = reader.text("quant", "") if shape is not None else ""
    parameters = reader.table.get("parameters", 0.0)
    if not isinstance(parameters, int | float) or isinstance(parameters, bool) or parameters < 0:
        raise ConfigError(f"{reader.place}.parameters must be a number of billions")
    if shape is not None:
        try:
            declared_expert_bytes(shape, quant)
        except InputError as error:
            raise ConfigError(f"{reader.place}.quant: {error}") from error
    contract = reader.text("contract", Contract.EXACT.value)
    if contract not in {member.value for member in Contract}:
        raise ConfigError(f"{reader.place}.contract: {contract!r} is no contract")
    return ModelRow(
        name,
        reader.text("title"),
        reader.text("license", None if made else ""),
        file,
        reader.number("size", None if made else 0),
        reader.hash() if made or "sha256" in reader.table else "",
        source,
        gate,
        shape,
        quant,
        float(parameters),
        Contract(contract),
    )


def _source(reader: _Reader) -> Source | None:
    if "source" not in reader.table:
        return None
    source = _Reader(f"{reader.place}.source", reader.table["source"])
    kind = source.text("kind")
    if kind == "pypi":
        return PackageSource(
            source.text("package"),
            source.text("version"),
            source.hash(),
            source.number("size"),
            source.text("member"),
        )
    if kind == "upcycle":
        return UpcycleSource(
            source.text("base"), source.number("shards"), source.number("copies"), source.number("seed")
        )
    if kind == "huggingface":
        return HubSource(source.text("repository"), source.text("file"), source.text("revision", "") or None)
    raise ConfigError(f"{source.place}.kind: {kind!r} is none of pypi, upcycle, huggingface")


def _shape(reader: _Reader) -> ModelShape | None:
    if "shape" not in reader.table:
        return None
    shape = _Reader(f"{reader.place}.shape", reader.table["shape"])
    numbers = {key: shape.number(key) for key in _SHAPE_NUMBERS}
    options = {key: shape.number(key, 0) for key in _SHAPE_OPTIONS}
    groups = shape.table.get("attention", [])
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise ConfigError(f"{shape.place}.attention must be a list of tables")
    attention = []
    for group in groups:
        row = _Reader(f"{shape.place}.attention", group)
        layers, kv_heads, head, latent, window = (
            row.number(key, None if key == "layers" else 0) for key in _ATTENTION
        )
        if not layers or not (latent or kv_heads * head):
            raise ConfigError(f"{row.place} keeps nothing: give latent, or kv_heads and head")
        attention.append(Attention(layers, kv_heads, head, latent, window))
    known = {*_SHAPE_NUMBERS, *_SHAPE_OPTIONS, "architecture", "moe_every", "expert_bias", "has_more_state"}
    for key in shape.table:
        if key not in known | {"attention"}:
            raise ConfigError(f"{shape.place}.{key} is no part of a shape")
    read = ModelShape(
        architecture=shape.text("architecture"),
        **numbers,
        **options,
        moe_every=shape.number("moe_every", 1),
        expert_bias=shape.flag("expert_bias"),
        attention=tuple(attention),
        has_more_state=shape.flag("has_more_state"),
    )
    if 0 in numbers.values() or not read.moe_every or not read.moe_layers:
        raise ConfigError(f"{shape.place} has a zero where there is none, or no layer with experts")
    return read


class _Reader:
    """A table whose values must have the right type; errors name the place. A default allows a key to be missing."""

    __slots__ = ("place", "table")

    def __init__(self, place: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{place} is no table")
        self.place = place
        self.table = table

    def text(self, key: str, default: str | None = None) -> str:
        value = self.table.get(key, default)
        if not isinstance(value, str) or (not value and key in self.table):
            raise ConfigError(f"{self.place}.{key} must be a text")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.table.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{self.place}.{key} must be a whole number")
        return value

    def flag(self, key: str) -> bool:
        value = self.table.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.place}.{key} must be true or false")
        return value

    def hash(self) -> str:
        value = self.text("sha256")
        if not _HASH.fullmatch(value):
            raise ConfigError(f"{self.place}.sha256 must be 64 hex digits")
        return value
