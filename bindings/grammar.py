"""The engine's grammar sampler: which tokens a grammar allows next.

The engine ends the process when it must accept a token that its grammar forbids, so :meth:`GrammarHandle.accept`
asks first.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from bindings.handles import Handle, ModelHandle, NativeError
from bindings.library import forget_log, last_log_line, load

Allowed = npt.NDArray[np.bool_]

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class GrammarHandle(Handle):
    """``llama_sampler_init_grammar``: the state of one text in a GBNF grammar; holds its model alive.

    Raises :class:`NativeError` with the engine's words for a grammar that it does not take.
    """

    def __init__(self, model: ModelHandle, grammar: bytes, root: bytes = b"root") -> None:
        super().__init__(None)
        api, _ = load()
        self._model = model
        forget_log()
        self._sampler = api.llama_sampler_init_grammar(model.vocab, grammar, root)
        if not self._sampler:
            raise NativeError(last_log_line("the engine does not take this grammar"))
        self._address = ctypes.cast(self._sampler, ctypes.c_void_p).value
        self._all = np.zeros(int(api.llama_vocab_n_tokens(model.vocab)), _ENTRY)
        self._all["id"] = np.arange(len(self._all))
        self._one = np.zeros(1, _ENTRY)

    def _free(self, address: int) -> None:
        load()[0].llama_sampler_free(self._sampler)

    def allowed(self) -> Allowed:
        """Return for every token whether the text may go on with it, [n_vocab]; some 10 ms at 50,000 tokens."""
        return self._filter(self._all)

    def allows(self, token: int) -> bool:
        """Tell whether the text may go on with a token; a text that may end here allows the end tokens."""
        self._one["id"] = token
        return bool(self._filter(self._one)[0])

    def accept(self, token: int) -> None:
        """Go on with a token. Raises :class:`NativeError` for one that is not allowed."""
        if not self.allows(token):
            raise NativeError(f"the grammar does not allow token {token} here")
        load()[0].llama_sampler_accept(self._sampler, token)

    def _filter(self, entries: npt.NDArray[np.void]) -> Allowed:
        api, _ = load()
        if self._address is None:
            raise NativeError("GrammarHandle is closed")
        entries["logit"] = 0.0
        array = api.llama_token_data_array()
        array.data = ctypes.cast(entries.ctypes.data, ctypes.POINTER(api.llama_token_data))
        array.size = len(entries)
        array.selected = -1
        array.sorted = False
        api.llama_sampler_apply(self._sampler, ctypes.byref(array))
        kept: Allowed = entries["logit"] == 0.0
        return kept
