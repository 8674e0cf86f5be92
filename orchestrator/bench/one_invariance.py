"""The job of one architecture: make the model, group its tokens in many ways, compare all logits.

Run as a module by :mod:`orchestrator.bench.invariance`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from orchestrator.config import cache_dir
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.engine.synth import synth
from orchestrator.onboarding.children import answer_order
from orchestrator.onboarding.prompts import random_tokens
from orchestrator.onboarding.side_by_side import try_side_by_side
from orchestrator.onboarding.trace import compare_micro_batches
from orchestrator.verification.gate import Comparison

SIZES: Final = (2, 5, 33, 63)
"""Rows of the micro-batches that are compared with single steps."""

TOKENS: Final = 300
"""Length of the longest text: from 257 tokens on the engine's attention may share its work out in another way."""

LENGTHS: Final = (TOKENS, 70, 45, 33, 64, 20)
"""Lengths of the texts side by side: over four slots, two of them take the place of others."""


def try_architecture(order: Mapping[str, object]) -> Mapping[str, object]:
    """Answer with what was found; the order holds ``architecture`` and ``threads``."""
    architecture, threads = str(order["architecture"]), order["threads"]
    if not isinstance(threads, int):
        raise TypeError("threads must be a number")
    with tempfile.TemporaryDirectory(prefix="synthetic-", dir=cache_dir()) as folder:
        path = Path(folder) / f"{architecture}.gguf"
        synth(architecture, path)
        with Model.open(path) as model:
            if model.reads_whole_text:
                return {"whole_text": True}
            tokens = random_tokens(model.n_vocab, TOKENS, seed=1)
            with Session(model, n_ctx=TOKENS, n_threads=threads) as session:
                sizes = compare_micro_batches(session, tokens, SIZES)
            texts = [random_tokens(model.n_vocab, length, seed=2 + n) for n, length in enumerate(LENGTHS)]
            several = try_side_by_side(model, texts, n_threads=threads)
            return {
                "whole_text": False,
                "hybrid": model.is_hybrid,
                "one": {str(size): _figures(comparison) for size, comparison in sizes.items()},
                "several": _figures(several),
            }


def _figures(comparison: Comparison) -> dict[str, object]:
    differing = int((~comparison.identical).sum())
    return {
        "identical": comparison.byte_identical,
        "rows": comparison.positions,
        "differing": differing,
        "first": int(comparison.identical.argmin()) if differing else None,
        "argmax_agreement": comparison.argmax_agreement,
    }


if __name__ == "__main__":
    answer_order(try_architecture)
