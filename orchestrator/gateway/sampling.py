"""Choose the next token from a row of logits; a pure function of (logits, parameters, history, index).

The order of the transformations is fixed: ``logit_bias``, then the penalties, then the temperature, then ``top_k``,
``top_p`` and ``min_p``, each on what the one before left over, then one draw. The defaults are those of the OpenAI
API: temperature 1, nothing filtered, nothing punished.

Randomness comes from a counter-based generator: the draw for the i-th token of an answer depends on (seed, i) only.
So a request with a seed gives the same text again, whatever else the process sampled in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.errors import ComputeError
from orchestrator.types import FloatArray

Scores = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]

_SEED_MASK: Final = (1 << 64) - 1
_SECOND_DRAW: Final = 1 << 64
"""Where the numbers of second draws begin in a seed's sequence; no answer is that long."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How a token is chosen; the defaults choose from the model's own distribution.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter nothing. ``repeat_penalty`` (1: off)
    divides positive and multiplies negative logits of every token among the last ``repeat_last_n`` of prompt and
    answer. ``presence_penalty`` and ``frequency_penalty`` are subtracted once, and once per occurrence, from tokens
    that the answer already holds. ``logit_bias`` is (token, value to add).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


class Constraint(Protocol):
    """What an answer may hold next, such as a grammar's state; made for one answer and told each of its tokens."""

    def allows(self, token: int) -> bool:
        """Tell whether the answer may go on with a token."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token whether the answer may go on with it, [n_vocab]; much slower than one question."""

    def accept(self, token: int) -> None:
        """Go on with a token, which must be an allowed one."""


class TokenHistory:
    """What the penalties look at: the prompt's tail and the answer so far."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._tokens = list(prompt)
        self._answer: Counter[int] = Counter()

    def append(self, token: int) -> None:
        """Add a token of the answer."""
        self._tokens.append(token)
        self._answer[token] += 1

    def recent(self, count: int) -> TokenIds:
        """Return the distinct tokens among the last ``count`` of prompt and answer."""
        return np.array(sorted(set(self._tokens[-count:])) if count > 0 else [], dtype=np.int64)

    def answer_counts(self) -> tuple[TokenIds, Scores]:
        """Return the distinct tokens of the answer and how often each occurs."""
        return (
            np.fromiter(self._answer.keys(), dtype=np.int64, count=len(self._answer)),
            np.fromiter(self._answer.values(), dtype=np.float64, count=len(self._answer)),
        )


def choose_token(
    logits: FloatArray,
    parameters: SamplingParameters,
    history: TokenHistory,
    index: int,
    constraint: Constraint | None = None,
) -> int | None:
    """Choose the ``index``-th token of an answer from ``logits`` [n_vocab]; None if the constraint allows none.

    A token that the constraint forbids is drawn again, with a number of its own, among those that it allows: that
    gives each of them its share (p + p' * p / (1 - p') = p / (1 - p'), p' being what is forbidden) and asks about the
    whole vocabulary only when it must. Equal scores go to the lower token id. Raises :class:`ComputeError` when the
    logits are not numbers, because any choice from them would be noise that looks like an answer.
    """
    scores = adjust(logits, parameters, history)
    token = _draw(scores, parameters, index)
    if constraint is None or constraint.allows(token):
        return token
    allowed = constraint.allowed()
    if not allowed.any():
        return None
    scores[~allowed] = -np.inf
    return _draw(scores, parameters, _SECOND_DRAW + index)


def _draw(scores: Scores, parameters: SamplingParameters, index: int) -> int:
    if parameters.temperature <= 0.0:
        return int(np.argmax(scores))
    tokens, probabilities = filter_candidates(scores / parameters.temperature, parameters)
    cumulative = np.cumsum(probabilities)
    point = draw_uniform(parameters.seed, index) * cumulative[-1]
    rank = int(np.searchsorted(cumulative, point, side="right"))
    return int(tokens[min(rank, len(tokens) - 1)])


def adjust(logits: FloatArray, parameters: SamplingParameters, history: TokenHistory) -> Scores:
    """Return a float64 copy of the logits with bias and penalties applied."""
    scores: Scores = logits.astype(np.float64)
    if np.isnan(scores.max()):  # max() propagates NaN, and is cheaper than isnan().any()
        raise ComputeError(
            "the engine returned logits that are not numbers", hint="run `linkcpp onboard` on this model"
        )
    for token, value in parameters.logit_bias:
        scores[token] += value
    if parameters.repeat_penalty != 1.0:
        recent = history.recent(parameters.repeat_last_n)
        punished = scores[recent]
        scores[recent] = np.where(
            punished > 0.0, punished / parameters.repeat_penalty, punished * parameters.repeat_penalty
        )
    if parameters.presence_penalty != 0.0 or parameters.frequency_penalty != 0.0:
        tokens, counts = history.answer_counts()
        scores[tokens] -= parameters.presence_penalty + counts * parameters.frequency_penalty
    return scores


def filter_candidates(scores: Scores, parameters: SamplingParameters) -> tuple[TokenIds, Scores]:
    """Return the tokens that may be drawn and their weights (not normalised), at least one."""
    weights: Scores = np.exp(scores - scores.max())
    tokens: TokenIds = np.arange(len(scores), dtype=np.int64)
    if 0 < parameters.top_k < len(tokens):
        tokens = _highest(weights, parameters.top_k)
        weights = weights[tokens]
    if parameters.top_p < 1.0:
        nucleus = _nucleus(weights, parameters.top_p)
        tokens, weights = tokens[nucleus], weights[nucleus]
    if parameters.min_p > 0.0:
        likely = weights >= parameters.min_p * weights.max()
        tokens, weights = tokens[likely], weights[likely]
    return tokens, weights


def _highest(weights: Scores, count: int) -> TokenIds:
    """Return the positions of the ``count`` largest weights, ascending; ties go to the lower position."""
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > threshold)
    equal = np.flatnonzero(weights == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(weights: Scores, top_p: float) -> TokenIds:
    """Return the positions of the smallest set of largest weights that holds the share ``top_p``, largest first.

    All weights below ``(1 - top_p) / n`` of the total sum up to less than ``1 - top_p`` of it, so what is above
    already holds the share: only those few need sorting, not the whole vocabulary.
    """
    total = weights.sum()
    shortlist = np.flatnonzero(weights >= total * max(0.0, 1.0 - top_p) / len(weights))
    order = shortlist[np.argsort(-weights[shortlist], kind="stable")]
    cumulative = np.cumsum(weights[order])
    count = int(np.searchsorted(cumulative, top_p * total, side="left")) + 1
    return order[: max(1, count)]


def draw_uniform(seed: int, index: int) -> float:
    """Return the ``index``-th number of a seed's sequence, in [0, 1)."""
    return float(np.random.Generator(np.random.Philox(key=seed & _SEED_MASK, counter=index)).random())


def log_probabilities(logits: FloatArray) -> Scores:
    """Return the log-softmax of the model's own logits [n_vocab], before any of the parameters."""
    scores: Scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    return scores


def most_likely(log_probability: Scores, count: int) -> list[tuple[int, float]]:
    """Return the ``count`` most likely tokens with their log probability, most likely first."""
    if count <= 0:
        return []
    tokens = _highest(log_probability, min(count, len(log_probability)))
    order = tokens[np.argsort(-log_probability[tokens], kind="stable")]
    return [(int(token), float(log_probability[token])) for token in order]
