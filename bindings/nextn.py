"""``linkcpp-nextn.h``: a model's prediction layers (MTP), where the engine has them."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

import numpy as np

from bindings.handles import ContextHandle, ContextOptions, ModelHandle, NativeError
from bindings.library import REBUILD_HINT, EngineUnavailableError, Shim, load
from bindings.memory import FloatArray

_P: Final = ctypes.c_void_p
_FIXED: Final[dict[str, tuple[object, tuple[object, ...]]]] = {
    "linkcpp_nextn_length": (ctypes.c_int32, (_P,)),
    "linkcpp_nextn_keep": (None, (_P, ctypes.c_bool, ctypes.c_bool)),
    "linkcpp_nextn_rows": (ctypes.c_bool, (_P, _P, ctypes.c_int32)),
    "linkcpp_nextn_choose": (ctypes.c_bool, (_P, ctypes.c_int32)),
}
_DECODE: Final = "linkcpp_nextn_decode"  # which takes a struct of the engine's own Python layer

required_symbols: Final = (*_FIXED, _DECODE)
"""The functions that an engine built from these sources has beside those of :mod:`bindings.library`."""


@functools.cache
def nextn() -> Shim:
    """Return the functions; raise :class:`EngineUnavailableError` where this engine was built without them."""
    api, shim = load()
    signatures = {**_FIXED, _DECODE: (ctypes.c_int32, (_P, api.llama_batch, _P))}
    for name, (result, arguments) in signatures.items():
        function = getattr(api._lib, name, None)
        if function is None:
            raise EngineUnavailableError("the engine was built without prediction layers", hint=REBUILD_HINT)
        function.restype, function.argtypes = result, arguments
    return shim


def prediction_layers(model: ModelHandle) -> int:
    """Return how many prediction layers a model's metadata names."""
    return int(load()[0].llama_model_n_layer_nextn(model.address))


class HiddenRows:
    """The hidden rows of a context, kept at each decode from now on: of every token, or of those with logits."""

    def __init__(self, context: ContextHandle, *, wanted_only: bool = False) -> None:
        self._context = context
        self.length: int = nextn().linkcpp_nextn_length(context.address)
        nextn().linkcpp_nextn_keep(context.address, True, wanted_only)

    def drop(self) -> None:
        """Keep them no longer."""
        nextn().linkcpp_nextn_keep(self._context.address, False, False)

    def take(self, rows: int) -> FloatArray:
        """Copy those of the last decode, [rows, length], in the order of its batch."""
        found = np.empty((rows, self.length), np.float32)
        if not nextn().linkcpp_nextn_rows(self._context.address, found.ctypes.data, rows):
            raise NativeError("the engine kept no hidden rows")
        return found


class PredictionHandle(ContextHandle):
    """A context that computes prediction layers; its model was loaded for them (``only_behind``)."""

    def __init__(self, model: ModelHandle, options: ContextOptions) -> None:
        super().__init__(model, options, None)
        self.hidden = HiddenRows(self, wanted_only=True)

    def choose(self, layer: int) -> None:
        """Let the next decode compute this prediction layer, counted from 0."""
        if not nextn().linkcpp_nextn_choose(self.address, layer):
            raise NativeError(f"the model has no prediction layer {layer}")

    def decode_with(self, hidden: FloatArray) -> int:
        """Decode the batch of :meth:`fill` with a hidden row for each token; return the engine's status."""
        rows = np.ascontiguousarray(hidden, np.float32)
        if rows.shape != (self._batch.n_tokens, self.hidden.length):
            raise NativeError(f"{self._batch.n_tokens} tokens need as many rows of {self.hidden.length} values")
        return int(getattr(nextn(), _DECODE)(self.address, self._batch, rows.ctypes.data))
