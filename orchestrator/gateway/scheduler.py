"""Decide what the engine computes next. Pure: a step is a value, made here and carried out by the gateway."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

from orchestrator.gateway.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens to append to the KV cache in one call of the engine.

    ``start`` is the position of the first. ``samples``: the logits of the last one choose the next token; in the
    middle of a prompt they do not.
    """

    start: int
    tokens: tuple[int, ...]
    samples: bool


def next_step(sequence: Sequence, chunk: int) -> Step:
    """Return a sequence's next step: at most ``chunk`` tokens of the prompt, later the newest token.

    A prompt is cut into chunks so that a client who leaves during a long prompt frees the engine within one of
    them. ``chunk`` is the micro-batch size, or a multiple of it: then the engine cuts the prompt as it would have
    cut it in one call, and the answer is the same.
    """
    start = sequence.decoded
    tokens = tuple(sequence.tokens[start : start + chunk])
    return Step(start, tokens, samples=start + len(tokens) == len(sequence.tokens))


def reusable_prefix(held: Listed[int], prompt: Listed[int], *, can_truncate: bool) -> int:
    """Return how many tokens of the KV cache, which holds those of ``held``, serve for ``prompt``.

    The last token of the prompt is always computed again, because its logits are needed. A cache that cannot be
    cut (hybrid and recurrent models) serves only if all of it is a beginning of the prompt.
    """
    common = 0
    for mine, wanted in zip(held, prompt[:-1], strict=False):
        if mine != wanted:
            break
        common += 1
    return common if can_truncate or common == len(held) else 0
