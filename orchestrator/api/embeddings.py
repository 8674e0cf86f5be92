"""Requests for embeddings and their answers, in the form of the OpenAI API. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from orchestrator.api.fields import Fields, invalid, unsupported
from orchestrator.api.schema import ModelNames, parse_prompts
from orchestrator.api.stream import Body
from orchestrator.types import FloatArray

MAX_INPUTS: Final = 2048
EMBEDDING_FIELDS: Final = frozenset({"model", "input", "encoding_format", "dimensions", "user"})


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts, or their tokens, to embed; ``as_base64``: the vectors as little-endian float32 in base64."""

    inputs: tuple[str | tuple[int, ...], ...]
    as_base64: bool
    dimensions: int | None


def parse_embedding_request(body: object, names: ModelNames) -> EmbeddingRequest:
    """Parse the body of ``/v1/embeddings``. Raises :class:`RequestError` with the field's name."""
    fields = Fields(body)
    fields.refuse_unknown(EMBEDDING_FIELDS)
    names.check(fields.text("model"))
    encoding = fields.text("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise invalid("encoding_format", "must be 'float' or 'base64'")
    inputs = parse_prompts(fields.get("input"), "input")
    if len(inputs) > MAX_INPUTS:
        raise invalid("input", f"holds more than {MAX_INPUTS} texts")
    return EmbeddingRequest(inputs, encoding == "base64", fields.optional_integer("dimensions", 1, 1 << 20))


def check_tokens(inputs: Sequence[Sequence[int]], n_vocab: int) -> None:
    """Refuse tokens that the model does not know: the engine would not survive them."""
    if any(not 0 <= token < n_vocab for tokens in inputs for token in tokens):
        raise invalid("input", f"holds a token id outside 0 to {n_vocab - 1}")


def check_dimensions(wanted: int | None, found: int) -> None:
    """Refuse vectors of another length than the model's."""
    if wanted is not None and wanted != found:
        raise unsupported("dimensions", f"must be {found}, the length of this model's vectors")


def embedding_body(model: str, vectors: Sequence[FloatArray], tokens: int, *, as_base64: bool) -> Body:
    """Return the answer; ``tokens`` is the number of all inputs' tokens."""
    return {
        "object": "list",
        "model": model,
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encode(vector) if as_base64 else [float(value) for value in vector],
            }
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encode(vector: FloatArray) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
