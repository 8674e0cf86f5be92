"""A model's own prediction layers (MTP): from a token and what the model thought of the one before, the next token.

A prediction layer takes a token of the text and the *hidden row* of the token in front of it, which is what the
model's last layer gave there, and guesses the token behind. So it needs the hidden rows of the whole text, which
:meth:`orchestrator.engine.context.Context.keep_hidden` hands out, and has a cache of its own. Its own hidden row
stands in for the model's where the text has not been computed yet: then it guesses further ahead. Where a model has
several prediction layers, each is made for one distance: the first for the next token, the second for the one behind.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from bindings.handles import ContextOptions, NativeError
from bindings.library import last_log_line
from bindings.nextn import PredictionHandle
from orchestrator.engine.model import Model
from orchestrator.errors import ComputeError, InputError
from orchestrator.models.architectures import RECIPES
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_manifest import is_expert_tensor
from orchestrator.ring.steps import TokenBatch
from orchestrator.types import FloatArray

ROWS: Final = 512
"""Tokens of a micro-batch: guesses need not be exact, so it may be as large as the engine likes it."""


# What the engine ends the process over, where it is missing.
_LATENT: Final = frozenset({"deepseek2", "deepseek32", "glm-dsa"})
_LATENT_KEYS: Final = ("attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla")
_PARTS: Final = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
_ROUTER: Final = ("ffn_gate_inp",)


def why_no_prediction(path: Path) -> str:
    """Return why the prediction layers of a file cannot be used, in words; empty where they can."""
    file = GgufFile.open(path)
    count = file.number("nextn_predict_layers", 0)
    if not count:
        return f"{path.name} has no prediction layers"
    recipe = RECIPES.get(file.architecture)
    if recipe is None or not recipe.predicts:
        return f"prediction layers of {file.architecture} were not tried"
    if count > recipe.predicts:
        most = recipe.predicts
        return f"{path.name} has {count} prediction layers, and the engine computes {most} of {file.architecture}"
    if file.architecture in _LATENT and not all(file.number(key, 0) for key in _LATENT_KEYS):
        return f"the engine computes prediction layers of {file.architecture} only with latent attention throughout"
    if file.metadata.get(f"{file.architecture}.attention.temperature_scale"):
        return "the engine computes no prediction layers with temperature scaling of the attention"
    if any(f"{name}.weight" in file.manifest.keys() - file.tensors.keys() for name in ("token_embd", "output")):
        return f"{path.name} does not hold the embedding and the output, which prediction layers need"
    for layer in range(file.n_layer - count, file.n_layer):
        names = [name for name in file.manifest if name.startswith(f"blk.{layer}.")]
        needed = {f"blk.{layer}.{part}.weight" for part in (*_PARTS, *_ROUTER[: not recipe.either_ffn])}
        if any(name not in file.tensors and not is_expert_tensor(name) for name in needed.union(names)):
            return f"{path.name} names prediction layers and does not hold them"
        if any(is_expert_tensor(name) for name in names) and len(file.held_experts(layer)) < file.n_expert:
            return f"{path.name} does not hold the experts of its prediction layers"
    return ""


class PredictionContext:
    """The prediction layers of a file, for ``n_sequences`` sequences of up to ``n_ctx`` tokens; a context manager.

    It holds a model of its own: these layers with their experts, the embedding and the output. Positions of a
    sequence follow each other, but may begin anywhere.
    """

    def __init__(self, path: Path, *, n_ctx: int, n_sequences: int, n_threads: int = 1) -> None:
        """Load the layers; raise :class:`InputError` where the file has none that the engine can compute."""
        reason = why_no_prediction(path)
        if reason:
            raise InputError(reason)
        file = GgufFile.open(path)
        self.n_layers = file.number("nextn_predict_layers", 0)
        self.n_sequences = n_sequences
        self.model = Model.open(path, only_behind=file.n_layer - self.n_layers)
        options = ContextOptions(
            n_ctx=n_ctx * n_sequences,
            n_batch=ROWS,
            n_ubatch=ROWS,
            n_threads=n_threads,
            n_sequences=n_sequences,
            unified=False,
            flash_attention=None,
            prediction=True,
        )
        try:
            self._context = PredictionHandle(self.model.handle, options)
        except NativeError as error:
            self.model.close()
            raise ComputeError(f"{path}: {error}") from error
        self.length = self._context.hidden.length

    def read(self, batch: TokenBatch, hidden: FloatArray) -> None:
        """Take in tokens with the hidden rows of the tokens in front of them, [n, :attr:`length`].

        What the sequences hold from there on is forgotten first. On an error they hold nothing.
        """
        for layer in range(self.n_layers):
            self._begin(batch, layer)
            for start in range(0, len(batch), ROWS):
                part = slice(start, start + ROWS)
                self._decode(batch, part, hidden, output=False)

    def guess(self, batch: TokenBatch, hidden: FloatArray, layer: int = 0) -> tuple[FloatArray, FloatArray]:
        """Do the same with one layer only, for at most :data:`ROWS` tokens; return what it says about each.

        That is logits of the token behind, [n, n_vocab], and hidden rows to go on with, [n, :attr:`length`].
        """
        self._begin(batch, layer)
        n = len(batch)
        self._decode(batch, slice(0, n), hidden, output=True)
        return self._context.logits(n, self.model.n_vocab), self._context.hidden.take(n)

    def cut(self, sequence: int, keep: int) -> None:
        """Forget all positions of a sequence from ``keep`` on."""
        self._context.remove(sequence, keep if keep else -1, -1)

    def close(self) -> None:
        """Free caches and weights."""
        self._context.close()
        self.model.close()

    def __enter__(self) -> PredictionContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, batch: TokenBatch, layer: int) -> None:
        for sequence, start in batch.starts().items():
            self.cut(sequence, start)
        try:
            self._context.choose(layer)
        except NativeError as error:
            raise InputError(str(error)) from error

    def _decode(self, batch: TokenBatch, part: slice, hidden: FloatArray, *, output: bool) -> None:
        tokens = batch.tokens[part]
        self._context.fill(
            tokens.tolist(),
            batch.positions[part].tolist(),
            batch.sequences[part].tolist(),
            np.full(len(tokens), output, np.int8).tolist(),
        )
        try:
            status = self._context.decode_with(hidden[part])
        except NativeError as error:
            raise InputError(str(error)) from error
        if status != 0:
            for sequence in batch.starts():
                self.cut(sequence, 0)
            raise ComputeError(f"prediction failed: {last_log_line(f'llama_decode gave {status}')}")
