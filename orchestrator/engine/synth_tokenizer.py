"""A tiny real tokenizer for synthetic models: it encodes and decodes any text, byte by byte where it must."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from orchestrator.errors import InputError
from orchestrator.models.architectures import Value

_SPECIAL: Final = ("<unk>", "<s>", "</s>")
_PIECES: Final = (
    "\u2581",
    *"etaoinshrdlcumwfgypbvk",
    "\u2581the",
    "\u2581and",
    "ing",
    "er",
    "in",
    "on",
    "th",
    "he",
    "\n",
)
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6  # llama_token_type
MINIMUM_VOCABULARY: Final = len(_SPECIAL) + 256


def tokenizer_keys(n_vocab: int) -> Mapping[str, Value]:
    """Make the metadata of a SentencePiece-like vocabulary with byte fallback; at least 259 tokens."""
    if n_vocab < MINIMUM_VOCABULARY:
        raise InputError(f"a vocabulary of {n_vocab} tokens is too small", hint=f"use {MINIMUM_VOCABULARY} or more")
    room = n_vocab - MINIMUM_VOCABULARY
    pieces = _PIECES[:room]
    filler = tuple(f"<unused{index}>" for index in range(room - len(pieces)))
    tokens = (*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *filler)
    kinds = (_UNKNOWN, _CONTROL, _CONTROL, *([_BYTE] * 256), *([_NORMAL] * len(pieces)), *([_UNUSED] * len(filler)))
    scores = (*([0.0] * MINIMUM_VOCABULARY), *(float(len(piece)) for piece in pieces), *([0.0] * len(filler)))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
