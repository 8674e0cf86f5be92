"""An in-memory twin of the engine's expert store, with experts that numpy can compute and tests can foretell."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from orchestrator.errors import ComputeError, InputError
from orchestrator.types import Contract, EngineIdentity, FloatArray, LayerDescriptor, Ownership

IDENTITY = EngineIdentity(build="b" * 64, isa="AVX2", repack=False)


def descriptor(
    layer: int = 0, call: int = 0, *, n_embd: int = 4, n_expert: int = 8, top_k: int = 2
) -> LayerDescriptor:
    return LayerDescriptor(
        layer=layer,
        call=call,
        architecture="llama",
        activation=0,
        n_embd=n_embd,
        n_ff=16,
        n_expert=n_expert,
        top_k=top_k,
        weight_before_ffn=False,
        clamp=0.0,
        situ_beta=0.0,
        situ_linear_beta=0.0,
        hyper_connections=0,
        tensors=(("up", f"blk.{layer}.ffn_up_exps.weight"),),
    )


def expert_row(row: FloatArray, expert: int, layer: int, call: int) -> FloatArray:
    """What the twin's expert makes of a row: a function of all four, so that a mix-up shows."""
    return (row * np.float32(expert + 1) + np.float32(100 * layer + 10 * call)).astype(np.float32)


class TwinCompute:
    """An ExpertCompute over numpy; ``on_compute`` is called within each computation (to wait, or to fail)."""

    def __init__(self, ownership: Ownership, on_compute: Callable[[], None] | None = None) -> None:
        self.ownership = ownership
        self.architecture = "llama"
        self.identity = IDENTITY
        self.bytes_read = 1234
        self.on_compute = on_compute
        self.descriptors: list[LayerDescriptor] = []
        self.inside = 0
        self.most_inside = 0
        self.calls = 0
        self._guard = threading.Lock()

    def layer(self, descriptor: LayerDescriptor) -> int:
        if descriptor.architecture != self.architecture:
            raise InputError(f"these are experts of {self.architecture}, not of {descriptor.architecture}")
        if not descriptor.tensors:
            raise ComputeError("tensor blk.0.ffn_up_exps.weight is missing")
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1

    def compute(self, handle, contract, rows, counts, experts, weights, out) -> None:
        with self._guard:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        try:
            if self.on_compute is not None:
                self.on_compute()
            made = self.descriptors[handle]
            pair = 0
            for index, count in enumerate(counts.tolist()):
                total = np.zeros(made.n_embd, np.float32)
                for _ in range(count):
                    value = expert_row(rows[index], int(experts[pair]), made.layer, made.call)
                    if contract is Contract.EXACT:
                        out[pair] = value
                    total += weights[pair] * value
                    pair += 1
                if contract is Contract.SUM:
                    out[index] = total
            self.calls += 1
        finally:
            with self._guard:
                self.inside -= 1
