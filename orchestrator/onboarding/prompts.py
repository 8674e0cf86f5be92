"""The prompts that the gate runs: text for models that can read, random tokens for models that cannot.

The set covers what has broken other engines: one token alone, a prompt that ends inside a micro-batch, one that
spans several, code (other token statistics) and scripts whose characters are several tokens each. Different texts
route to different experts; the record's rows per worker show that each worker was in fact asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.errors import InputError

MICRO_BATCH = 63
"""Rows per micro-batch in the batch-invariant configuration: from 64 rows on the engine takes another kernel."""

_FEWEST_WORDS = 32  # a real tokenizer needs more distinct tokens than this for the texts below

_SHORT = "The capital of France is"

_LONG = (
    "A lighthouse keeper wrote a letter to the harbour office every evening. On Monday he reported two fishing "
    "boats and a steady wind from the west. On Tuesday the fog was so thick that he counted ships by their horns: "
    "five long and one short, which he took for the ferry. On Wednesday nobody answered his letters, so he described "
    "the clouds instead, from the thin white ones at noon to the dark wall behind the island. When the supply boat "
    "finally came, the captain brought a single sheet of paper in return. It said:"
)

_CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists into one."""
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
'''

_OTHER_LANGUAGES = (
    "Der Zug nach München hält heute nicht in Nürnberg. Où est la bibliothèque, s'il vous plaît ? "
    "Где находится ближайшая станция метро? 今天的天气怎么样?"
)

_TALE = (
    "Once upon a time there was a clockmaker who could repair anything except his own watch. Every customer in the "
    "small town trusted him, and every morning he was late. He tried to fix the watch with a new spring, then with a "
    "new wheel, and at last with a new dial on which the numbers ran backwards. Nothing helped. One day a child came "
    "into the shop and asked why he did not simply borrow the time from the church tower. "
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A named token sequence."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    text: str
    at_most: int  # tokens kept of the text
    exactly: bool  # repeat the text until it is that long


_KINDS: Mapping[str, _Kind] = {
    "short": _Kind(_SHORT, 8, False),
    "long": _Kind(_LONG, 128, False),
    "code": _Kind(_CODE, 96, False),
    "non-english": _Kind(_OTHER_LANGUAGES, 96, False),
    "one-token": _Kind("Hello", 1, True),
    "micro-batches": _Kind(_TALE, 3 * MICRO_BATCH + 11, True),
}

PROMPT_NAMES = tuple(_KINDS)
"""Names of the built-in prompts, in the order in which they run."""


def has_tokenizer(metadata: Mapping[str, str]) -> bool:
    """Tell from a GGUF's metadata whether asking its tokenizer is safe.

    The engine aborts the whole process when a vocabulary of type ``none`` is asked to tokenize.
    """
    return metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab", "")


def build_prompts(
    tokenize: Callable[[str], Sequence[int]] | None,
    n_vocab: int,
    *,
    longest: int,
    names: Sequence[str] = PROMPT_NAMES,
    seed: int = 2024,
) -> tuple[Prompt, ...]:
    """Make the named prompts, none longer than ``longest`` tokens.

    ``tokenize`` is None for a model without a tokenizer. Random tokens of the same lengths are taken then, and also
    where the tokenizer is a dummy that maps everything to a few tokens: such prompts would exercise a few experts.
    """
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        raise InputError(f"no built-in prompt is called {unknown[0]!r}", hint=f"there are {', '.join(PROMPT_NAMES)}")
    if longest < 1:
        raise InputError(f"prompts of at most {longest} tokens cannot be made")
    texts = {name: list(tokenize(kind.text)) for name, kind in _KINDS.items()} if tokenize is not None else {}
    distinct = {token for tokens in texts.values() for token in tokens}
    if len(distinct) < _FEWEST_WORDS or not all(0 <= token < n_vocab for token in distinct):
        return _random_prompts(n_vocab, longest, names, seed)
    return tuple(Prompt(name, _fit(texts[name], _KINDS[name], longest)) for name in names)


def random_tokens(n_vocab: int, count: int, seed: int) -> tuple[int, ...]:
    """Draw token ids uniformly, the same ones for the same seed."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, n_vocab, count))


def _random_prompts(n_vocab: int, longest: int, names: Sequence[str], seed: int) -> tuple[Prompt, ...]:
    order = {name: index for index, name in enumerate(PROMPT_NAMES)}
    return tuple(
        Prompt(name, random_tokens(n_vocab, min(_KINDS[name].at_most, longest), seed + order[name])) for name in names
    )


def _fit(tokens: list[int], kind: _Kind, longest: int) -> tuple[int, ...]:
    if kind.exactly and tokens:
        tokens = tokens * -(-kind.at_most // len(tokens))
    return tuple(tokens[: min(kind.at_most, longest)])
