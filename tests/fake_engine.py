"""The in-memory twin of the engine: a byte vocabulary and logits that are a function of every token in the KV cache.

Because the logits depend on all of the cache, a wrong position, a wrong truncation or a token decoded twice changes
the text, so tests against this twin notice them.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from grammar_twin import GrammarTwin

from orchestrator.errors import ComputeError, LinkcppError

SPECIAL = {256: b"<s>", 257: b"</s>", 258: b"<|im_start|>", 259: b"<|im_end|>"}
WORDS = {260: b" the", 261: b"STO", 262: b"P here", 263: "ä".encode()[:1], 264: "ä".encode()[1:], 265: "é😀".encode()}
N_VOCAB = 300
BOS, EOS, END_OF_TURN = 256, 257, 259

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Script = Callable[[Sequence[int]], int | None]


class FakeModel:
    """A model whose tokens are bytes, a few words and half characters."""

    def __init__(self, chat_template: str | None = TEMPLATE, *, is_hybrid: bool = False) -> None:
        self.path = "/models/fake.gguf"
        self.chat_template = chat_template
        self.is_hybrid = is_hybrid
        self.n_vocab = N_VOCAB
        self.n_ctx_train = 4096
        self.bos, self.eos = BOS, EOS
        self.architecture = "fake"
        self.metadata: Mapping[str, str] = {}

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        tokens = [BOS] if add_special else []
        data = text.encode()
        while data:
            special = (
                next((t for t, piece in SPECIAL.items() if data.startswith(piece)), None) if parse_special else None
            )
            tokens.append(data[0] if special is None else special)
            data = data[1 if special is None else len(SPECIAL[special]) :]
        return tokens

    def piece(self, token: int, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        if token in SPECIAL:
            return SPECIAL[token] if special else b""
        return WORDS.get(token, b"")

    def is_end_of_generation(self, token: int) -> bool:
        return token in (EOS, END_OF_TURN)

    def constrain(self, grammar: str, visible: Collection[int] = ()) -> GrammarTwin:
        pieces = [self.piece(token, special=token in visible) for token in range(N_VOCAB)]
        return GrammarTwin(grammar, pieces, {EOS, END_OF_TURN})

    def close(self) -> None:
        pass


def answer(tokens: Sequence[int]) -> Script:
    """Answer every chat turn with these tokens, then end the turn."""
    marker = [258, *b"assistant\n"]

    def script(held: Sequence[int]) -> int | None:
        held = list(held)
        for start in range(len(held) - len(marker), -1, -1):
            if held[start : start + len(marker)] == marker:
                index = len(held) - start - len(marker)
                return tokens[index] if index < len(tokens) else END_OF_TURN
        return None

    return script


class FakeSession:
    """A session that remembers its tokens; ``before_decode`` may raise or wait to imitate a worker's failure."""

    def __init__(
        self,
        *,
        n_ctx: int = 512,
        script: Script = lambda held: None,
        step_seconds: float = 0.0,
        can_truncate: bool = True,
    ) -> None:
        self.n_ctx = n_ctx
        self.held: list[int] = []
        self.calls: list[int] = []  # number of tokens of each call
        self.before_decode: Callable[[Sequence[int]], None] = lambda tokens: None
        self._script = script
        self._step_seconds = step_seconds
        self._can_truncate = can_truncate

    @property
    def position(self) -> int:
        return len(self.held)

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> np.ndarray:
        assert tokens
        self.before_decode(tokens)
        time.sleep(self._step_seconds)
        if self.position + len(tokens) > self.n_ctx:
            raise ComputeError("the context is full")
        self.calls.append(len(tokens))
        self.held.extend(tokens)
        return self.logits()[np.newaxis]

    def logits(self) -> np.ndarray:
        key = zlib.crc32(np.array(self.held, dtype=np.int32).tobytes())
        logits = _noise(key).copy()
        wanted = self._script(self.held)
        if wanted is not None:
            logits[wanted] += 50
        return logits

    def truncate(self, position: int) -> bool:
        assert 0 <= position <= self.position
        if self._can_truncate:
            del self.held[position:]
        return self._can_truncate

    def clear(self) -> None:
        self.held.clear()

    def close(self) -> None:
        pass


@functools.lru_cache(8192)
def _noise(key: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=key)).normal(size=N_VOCAB).astype(np.float32)


class FailOnce:
    """Raise an error at one call of decode, the ``at``-th from now on."""

    def __init__(self, error: LinkcppError, at: int) -> None:
        self._error, self._left = error, at

    def __call__(self, tokens: Sequence[int]) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error
