"""What the engine says about a model that exists only as metadata: its tensors; and the engine's quantisation.

``llama_model_init_from_user`` builds a model from hyperparameters alone and calls back once per tensor. The
names, types and shapes that it passes are all we take from it: upstream's own model saver refuses some
architectures, so the file itself is written elsewhere.

Run as a module (``python -m bindings.synth METADATA.gguf``) it prints the tensors as JSON lines. An impossible
set of hyperparameters ends the process inside the engine (``GGML_ASSERT``), so callers that take such sets
from people run it in a child process.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as _api

from bindings.errors import BindingsError

_LIBRARY_FOLDER = Path(_api.__file__).parent / "lib"
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS


class SynthBindingError(BindingsError):
    """The engine refused the metadata or the quantisation; the text is the engine's own last error line."""


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """One tensor that the engine asked for: ``kind`` is the ggml type, ``shape`` in ggml's order (fastest first)."""

    name: str
    kind: int
    shape: tuple[int, ...]


class _GgufInitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _TensorHead(ctypes.Structure):
    """The first fields of ``ggml_tensor``; all that is read here besides the name."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * _MAX_DIMENSIONS))


def _load_ggml() -> ctypes.CDLL:
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    prefix = "" if sys.platform == "win32" else "lib"
    library = ctypes.CDLL(str(_LIBRARY_FOLDER / f"{prefix}ggml-base.{suffix}"))
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GgufInitParams]
    library.gguf_free.restype = None
    library.gguf_free.argtypes = [ctypes.c_void_p]
    library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_get_name.argtypes = [ctypes.c_void_p]
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_blck_size.argtypes = [ctypes.c_int]
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    library.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


_ggml = _load_ggml()


class _ErrorLog:
    """Collect the engine's error lines while active; everything else it logs is dropped."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._callback = _api.llama_log_callback(self._receive)
        self._previous = _api.llama_log_callback()
        self._previous_data = ctypes.c_void_p()

    def _receive(self, level: int, text: bytes, _data: object) -> None:
        if level == _LOG_LEVEL_ERROR:
            self.lines.append(text.decode("utf-8", "replace").strip())

    def __enter__(self) -> _ErrorLog:
        _api.llama_log_get(ctypes.byref(self._previous), ctypes.byref(self._previous_data))
        _api.llama_log_set(self._callback, ctypes.c_void_p(0))
        return self

    def __exit__(self, *_: object) -> None:
        _api.llama_log_set(self._previous, self._previous_data)

    @property
    def reason(self) -> str:
        """The most telling line: the one that carries the exception's text, else the last."""
        telling = [line for line in self.lines if "error loading model" in line]
        return (telling or self.lines or ["the engine gave no reason"])[-1]


_LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR


def describe_tensors(metadata: Path) -> tuple[DescribedTensor, ...]:
    """List the tensors that the engine wants for a GGUF file of metadata, in the engine's order.

    Tensor infos in that file (there need be no data behind them) choose the types of tensors of the same name;
    all others come out as F32. Optional tensors are all included. A name appears once. Memory for the weights
    is reserved but never touched. Raises :class:`SynthBindingError` where the engine refuses; a failed
    assertion in the engine ends the process.
    """
    found: dict[str, DescribedTensor] = {}

    def collect(address: int, _data: object) -> None:
        head = _TensorHead.from_address(address)
        name: str = _ggml.ggml_get_name(address).decode("utf-8")
        shape = list(head.ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        found.setdefault(name, DescribedTensor(name, int(head.type), tuple(shape)))

    _api.llama_backend_init()
    with _ErrorLog() as log:
        gguf = _ggml.gguf_init_from_file(str(metadata).encode(), _GgufInitParams(True, None))
        if not gguf:
            raise SynthBindingError(f"{metadata.name}: {log.reason}")
        try:
            parameters = _api.llama_model_default_params()
            parameters.n_gpu_layers = 0
            parameters.load_mtp = True
            quiet = _api.llama_progress_callback(lambda _progress, _data: True)
            parameters.progress_callback = quiet
            callback = _api.llama_model_set_tensor_data_t(collect)
            model = _api.llama_model_init_from_user(gguf, callback, None, parameters)
            if not model:
                raise SynthBindingError(log.reason)
            _api.llama_model_free(model)
        finally:
            _ggml.gguf_free(gguf)
    return tuple(found.values())


def row_size(kind: int, n_elements: int) -> int:
    """Bytes of a row of ``n_elements`` of a ggml type; the row must be whole blocks."""
    block = int(_ggml.ggml_blck_size(kind))
    if block <= 0 or n_elements % block:
        raise SynthBindingError(f"rows of {n_elements} elements are not whole blocks of {block}")
    return int(_ggml.ggml_row_size(kind, n_elements))


def quantize_rows(
    rows: npt.NDArray[np.float32], kind: int, importance: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.uint8]:
    """Quantise F32 rows [n_rows, n_elements] to a ggml type; returns bytes [n_rows, bytes per row].

    ``importance`` is one positive weight per column, which IQ1 and most IQ2 types cannot do without. The same
    function is behind the engine's own quantising tool, so the bytes are those of a normal file.
    """
    n_rows, n_elements = rows.shape
    if importance is None and _ggml.ggml_quantize_requires_imatrix(kind):
        raise SynthBindingError(f"ggml type {kind} needs an importance matrix")
    source = np.ascontiguousarray(rows, dtype=np.float32)
    weights = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    out = np.empty((n_rows, row_size(kind, n_elements)), dtype=np.uint8)
    written = int(
        _ggml.ggml_quantize_chunk(
            kind,
            source.ctypes.data,
            out.ctypes.data,
            0,
            n_rows,
            n_elements,
            None if weights is None else weights.ctypes.data,
        )
    )
    if written != out.nbytes:
        raise SynthBindingError(f"quantising to ggml type {kind} wrote {written} bytes instead of {out.nbytes}")
    return out


def main(arguments: Sequence[str], write: Callable[[str], object] = sys.stdout.write) -> int:
    """Print the tensors of one metadata file as JSON lines; on refusal write the reason to stderr, return 1."""
    try:
        tensors = describe_tensors(Path(arguments[0]))
    except SynthBindingError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for tensor in tensors:
        write(json.dumps([tensor.name, tensor.kind, tensor.shape]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
