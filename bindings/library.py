"""The one file that names the C library: imports ``llama_cpp`` and declares the shim's functions.

Importing this module never fails for want of the engine; :func:`load` does, in words. The two switches of the
engine that exist only as environment variables are set here, before the first computation reads them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from types import ModuleType
from typing import Final, Protocol, cast

from bindings.errors import BindingsError

ABI: Final = 3
"""LINKCPP_ABI of ``shim/linkcpp.h`` that this layer mirrors."""

MAX_NAME: Final = 64
ROLE_COUNT: Final = 11

REBUILD_HINT: Final = "run: linkcpp engine build"


class EngineUnavailableError(BindingsError):
    """llama-cpp-python is missing, stock, or of another build than this layer."""


class LayerStruct(ctypes.Structure):
    """``struct linkcpp_layer``."""

    _fields_ = (
        ("layer", ctypes.c_int32),
        ("call", ctypes.c_int32),
        ("n_embd", ctypes.c_int32),
        ("n_ff", ctypes.c_int32),
        ("n_expert", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("weight_before_ffn", ctypes.c_int32),
        ("hyper_connections", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("clamp", ctypes.c_float),
        ("situ_beta", ctypes.c_float),
        ("situ_linear_beta", ctypes.c_float),
        ("architecture", ctypes.c_char * MAX_NAME),
        ("tensors", (ctypes.c_char * MAX_NAME) * ROLE_COUNT),
    )


class EventStruct(ctypes.Structure):
    """``struct linkcpp_event``; the pointers are addresses here, viewed without a copy."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("call", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("n_embd", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("rows", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class CutStruct(ctypes.Structure):
    """``struct linkcpp_cut``."""

    _fields_ = (
        ("cut", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("n_tensors", ctypes.c_int32),
        ("n_bytes", ctypes.c_int64),
        ("n_tokens", ctypes.c_int32),
    )


class HopSizesStruct(ctypes.Structure):
    """``struct linkcpp_hop_sizes``."""

    _fields_ = (
        ("first", ctypes.c_int32),
        ("last", ctypes.c_int32),
        ("is_end", ctypes.c_int32),
        ("n_vocab", ctypes.c_int32),
        ("n_sequences", ctypes.c_int32),
        ("n_batch", ctypes.c_int32),
    )


class HopResultStruct(ctypes.Structure):
    """``struct linkcpp_hop_result``."""

    _fields_ = (
        ("head", ctypes.c_void_p),
        ("body", ctypes.c_void_p),
        ("n_head", ctypes.c_uint64),
        ("n_body", ctypes.c_uint64),
        ("n_tokens", ctypes.c_int32),
        ("n_outputs", ctypes.c_int32),
        ("spent_us", ctypes.c_uint32),
        ("status", ctypes.c_int32),
    )


DISPATCH: Final = 1
COMBINE: Final = 2

Callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(EventStruct), ctypes.c_void_p)

_SIGNATURES: Final[dict[str, tuple[object, tuple[object, ...]]]] = {
    # upstream's own function, which its Python layer does not declare
    "llama_attach_threadpool": (None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
    "linkcpp_abi": (ctypes.c_int32, ()),
    "linkcpp_sizeof": (ctypes.c_size_t, (ctypes.c_char_p,)),
    "linkcpp_hook_new": (ctypes.c_void_p, (Callback, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)),
    "linkcpp_hook_free": (None, (ctypes.c_void_p,)),
    "linkcpp_hook_attach": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "linkcpp_hook_layers": (ctypes.c_int32, (ctypes.c_void_p, ctypes.POINTER(LayerStruct), ctypes.c_int32)),
    "linkcpp_hook_graph": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)),
    "linkcpp_hook_feed": (None, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)),
    "linkcpp_hook_fed": (ctypes.c_bool, (ctypes.c_void_p,)),
    "linkcpp_hook_left": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))),
    "linkcpp_hook_survey": (None, (ctypes.c_void_p,)),
    "linkcpp_hook_cuts": (ctypes.c_int32, (ctypes.c_void_p, ctypes.POINTER(CutStruct), ctypes.c_int32)),
    "linkcpp_catch_up": (None, (ctypes.c_void_p,)),
    "linkcpp_hop_new": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
    "linkcpp_hop_free": (None, (ctypes.c_void_p,)),
    "linkcpp_hop_step": (
        ctypes.c_int32,
        (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_void_p,
        ),
    ),
    "linkcpp_threadpool_new": (ctypes.c_void_p, (ctypes.c_int32, ctypes.c_uint32)),
    "linkcpp_threadpool_free": (None, (ctypes.c_void_p,)),
    "linkcpp_experts_new": (ctypes.c_void_p, (ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool)),
    "linkcpp_experts_free": (None, (ctypes.c_void_p,)),
    "linkcpp_experts_error": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "linkcpp_experts_load": (
        ctypes.c_int64,
        (
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.c_bool,
        ),
    ),
    "linkcpp_experts_layer": (ctypes.c_int32, (ctypes.c_void_p, ctypes.POINTER(LayerStruct))),
    "linkcpp_experts_compute": (
        ctypes.c_int32,
        (
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ),
    ),
}

