"""Encode hyperparameters and a tiny tokenizer as the entries of a GGUF."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from orchestrator.errors import InputError
from orchestrator.models.gguf_header import ARRAY, BOOL, STRING, UINT32, UINT64
from orchestrator.models.hyperparameters import Unsigned64, Value

_INT32: Final = 5
_FLOAT32: Final = 6

_SPECIAL: Final = ("<unk>", "<s>", "</s>")
# merges go pair by pair, so a word needs its beginnings as pieces, too
_WORDS: Final = tuple(f"\u2581{word}" for word in ("t", "th", "the", "a", "an", "and"))
_PIECES: Final = ("\u2581", *"etaoinshrdlcumwfgypbvk", *_WORDS, "in", "ing", "er", "on", "th", "he", "\n")
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6  # llama_token_type
MINIMUM_VOCABULARY: Final = len(_SPECIAL) + 256


def encode_entries(metadata: Mapping[str, Value]) -> list[bytes]:
    """Encode key-value pairs, one byte string each; numbers as u32, f32 or bool."""
    return [_string(key) + _value(value) for key, value in metadata.items()]


def tokenizer_keys(n_vocab: int) -> Mapping[str, Value]:
    """Make a SentencePiece-like vocabulary with byte fallback: it encodes and decodes any text.

    Raises :class:`InputError` for fewer than 259 tokens.
    """
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


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, Unsigned64):
        return _array(UINT64, value.values, "Q")
    if all(isinstance(item, str) for item in value):
        items = b"".join(_string(str(item)) for item in value)
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + items
    if any(isinstance(item, float) for item in value):
        return _array(_FLOAT32, value, "f")
    return _array(_INT32, value, "i")  # real files hold signed arrays, and for a vocabulary they must be


def _array(kind: int, values: Sequence[object], code: str) -> bytes:
    return struct.pack(f"<IIQ{len(values)}{code}", ARRAY, kind, len(values), *values)


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data
