"""Run prompts through a decoder and keep the logits: the same token sequence for whoever is compared.

The oracle chooses the tokens of the decode steps (its argmax); everybody else is *teacher-forced* with them. Without
that, one flipped argmax would make two runs continue different texts, and every later position would compare answers
to different questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from orchestrator.errors import InputError
from orchestrator.onboarding.prompts import Prompt
from orchestrator.types import FloatArray
from orchestrator.verification.gate import Comparison, compare, merge

Advance = Callable[[int], None]
"""Called with the number of rows just decoded."""


class Decoder(Protocol):
    """What the gate needs of a session: one sequence that grows."""

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> FloatArray:
        """Append tokens; return logits [1 or n, n_vocab]."""

    def clear(self) -> None:
        """Forget the sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Logits of one prompt: of every prefill position, and of every decode step with the token that was fed."""

    prompt: Prompt
    prefill: FloatArray  # [n_prompt, n_vocab]
    steps: FloatArray  # [n_steps, n_vocab]
    fed: tuple[int, ...]  # [n_steps]; fed[0] follows from the last prefill position

    @property
    def next_token(self) -> int:
        """The token that greedy decoding would feed next."""
        last = self.steps if len(self.steps) else self.prefill
        return int(last[-1].argmax())


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The outcome of :func:`replay`; the digests are SHA-256 over all logits, prompts in order, prefill first."""

    comparison: Comparison
    logits_sha256: str
    oracle_sha256: str


def run_prompt(
    decoder: Decoder,
    prompt: Prompt,
    steps: int,
    *,
    forced: Sequence[int] | None = None,
    advance: Advance | None = None,
) -> Trace:
    """Prefill a prompt and decode ``steps`` tokens: those in ``forced``, or greedily where it is None."""
    if forced is not None and len(forced) != steps:
        raise InputError(f"{len(forced)} forced tokens for {steps} steps")
    decoder.clear()
    prefill = decoder.decode(prompt.tokens, all_logits=True)
    _count(advance, len(prompt.tokens))
    rows: list[FloatArray] = []
    fed: list[int] = []
    previous = prefill[-1]
    for step in range(steps):
        token = int(previous.argmax()) if forced is None else forced[step]
        fed.append(token)
        previous = decoder.decode([token])[-1]
        rows.append(previous)
        _count(advance, 1)
    stacked = np.stack(rows) if rows else np.empty((0, prefill.shape[1]), np.float32)
    return Trace(prompt, prefill, stacked, tuple(fed))


def run_prompts(
    decoder: Decoder, prompts: Iterable[Prompt], steps: int, advance: Advance | None = None
) -> list[Trace]:
    """Run prompts greedily: the oracle's way."""
    return [run_prompt(decoder, prompt, steps, advance=advance) for prompt in prompts]


def follow(decoder: Decoder, oracle: Sequence[Trace], advance: Advance | None = None) -> list[Trace]:
    """Run the oracle's prompts and tokens through another decoder."""
    return [run_prompt(decoder, known.prompt, len(known.fed), forced=known.fed, advance=advance) for known in oracle]


def replay(decoder: Decoder, oracle: Sequence[Trace], advance: Advance | None = None) -> Replay:
    """Run the oracle's prompts and tokens through another decoder and compare position by position."""
    comparisons, theirs, ours = [], hashlib.sha256(), hashlib.sha256()
    for known in oracle:  # one prompt at a time: two sets of all logits would double the memory
        [trace] = follow(decoder, [known], advance)
        comparisons += [compare(trace.prefill, known.prefill), compare(trace.steps, known.steps)]
        _feed(theirs, trace)
        _feed(ours, known)
    return Replay(merge(comparisons), theirs.hexdigest(), ours.hexdigest())


def compare_micro_batches(
    decoder: Decoder, tokens: Sequence[int], sizes: Sequence[int], advance: Advance | None = None
) -> dict[int, Comparison]:
    """Decode the same tokens in micro-batches of each size and compare with single steps; size -> comparison."""
    single = _in_pieces(decoder, tokens, 1, advance)
    return {size: compare(_in_pieces(decoder, tokens, size, advance), single) for size in sizes}


def cost_of_prompts(prompts: Iterable[Prompt], steps: int) -> int:
    """Count the rows that :func:`run_prompts` and :func:`replay` report to ``advance``."""
    return sum(len(prompt.tokens) + steps for prompt in prompts)


def _in_pieces(decoder: Decoder, tokens: Sequence[int], size: int, advance: Advance | None) -> FloatArray:
    decoder.clear()
    pieces = []
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        pieces.append(decoder.decode(piece, all_logits=True))
        _count(advance, len(piece))
    return np.concatenate(pieces)


def _count(advance: Advance | None, rows: int) -> None:
    if advance is not None:
        advance(rows)


def _feed(digest: hashlib._Hash, trace: Trace) -> None:
    digest.update(np.ascontiguousarray(trace.prefill).data)
    digest.update(np.ascontiguousarray(trace.steps).data)
