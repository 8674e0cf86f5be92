"""``linkcpp-wire.h``: frames sent and received without Python, where the engine has them.

Native code takes only what is plain and leaves the rest to Python, so everything works without it, slower.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bindings.experts import ExpertsHandle
from bindings.library import REBUILD_HINT, Callback, EngineUnavailableError, EventStruct, Shim, load

_DONE, _YOURS, _COMPUTE, _LOST = range(4)  # linkcpp_wire_status

_BUFFER_BYTES: Final = 1 << 20  # a larger request goes through Python, where a few microseconds do not count
_OUT_FLOATS: Final = 1 << 20
_SEND_MS: Final = 30_000
_SAMPLES: Final = 8192


class WireLayerStruct(ctypes.Structure):
    """``struct linkcpp_wire_layer``."""

    _fields_ = (
        ("handle", ctypes.c_int32),
        ("n_embd", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("n_expert", ctypes.c_int32),
        ("owned", ctypes.c_void_p),
    )


class PeerStruct(ctypes.Structure):
    """``struct linkcpp_wire_peer``."""

    _fields_ = (
        ("experts", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
        ("n_layers", ctypes.c_int32),
        ("n_calls", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
        ("out_capacity", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("send_timeout_ms", ctypes.c_int32),
        ("sleeps", ctypes.c_int32),
        ("penalty", ctypes.c_int32),
        ("have", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("layer", ctypes.c_int32),
        ("call", ctypes.c_int32),
        ("partial_sums", ctypes.c_int32),
        ("n_rows", ctypes.c_int32),
        ("n_pairs", ctypes.c_int32),
        ("compute_us", ctypes.c_uint32),
        ("n_sent", ctypes.c_uint64),
    )


class SampleStruct(ctypes.Structure):
    """``struct linkcpp_star_sample``."""

    _fields_ = (("hook_us", ctypes.c_float), ("compute_us", ctypes.c_uint32), ("rows", ctypes.c_uint32))


class CountsStruct(ctypes.Structure):
    """``struct linkcpp_star_counts``."""

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("pairs", ctypes.c_uint64),
        ("bytes_out", ctypes.c_uint64),
        ("bytes_in", ctypes.c_uint64),
    )


class RestStruct(ctypes.Structure):
    """``struct linkcpp_star_rest``."""

    _fields_ = (
        ("problem", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("worker", ctypes.c_int32),
        ("n_done", ctypes.c_int32),
        ("sequence", ctypes.c_uint64),
        ("layer", ctypes.c_int32),
        ("call", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("n_embd", ctypes.c_int32),
        ("compute_us", ctypes.c_uint32),
        ("spent_us", ctypes.c_float),
        ("waited_us", ctypes.c_float),
        ("experts", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("received", ctypes.c_void_p),
        ("n_received", ctypes.c_uint64),
    )


_STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "layer": WireLayerStruct,
    "peer": PeerStruct,
    "sample": SampleStruct,
    "counts": CountsStruct,
    "rest": RestStruct,
}

_P: Final = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[object, tuple[object, ...]]]] = {
    "linkcpp_wire_sizeof": (ctypes.c_size_t, (ctypes.c_char_p,)),
    "linkcpp_crc32c": (ctypes.c_uint32, (_P, ctypes.c_size_t, ctypes.c_uint32)),
    "linkcpp_wire_await": (ctypes.c_int32, (_P,)),
    "linkcpp_wire_answer": (ctypes.c_int32, (_P,)),
    "linkcpp_star_new": (_P, (ctypes.c_int32, ctypes.c_bool)),
    "linkcpp_star_free": (None, (_P,)),
    "linkcpp_star_fallback": (None, (_P, Callback, _P)),
    "linkcpp_star_event": (ctypes.c_int32, (ctypes.POINTER(EventStruct), _P)),
    "linkcpp_star_route": (
        None,
        (_P, ctypes.c_bool, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32),
    ),
    "linkcpp_star_link": (None, (_P, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)),
    "linkcpp_star_give_way": (None, (_P, ctypes.c_int32)),
    "linkcpp_star_arm": (None, (_P, ctypes.c_int32, ctypes.c_int32)),
    "linkcpp_star_disarm": (None, (_P,)),
    "linkcpp_star_number": (ctypes.c_uint64, (_P, ctypes.c_bool)),
    "linkcpp_star_take": (ctypes.c_bool, (_P, ctypes.POINTER(RestStruct))),
    "linkcpp_star_counts_of": (None, (_P, ctypes.c_int32, ctypes.POINTER(CountsStruct))),
    "linkcpp_star_record": (None, (_P, ctypes.c_float, ctypes.c_uint32, ctypes.c_uint32)),
    "linkcpp_star_samples": (ctypes.c_uint64, (_P, ctypes.POINTER(SampleStruct), ctypes.c_int32)),
}


required_symbols: Final = tuple(_SIGNATURES)
"""The functions that an engine built from these sources has beside those of :mod:`bindings.library`."""


@functools.cache
def wire() -> Shim | None:
    """Return the functions, or None where this engine was built without them.

    Raises:
        EngineUnavailableError: a struct has another size in the engine.
    """
    api, shim = load()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(api._lib, name, None)
        if function is None:
            return None
        function.restype, function.argtypes = result, arguments
    for name, struct in _STRUCTS.items():
        size = shim.linkcpp_wire_sizeof(name.encode())
        if size != ctypes.sizeof(struct):
            raise EngineUnavailableError(
                f"struct {name} has {size} bytes in the engine, {ctypes.sizeof(struct)} in Python", hint=REBUILD_HINT
            )
    return shim


def _functions() -> Shim:
    shim = wire()
    if shim is None:
        raise EngineUnavailableError("the engine was built without the native wire", hint=REBUILD_HINT)
    return shim


def crc32c(data: bytes, before: int = 0) -> int:
    """Return the checksum as native code computes it."""
    return int(_functions().linkcpp_crc32c(data, len(data), before))


class PeerHandle:
    """One backbone's connection to a worker; used by the connection's thread alone.

    ``layers`` has one entry per (layer, call): handle, row length, top-k, and which experts are held.
    """

    def __init__(self, experts: ExpertsHandle, descriptor: int, minor: int) -> None:
        self._shim = _functions()
        self._experts = experts  # is to outlive this
        self._buffer = np.empty(_BUFFER_BYTES, np.uint8)
        self._out = np.empty(_OUT_FLOATS, np.float32)
        self._layers: Any = None
        self._masks: list[npt.NDArray[np.uint8]] = []
        self._peer = PeerStruct(
            experts=experts.address,
            buffer=self._buffer.ctypes.data,
            capacity=self._buffer.size,
            out=self._out.ctypes.data,
            out_capacity=self._out.size,
            fd=descriptor,
            minor=minor,
            send_timeout_ms=_SEND_MS,
        )
        self._address = ctypes.addressof(self._peer)

    def set_layers(self, layers: Iterable[tuple[int, int, int, int, int, npt.NDArray[np.bool_]]]) -> None:
        """Take the described calls: layer, call, handle, row length, top-k, and a mask over the experts."""
        entries = list(layers)
        n_layers = max((entry[0] for entry in entries), default=-1) + 1
        n_calls = max((entry[1] for entry in entries), default=-1) + 1
        table = (WireLayerStruct * max(n_layers * n_calls, 1))()
        for empty in table:
            empty.handle = -1
        self._masks = []
        for layer, call, handle, n_embd, top_k, owned in entries:
            mask = np.ascontiguousarray(owned, dtype=np.uint8)
            self._masks.append(mask)
            table[layer * n_calls + call] = WireLayerStruct(handle, n_embd, top_k, len(mask), mask.ctypes.data)
        self._layers = table
        self._peer.layers = ctypes.addressof(table)
        self._peer.n_layers, self._peer.n_calls = n_layers, n_calls

    def wait(self) -> bool:
        """Wait for a request; False where what came is for Python, which finds it in :attr:`received`."""
        return bool(self._shim.linkcpp_wire_await(self._address) == _DONE)

    def answer(self) -> bool | None:
        """Compute and send; False where the computation failed (nothing was sent), None where the peer is lost."""
        status = self._shim.linkcpp_wire_answer(self._address)
        return None if status == _LOST else bool(status == _DONE)

    @property
    def received(self) -> memoryview:
        """The bytes of the request, or what came instead; valid until the next wait."""
        return self._buffer[: self._peer.have].data

    @property
    def rows(self) -> int:
        """Rows of the request."""
        return int(self._peer.n_rows)

    @property
    def sent(self) -> int:
        """Bytes of the answer."""
        return int(self._peer.n_sent)


class StarHandle:
    """The backbone's end of all workers' connections. Freed with the last reference to it."""

    def __init__(self, n_workers: int, *, partial_sums: bool) -> None:
        self._shim = _functions()
        self.address: int = self._shim.linkcpp_star_new(n_workers, partial_sums)
        self._free = weakref.finalize(self, self._shim.linkcpp_star_free, self.address)
        self._fallback: object = None

    def hook(self, fallback: Any) -> Any:
        """Set the ctypes callback for what native code does not do; give the hook's own callback."""
        self._fallback = fallback  # C calls it for as long as the star lives
        self._shim.linkcpp_star_fallback(self.address, fallback, None)
        return ctypes.cast(self._shim.linkcpp_star_event, Callback)

    def number(self, *, advance: bool) -> int:
        """Take the next number of a request, or look at the last."""
        return int(self._shim.linkcpp_star_number(self.address, advance))

    def set_routes(self, routes: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Say which worker computes each expert, per (layer, call)."""
        first = True
        for layer, call, owners in routes:
            array = (ctypes.c_int32 * len(owners))(*owners)
            self._shim.linkcpp_star_route(self.address, first, layer, call, array, len(owners))
            first = False

    def set_link(self, worker: int, descriptor: int, minor: int) -> None:
        """Give a worker's socket and protocol version."""
        self._shim.linkcpp_star_link(self.address, worker, descriptor, minor)

    def give_way(self, every_ms: int) -> None:
        """Hand a call to Python at least so often."""
        self._shim.linkcpp_star_give_way(self.address, every_ms)

    def arm(self, timeout_ms: int, max_rows: int) -> None:
        """Take calls of up to so many rows from now on."""
        self._shim.linkcpp_star_arm(self.address, timeout_ms, max_rows)

    def disarm(self) -> None:
        """Take none, and forget the call that is under way."""
        self._shim.linkcpp_star_disarm(self.address)

    def take(self) -> RestStruct | None:
        """Give the call that was left unfinished, once; its pointers hold until the hook returns."""
        rest = RestStruct()
        return rest if self._shim.linkcpp_star_take(self.address, ctypes.byref(rest)) else None

    def counts(self, worker: int) -> tuple[int, int, int, int]:
        """Give rows, pairs, bytes out and bytes in."""
        counts = CountsStruct()
        self._shim.linkcpp_star_counts_of(self.address, worker, ctypes.byref(counts))
        return counts.rows, counts.pairs, counts.bytes_out, counts.bytes_in

    def record(self, hook_us: float, compute_us: int, rows: int) -> None:
        """Note a call that Python carried out."""
        self._shim.linkcpp_star_record(self.address, hook_us, compute_us, rows)

    def samples(self) -> tuple[int, npt.NDArray[Any]]:
        """Give the number of all calls, and the last ones as (hook_us, compute_us, rows), oldest first."""
        space = (SampleStruct * _SAMPLES)()
        count = int(self._shim.linkcpp_star_samples(self.address, space, _SAMPLES))
        return count, np.ctypeslib.as_array(space)[: min(count, _SAMPLES)]