required_symbols: Final = tuple(_SIGNATURES)
"""The functions that a patched engine exports and :func:`load` declares."""


class Shim(Protocol):
    """The functions of ``shim/linkcpp.h`` with their ctypes signatures set; see that header for each."""

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer: ...


_log_lines: list[str] = []


def _set_switches() -> None:
    # The tiled GEMM makes a row's result depend on how many rows share its expert (design: batch invariance).
    os.environ.setdefault("GGML_CPU_TILED_MM", "0")
    # Splitting one row's keys among threads makes its attention depend on their number (patches/0005).
    os.environ.setdefault("GGML_CPU_SPLIT_KV", "0")


def _receive_log(level: int, text: bytes, _data: object) -> None:
    if level >= 3:  # GGML_LOG_LEVEL_WARN = 3, ERROR = 4, CONT = 5
        _log_lines.append(text.decode("utf-8", "replace").strip())
        del _log_lines[:-40]


def last_log_line(default: str) -> str:
    """Return the engine's most recent warning or error line, or ``default``."""
    return next((line for line in reversed(_log_lines) if line), default)


def forget_log() -> None:
    """Drop collected log lines, so that :func:`last_log_line` speaks of what comes next."""
    _log_lines.clear()


def _import_api() -> ModuleType:
    try:
        from llama_cpp import llama_cpp as api
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
        raise EngineUnavailableError(f"the engine cannot be loaded: {error}", hint=REBUILD_HINT) from error
    return api


@functools.cache
def load() -> tuple[ModuleType, Shim]:
    """Return (llama_cpp's ctypes module, the shim); raise :class:`EngineUnavailableError` if there is none."""
    _set_switches()
    api = _import_api()
    library = api._lib
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise EngineUnavailableError(
                "llama-cpp-python is the stock one, without the expert hook", hint=REBUILD_HINT
            ) from None
        function.restype, function.argtypes = result, arguments
    if library.linkcpp_abi() != ABI:
        raise EngineUnavailableError(
            f"the engine's shim has ABI {library.linkcpp_abi()}, this linkcpp needs {ABI}", hint=REBUILD_HINT
        )
    api.llama_log_set(_log_callback(api), ctypes.c_void_p(0))
    api.llama_backend_init()
    return api, cast("Shim", library)


_callbacks: list[object] = []  # ctypes callbacks live as long as the library may call them


def _log_callback(api: ModuleType) -> object:
    callback = api.llama_log_callback(_receive_log)
    _callbacks.append(callback)
    return callback


def abi_check() -> list[str]:
    """Return what differs between the shim's structs and the ctypes layer, one line each; empty is good."""
    api, shim = load()
    sizes = {
        "layer": ctypes.sizeof(LayerStruct),
        "event": ctypes.sizeof(EventStruct),
        "cut": ctypes.sizeof(CutStruct),
        "hop_sizes": ctypes.sizeof(HopSizesStruct),
        "hop_result": ctypes.sizeof(HopResultStruct),
        "context_params": ctypes.sizeof(api.llama_context_params),
        "model_params": ctypes.sizeof(api.llama_model_params),
        "batch": ctypes.sizeof(api.llama_batch),
    }
    found = {name: int(shim.linkcpp_sizeof(name.encode())) for name in sizes}
    return [
        f"struct {name}: {found[name]} bytes in the engine, {size} in Python"
        for name, size in sizes.items()
        if found[name] != size
    ]


def system_info() -> str:
    """Return the engine's own line about the instruction sets in use."""
    api, _ = load()
    return str(api.llama_print_system_info().decode("utf-8", "replace"))
