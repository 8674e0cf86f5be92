"""Make a Mixture-of-Experts model out of a dense one without training: the same function, routed.

Each feed-forward network is cut along its neurons into ``shards``; each shard becomes ``copies`` equal experts,
and a token uses ``shards`` of the ``shards * copies`` experts. The router's rows are equal for all experts of one
copy and random between copies ("virtual groups" of sparse upcycling, NVIDIA 2024): all experts of a copy tie, so
the top-k takes exactly one copy of every shard, which copy depending on the token. Softmax and renormalisation
then give each of them the weight 1 / shards (exactly, because they tie), which the down projection's scale
undoes: it is multiplied by ``shards``, a power of two, exact in every floating-point format. Weights are moved in
whole quantisation blocks and never quantised again.

Which expert is which shard of which copy is a random order of its own in every layer: a worker that holds a
range of experts then gets, like with a trained model, more rows for some tokens than for others.

Randomness comes from SHAKE-256, so the file is the same on every machine and with every numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.errors import InputError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf import SPLIT_PREFIX, GgufFile, raw_entries
from orchestrator.models.gguf_header import TensorInfo
from orchestrator.models.gguf_writer import (
    PlannedTensor,
    Progress,
    entry_string,
    entry_uint32,
    file_bytes,
    write_gguf,
)

Bytes = npt.NDArray[np.uint8]

ARCHITECTURES: Final = ("llama",)
"""Architectures whose MoE form has the same name, and SiLU experts behind a renormalised softmax (upstream)."""

SCALE_PLACES: Final[Mapping[GgmlType, tuple[int, ...]]] = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
    GgmlType.IQ4_NL: (0,),
    GgmlType.IQ4_XS: (0,),
    GgmlType.IQ3_S: (0,),
    GgmlType.IQ3_XXS: (0,),
    GgmlType.IQ2_S: (0,),
    GgmlType.IQ2_XS: (0,),
    GgmlType.IQ2_XXS: (0,),
    GgmlType.IQ1_S: (0,),
    GgmlType.TQ1_0: (52,),
    GgmlType.TQ2_0: (64,),
}
"""Where a block keeps the F16 factors (scale, and minimum where there is one) that all of its values share."""

_PLAIN: Final = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
_MAX_EXPERTS: Final = 1024
_ROLES: Final = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class UpcyclePlan:
    """How a dense model becomes experts: all sizes count neurons."""

    shards: int
    copies: int
    seed: int
    n_layer: int
    n_embd: int
    n_ff: int

    @property
    def n_expert(self) -> int:
        """Experts per layer."""
        return self.shards * self.copies

    @property
    def shard_neurons(self) -> int:
        """Neurons of one expert."""
        return self.n_ff // self.shards

    def order(self, layer: int) -> tuple[int, ...]:
        """Return, for each expert of a layer, its place ``copy * shards + shard`` in the unshuffled order."""
        keys = _random_words(f"order {self.seed} {layer}", self.n_expert)
        return tuple(int(index) for index in np.argsort(keys, kind="stable"))

    def router(self, layer: int) -> npt.NDArray[np.float32]:
        """Return the router's rows [n_expert, n_embd]: equal within a copy, random between copies."""
        words = _random_words(f"router {self.seed} {layer}", self.copies * self.n_embd)
        uniform = words.astype(np.float64) / 2.0**31 - 1.0
        rows = (uniform.reshape(self.copies, self.n_embd) / np.sqrt(self.n_embd)).astype(np.float32)
        return np.ascontiguousarray(rows[[place // self.shards for place in self.order(layer)]])


def upcycle(
    source: str | Path,
    destination: str | Path,
    shards: int = 8,
    copies: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Write the Mixture-of-Experts form of a dense, llama-like GGUF; return the file's bytes.

    Raise :class:`InputError` for a model or numbers with which the result would not be exactly the dense function.
    """
    model = GgufFile.open(source)
    plan = plan_upcycle(model, shards, copies, seed)
    destination = Path(destination)
    if destination.is_dir():
        raise InputError(f"{destination} is a folder", hint="name the file to write")
    if destination.exists() and any(destination.samefile(path) for path in model.files):
        raise InputError(f"{destination} is the dense model itself: the result needs another name")
    architecture = model.architecture
    changed = [
        entry_string("general.name", f"{model.name}, {plan.n_expert} experts of {plan.shard_neurons} neurons"),
        entry_uint32(f"{architecture}.feed_forward_length", plan.shard_neurons),
        entry_uint32(f"{architecture}.expert_count", plan.n_expert),
        entry_uint32(f"{architecture}.expert_used_count", plan.shards),
        entry_uint32("linkcpp.upcycle.shards", shards),
        entry_uint32("linkcpp.upcycle.copies", copies),
        entry_string("linkcpp.upcycle.seed", str(seed)),
        entry_string("linkcpp.upcycle.source_header_sha256", model.header_sha256),
    ]
    replaced = (
        "general.name",
        f"{architecture}.feed_forward_length",
        f"{architecture}.expert_count",
        f"{architecture}.expert_used_count",
    )
    entries = [*raw_entries(model.headers[0], without=(SPLIT_PREFIX, *replaced)), *changed]
    tensors = [planned for info in model.tensors.values() for planned in _converted(model, plan, info)]
    return write_gguf(destination, entries, tensors, alignment=model.headers[0].alignment, progress=progress)


def plan_upcycle(model: GgufFile, shards: int, copies: int, seed: int) -> UpcyclePlan:
    """Check that a model can be cut this way; raise :class:`InputError` with the reason otherwise."""
    where = f"{model.path} cannot be upcycled"
    if model.is_moe or model.n_expert:
        raise InputError(f"{where}: it has experts already")
    if model.is_slice:
        raise InputError(f"{where}: it is a slice without all of its tensors")
    if model.architecture not in ARCHITECTURES:
        raise InputError(
            f"{where}: its architecture {model.architecture!r} is not {' or '.join(ARCHITECTURES)}",
            hint="only llama-like dense models have a MoE form of the same function",
        )
    if shards < 1 or shards & (shards - 1):
        raise InputError(f"{shards} shards: it must be a power of two, so that scaling by it is exact")
    if copies < 1 or shards * copies > _MAX_EXPERTS or shards * copies < 2:
        raise InputError(f"{shards} shards x {copies} copies: 2 to {_MAX_EXPERTS} experts are possible")
    plan = UpcyclePlan(
        shards,
        copies,
        seed,
        model.n_layer,
        model.number("embedding_length", 0),
        model.number("feed_forward_length", 0),
    )
    if plan.n_ff <= 0 or plan.n_ff % shards:
        raise InputError(f"{where}: {plan.n_ff} neurons cannot be cut into {shards} equal shards")
    for layer in range(plan.n_layer):
        for role in _ROLES:
            _check_tensor(model, plan, f"blk.{layer}.ffn_{role}.weight", where)
    for name in model.tensors:
        if name.startswith("blk.") and ".ffn_" in name and name.split(".", 2)[2] not in _KNOWN:
            raise InputError(f"{where}: the tensor {name} has no counterpart in the MoE form")
    return plan


_KNOWN: Final = ("ffn_norm.weight", *(f"ffn_{role}.weight" for role in _ROLES))


def _check_tensor(model: GgufFile, plan: UpcyclePlan, name: str, where: str) -> None:
    info = model.tensors.get(name)
    if info is None:
        raise InputError(f"{where}: it has no {name}")
    down = ".ffn_down." in name
    expected = (plan.n_ff, plan.n_embd) if down else (plan.n_embd, plan.n_ff)
    if info.shape != expected:
        raise InputError(f"{where}: {name} is {list(info.shape)} instead of {list(expected)}")
    if not down:
        return
    if info.type not in _PLAIN and info.type not in SCALE_PLACES:
        raise InputError(f"{where}: the scale of {info.type.name} blocks ({name}) cannot be multiplied exactly")
    if plan.shard_neurons % info.type.block_size:
        raise InputError(
            f"{where}: shards of {plan.shard_neurons} neurons would cut {info.type.name}'s blocks "
            f"of {info.type.block_size} ({name})",
            hint=f"use at most {plan.n_ff // info.type.block_size} shards that divide {plan.n_ff}",
        )


def _converted(model: GgufFile, plan: UpcyclePlan, info: TensorInfo) -> Iterator[PlannedTensor]:
    """Yield what one tensor of the dense model becomes: itself, or experts (and the router, before the gate's)."""
    path = model.files[info.file_index]
    parts = info.name.split(".")
    role = parts[2].removeprefix("ffn_") if parts[0] == "blk" and len(parts) == 4 else ""
    if role not in _ROLES:
        yield PlannedTensor(info.name, info.type, info.shape, partial(file_bytes, path, info))
        return
    layer = int(parts[1])
    if role == "gate":
        shape = (plan.n_embd, plan.n_expert)
        yield PlannedTensor(
            f"blk.{layer}.ffn_gate_inp.weight", GgmlType.F32, shape, lambda: [plan.router(layer).tobytes()]
        )
    shape3 = (
        (plan.shard_neurons, plan.n_embd, plan.n_expert)
        if role == "down"
        else (plan.n_embd, plan.shard_neurons, plan.n_expert)
    )
    yield PlannedTensor(
        f"blk.{layer}.ffn_{role}_exps.weight",
        info.type,
        shape3,
        partial(_experts, path, info, plan, plan.order(layer), role == "down"),
    )


def _experts(
    path: Path, info: TensorInfo, plan: UpcyclePlan, order: Sequence[int], down: bool
) -> Iterable[bytes | memoryview]:
    """Yield the experts of one tensor one after the other."""
    data = np.frombuffer(b"".join(file_bytes(path, info)), np.uint8)
    row_bytes = info.type.bytes_of(info.shape[0])
    rows: npt.NDArray[np.uint8] = data.reshape(info.shape[1], row_bytes)
    if down:
        rows = multiply_scales(rows, info.type, plan.shards, info.name)
    for place in order:
        shard = place % plan.shards
        if down:  # a shard is a range of columns: whole blocks of every row
            width = row_bytes // plan.shards
            yield np.ascontiguousarray(rows[:, shard * width : (shard + 1) * width]).tobytes()
        else:  # a shard is a range of rows
            yield rows[shard * plan.shard_neurons : (shard + 1) * plan.shard_neurons].tobytes()


def multiply_scales(rows: Bytes, kind: GgmlType, factor: int, name: str) -> Bytes:
    """Return rows of blocks whose values are exactly ``factor`` (a power of two) times as large.

    Raise :class:`InputError` where a scale would leave the range of its format.
    """
    result = rows.copy()
    blocks = result.reshape(-1, kind.block_bytes)
    if kind is GgmlType.BF16:
        values = (blocks.view("<u2").astype(np.uint32) << 16).view("<f4")
        scaled = _product(values, factor, name)
        blocks.view("<u2")[:] = (scaled.view(np.uint32) >> 16).astype(np.uint16)
        return result
    if kind in _PLAIN:
        plain = result.view("<f4" if kind is GgmlType.F32 else "<f2")
        plain[:] = _product(plain, factor, name)
        return result
    for place in SCALE_PLACES[kind]:
        field = blocks[:, place : place + 2].copy().view("<f2")
        blocks[:, place : place + 2] = _product(field, factor, name).view(np.uint8)
    return result


def _product(values: npt.NDArray[np.floating], factor: int, name: str) -> npt.NDArray[np.floating]:
    with np.errstate(over="ignore"):
        product = values * values.dtype.type(factor)
    if not np.isfinite(product).all():
        raise InputError(
            f"{name}: a scale times {factor} is beyond the range of {values.dtype.name}: use fewer shards"
        )
    return product


def _random_words(label: str, count: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(hashlib.shake_256(f"linkcpp upcycle {label}".encode()).digest(4 * count), "<u4")
