"""The state of one answer in a grammar, by the engine's own grammar sampler."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from bindings.grammar import GrammarHandle
from bindings.handles import ModelHandle, NativeError
from bindings.library import load
from orchestrator.errors import InputError

_NO_TEXT = re.compile(rb"[\x00\xc0\xc1\xf5-\xff]")


class Grammar:
    """Which tokens an answer may go on with.

    A token that is no text is never allowed, except the model's end tokens and those in ``visible``, which the
    answer shows as text. The engine itself would take a control token for the text of its name.
    """

    def __init__(self, handle: GrammarHandle, forbidden: npt.NDArray[np.int64], visible: Collection[int]) -> None:
        self._handle = handle
        self._forbidden = np.setdiff1d(forbidden, np.fromiter(visible, dtype=np.int64, count=len(visible)))
        self._forbidden_set = frozenset(self._forbidden.tolist())

    def allows(self, token: int) -> bool:
        """Tell whether the answer may go on with a token; an end token may come where the text is complete."""
        return token not in self._forbidden_set and self._handle.allows(token)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token whether the answer may go on with it, [n_vocab]."""
        allowed = self._handle.allowed()
        allowed[self._forbidden] = False
        return allowed

    def accept(self, token: int) -> None:
        """Go on with a token, which must be an allowed one."""
        self._handle.accept(token)

    def close(self) -> None:
        """Free the state; harmless when called again."""
        self._handle.close()


class GrammarFactory:
    """Makes the states of a model's answers; looks once for the tokens that are no text."""

    def __init__(self, model: ModelHandle) -> None:
        self._model = model
        self._textless: npt.NDArray[np.int64] | None = None

    def __call__(self, text: str, visible: Collection[int]) -> Grammar:
        """Return the state at the beginning of an answer. Raises :class:`InputError` for an unusable grammar."""
        if self._textless is None:
            self._textless = _textless_tokens(self._model)
        try:
            handle = GrammarHandle(self._model, text.encode())
        except (NativeError, UnicodeEncodeError) as error:
            raise InputError(f"the engine does not take this grammar: {error}") from error
        return Grammar(handle, self._textless, visible)


def _textless_tokens(model: ModelHandle) -> npt.NDArray[np.int64]:
    """Return the tokens that stand for nothing, or for bytes that no UTF-8 text has, and do not end an answer."""
    api, _ = load()
    tokens = []
    for token in range(int(api.llama_vocab_n_tokens(model.vocab))):
        piece = model.piece(token, special=False)
        if (not piece or _NO_TEXT.search(piece)) and not api.llama_vocab_is_eog(model.vocab, token):
            tokens.append(token)
    return np.array(tokens, dtype=np.int64)
