"""Make a worker wrong on purpose, so that a gate can be seen to fail. Deterministic; never on by default."""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from orchestrator.types import Contract, EngineIdentity, FloatArray, LayerDescriptor, Ownership
from orchestrator.wire.messages import IdArray
from orchestrator.workers.expert import ExpertCompute

_LOW_BITS: Final = np.uint32(0xFF)
"""The lowest 8 of 23 mantissa bits: at most 3e-5 of the value, what a worn memory cell may do."""

_BLOCK: Final = 32
"""Values that share a scale, as in ggml's 4-bit types."""


class Injection(enum.Enum):
    """What becomes of the results of one owned expert (the first of each layer)."""

    BIT_FLIP = "bit-flip"  # the lowest mantissa bits are turned over
    WRONG_QUANT = "wrong-quant"  # rounded to 4 bits per value, as if the file had a coarser type
    ZEROS = "zeros"  # the expert answers nothing


class InjectedCompute:
    """An :class:`ExpertCompute` whose first expert of each layer is wrong."""

    def __init__(self, compute: ExpertCompute, kind: Injection) -> None:
        self._compute = compute
        self._kind = kind
        self._victims: dict[int, int] = {}

    @property
    def ownership(self) -> Ownership:
        """What is held."""
        return self._compute.ownership

    @property
    def architecture(self) -> str:
        """The architecture that the model file names."""
        return self._compute.architecture

    @property
    def identity(self) -> EngineIdentity:
        """The engine that computes: a liar states the honest one."""
        return self._compute.identity

    @property
    def bytes_read(self) -> int:
        """Bytes of expert weights taken from the file."""
        return self._compute.bytes_read

    def layer(self, descriptor: LayerDescriptor) -> int:
        """Prepare a layer and choose its wrong expert."""
        handle = self._compute.layer(descriptor)
        owned = self._compute.ownership.experts.get(descriptor.layer, ())
        self._victims[handle] = min(owned, default=-1)
        return handle

    def compute(
        self,
        handle: int,
        contract: Contract,
        rows: FloatArray,
        counts: IdArray,
        experts: IdArray,
        weights: FloatArray,
        out: FloatArray,
    ) -> None:
        """Compute as the real one does, then spoil the rows in which the wrong expert has a part."""
        wrong = experts == self._victims[handle]
        if self._kind is Injection.ZEROS and contract is Contract.SUM:
            weights = np.where(wrong, np.float32(0), weights)
        self._compute.compute(handle, contract, rows, counts, experts, weights, out)
        if contract is Contract.SUM:
            if self._kind is Injection.ZEROS:
                return
            owners = np.repeat(np.arange(len(rows)), counts)
            wrong = np.isin(np.arange(len(rows)), owners[wrong])
        if wrong.any():
            out[wrong] = _spoil(out[wrong], self._kind)


def _spoil(rows: FloatArray, kind: Injection) -> FloatArray:
    if kind is Injection.ZEROS:
        return np.zeros_like(rows)
    if kind is Injection.BIT_FLIP:
        return (rows.view(np.uint32) ^ _LOW_BITS).view(np.float32)
    length = rows.shape[1]
    padded = np.zeros((len(rows), -(-length // _BLOCK) * _BLOCK), dtype=np.float32)
    padded[:, :length] = rows
    blocks = padded.reshape(len(rows), -1, _BLOCK)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(7)
    rounded = np.round(blocks / np.where(scale == 0, np.float32(1), scale)) * scale
    return np.ascontiguousarray(rounded.reshape(len(rows), -1)[:, :length], dtype=np.float32)
