"""The compute side of an expert worker: its own experts of a GGUF in memory, and rows through them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from bindings.experts import ExpertsHandle
from bindings.handles import NativeError
from orchestrator.engine.hook import struct_from_descriptor
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import require_engine
from orchestrator.errors import ComputeError, InputError
from orchestrator.models.gguf import GgufFile, expert_count
from orchestrator.types import Contract, EngineIdentity, FloatArray, LayerDescriptor, Ownership, format_ranges

IdArray = npt.NDArray[np.uint16]


class ExpertStore:
    """Holds the owned experts and computes them with the engine's own code; thread-safe, a context manager.

    ``mapped`` leaves the bytes in the page cache (several workers of one machine share them, and a model larger
    than memory works); otherwise exactly the owned bytes are read. Raises :class:`InputError` for experts that
    the file does not have.
    """

    def __init__(
        self,
        model_path: str | Path,
        ownership: Ownership | None = None,
        *,
        n_threads: int = 1,
        repack: bool = False,
        mmap: bool = False,
        progress: Callable[[float, float | None, str], None] | None = None,
    ) -> None:
        require_engine()
        self._file = GgufFile.open(model_path)
        self._file.require_moe()
        self.architecture = self._file.architecture
        self.ownership = ownership if ownership is not None else all_experts(self._file)
        check_ownership(self._file, self.ownership)
        self.identity: EngineIdentity = engine_identity(repack)
        self.bytes_read = 0
        self._handle = ExpertsHandle(n_threads=n_threads, repack=repack)
        try:
            self._load(mmap, progress)
        except NativeError as error:
            self.close()
            raise ComputeError(f"{model_path}: {error}") from error

    def _load(self, mmap: bool, progress: Callable[[float, float | None, str], None] | None) -> None:
        layers = self.ownership.layers
        for done, layer in enumerate(layers):
            if progress is not None:
                progress(done, len(layers), f"layer {layer}")
            for tensor in self._file.expert_tensors(layer):
                count = expert_count(tensor.name, tensor.shape)
                ids = [expert for expert in self.ownership.experts[layer] if expert < count]
                if not ids:
                    continue
                kept = {"weight": 3, "bias": 2, "scale": 1}[tensor.name.rpartition(".")[2]]
                shape = (*tensor.shape, 1, 1, 1)[:kept]
                self.bytes_read += self._handle.load(
                    tensor.name,
                    int(tensor.type),
                    shape,
                    ids,
                    str(self._file.files[tensor.file_index]),
                    tensor.offset,
                    mapped=mmap,
                )
        if progress is not None:
            progress(len(layers), len(layers), "ready")

    def close(self) -> None:
        """Free the experts."""
        self._handle.close()

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def layer(self, descriptor: LayerDescriptor) -> int:
        """Prepare one MoE call of a layer and return its handle; raise :class:`InputError` with the reason."""
        try:
            return self._handle.layer(struct_from_descriptor(descriptor))
        except (NativeError, ValueError) as error:
            raise InputError(str(error)) from error

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
        """Compute ``rows`` [R, n]: row r has ``counts[r]`` pairs, listed in ``experts`` and ``weights`` [P].

        Fills ``out``, [P, n] raw rows for ``exact`` or [R, n] weighted sums for ``sum``. The arrays must be
        C-contiguous. Raises :class:`ComputeError`; the store stays usable.
        """
        try:
            self._handle.compute(handle, rows, counts, experts, weights, out, partial_sums=contract is Contract.SUM)
        except NativeError as error:
            raise ComputeError(str(error)) from error


def all_experts(file: GgufFile) -> Ownership:
    """Own every expert of every MoE layer of a file."""
    return Ownership.product(file.moe_layers, range(file.n_expert))


def check_ownership(file: GgufFile, ownership: Ownership) -> None:
    """Raise :class:`InputError` unless the file has all of these layers and experts."""
    missing = [layer for layer in ownership.layers if not file.expert_tensors(layer)]
    if missing:
        held = [layer for layer in file.moe_layers if file.expert_tensors(layer)]
        raise InputError(
            f"{file.path} has no experts in layer {format_ranges(missing)}",
            hint=f"its MoE layers are {format_ranges(held)}" if held else "this file holds no experts at all",
        )
    highest = max((max(ids) for ids in ownership.experts.values() if ids), default=-1)
    if highest < 0:
        raise InputError("no expert is owned", hint="give --experts and --layers that name at least one")
    if highest >= file.n_expert:
        raise InputError(f"expert {highest} does not exist", hint=f"experts are 0 to {file.n_expert - 1}")
