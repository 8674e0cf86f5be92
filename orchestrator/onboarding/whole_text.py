"""Ask a model that reads a whole text at once the way the gate asks all others: token by token.

Diffusion models and encoders let each token attend to later ones, so there is no cache to append to. What comes
after "decode one more token" is the answer to the longer text, computed from its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.engine.session import Session
from orchestrator.onboarding.trace import Decoder
from orchestrator.types import FloatArray


class WholeText:
    """A :class:`Decoder` that keeps the text and decodes all of it in each call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tokens: list[int] = []

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> FloatArray:
        """Append tokens; return the rows of the new tokens, or of the last, as the longer text has them."""
        text = [*self._tokens, *tokens]
        self._session.clear()
        rows = self._session.decode(text, all_logits=True)
        self._tokens = text
        return rows[-len(tokens) :] if all_logits else rows[-1:]

    def clear(self) -> None:
        """Forget the text."""
        self._tokens = []


def decoder_of(session: Session) -> Decoder:
    """Return what the gate should decode with: the session itself, unless its model reads the whole text."""
    return WholeText(session) if session.model.reads_whole_text else session
