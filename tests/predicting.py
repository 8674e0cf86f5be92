"""Tiny models with prediction layers: with random ones, which guess badly, and with ones that are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from orchestrator.engine.synth import synth

CASES: Final = [("step35", 1), ("step35", 2), ("glm4moe", 1), ("deepseek2", 1)]
"""Architectures, and how many prediction layers."""

MORE: Final = [("hy_v3", 2), ("cohere2moe", 1), ("deepseek32", 1), ("glm-dsa", 1)]
"""Others that are no different to us."""

_WRITES = re.compile(r"\.(attn_output|ffn_down\w*)\.weight$")  # what a layer adds to the residual stream


def make_predicting(architecture: str, count: int, path: Path, *, sure: bool = False) -> Path:
    """Write a model; a ``sure`` one's next token follows from the newest alone, and its prediction layers say it.

    For that all layers add nothing, so that the model is its embedding and its output, and the prediction layers
    hand on the token's embedding to the same output. A few layers of the model still add what they did before,
    damped, so that guesses are not always right.
    """
    synth(architecture, path, n_predict=count)
    if sure:
        reader = gguf.GGUFReader(path, "r+")
        tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        first = min(int(name.split(".")[1]) for name in tensors if ".nextn." in name)
        for name, data in tensors.items():
            layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
            if _WRITES.search(name):
                data[:] *= 0.0 if layer >= first else 0.08
            elif name.endswith(("nextn.enorm.weight", "nextn.hnorm.weight")):
                data[:] = 1.0
            elif name.endswith("nextn.eh_proj.weight"):
                data[:] = np.concatenate([np.eye(len(data)), np.zeros_like(np.eye(len(data)))], axis=1)
            elif name.endswith("nextn.embed_tokens.weight"):
                data[:] = tensors["token_embd.weight"]
            elif name.endswith("nextn.shared_head_norm.weight"):
                data[:] = tensors["output_norm.weight"]
            elif name.endswith("nextn.shared_head_head.weight"):
                data[:] = tensors["output.weight"]
        reader.data.flush()
    return path
