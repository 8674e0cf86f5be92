"""The compute side of an expert worker: its own experts of a GGUF in memory, and rows through them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from bindings.experts import ExpertsHandle
from bindings.handles import NativeError
from orchestrator.engine.hook import struct_from_descriptor
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import require_engine
from orchestrator.engine.native import NativePeer, is_available
from orchestrator.errors import ComputeError, InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_header import TensorInfo
from orchestrator.models.gguf_manifest import expert_count, expert_dimension
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
                whole = self._file.manifest[tensor.name].shape  # a slice holds fewer experts; their numbers stay
                count = expert_count(tensor.name, whole)
                ids = [expert for expert in self.ownership.experts[layer] if expert < count]
                if not ids:
                    continue
                if mmap and len(self._file.stacked(tensor)) < count:
                    raise InputError(
                        f"{self._file.path} holds a part of the experts of layer {layer} and cannot be mapped",
                        hint="leave out --mmap: a slice is read into memory",
                    )
                with _laid_out(self._file, tensor, ids, count) as (path, offset):
                    self.bytes_read += self._handle.load(
                        tensor.name,
                        int(tensor.type),
                        whole[: expert_dimension(tensor.name) + 1],
                        ids,
                        path,
                        offset,
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

    def native_peer(self, descriptor: int, minor: int) -> NativePeer | None:
        """Serve the plain requests of a connected socket without Python; None where this engine cannot."""
        return NativePeer(self._handle, descriptor, minor) if is_available() else None

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


@contextmanager
def _laid_out(file: GgufFile, tensor: TensorInfo, ids: Sequence[int], count: int) -> Iterator[tuple[str, int]]:
    """Give a file and an offset at which expert ``id`` lies ``id`` times its size further on.

    So it is in a whole model, and in a slice whose experts are one run: then the offset may be negative, modulo
    2^64. Several runs of a slice are copied to their places in a file without extents between them, in memory.
    """
    _, _, size = file.expert_range(tensor, ids[0])
    origins = {file.expert_range(tensor, expert)[1] - expert * size for expert in ids}
    source = file.files[tensor.file_index]
    if len(origins) == 1:
        yield str(source), origins.pop() % (1 << 64)
        return
    try:
        target = os.memfd_create("experts")
        try:
            os.ftruncate(target, count * size)
            with source.open("rb") as from_file, open(target, "wb", closefd=False) as to_file:
                for expert in ids:
                    from_file.seek(file.expert_range(tensor, expert)[1])
                    to_file.seek(expert * size)
                    to_file.write(from_file.read(size))
            yield f"/proc/self/fd/{target}", 0
        finally:
            os.close(target)
    except (OSError, AttributeError) as error:
        raise InputError(f"cannot gather the experts of {tensor.name} from {source}: {error}") from error


def all_experts(file: GgufFile) -> Ownership:
    """Own every expert that a file holds: all of a whole model, its share of a slice."""
    return Ownership(file.shares)


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
    for layer, ids in ownership.experts.items():
        absent = set(ids).difference(file.held_experts(layer))
        if absent:
            raise InputError(
                f"{file.path} is a slice without experts {format_ranges(absent)} of layer {layer}",
                hint=f"it holds experts {format_ranges(file.held_experts(layer))} of this layer",
            )
