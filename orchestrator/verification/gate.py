"""Decide from two sets of logits whether an answer is the same. PURE: arrays in, verdicts out.

What is compared: logits [n_positions, n_vocab] F32 of the model run in some other way (experts on workers, other
micro-batches) with those of the *oracle*, the same build in one process with the hook off. Four measures per
position:

- the bytes. Equal or not, signed zeros and NaN payloads included; nothing is rounded away.
- the argmax: would greedy decoding have taken the same token here?
- the cosine between the two logit vectors, in F64. Logits that differ only by a common factor count as equal here,
  which is why the next measure exists.
- the Kullback-Leibler divergence KL(oracle || other) of the two next-token distributions, in nats.

How a verdict is reached:

``exact`` passes only when the bytes are equal for every prompt, phase and worker count. There is no tolerance: the
contract's promise is equality, and a single bit that differs says that some machine computes something else.

A lossy contract (``sum``) adds the same numbers in another order, and a ring with F16 boundaries rounds some of them,
so bytes may differ. How much may they? Quantised
activations amplify a last-bit difference into a rounding step of 1/127, and how far that goes depends on the model.
So the yardstick is the model's own *noise floor*: the stock engine against itself at another micro-batch size, a
difference that every user of the engine lives with and never sees. A lossy contract passes when it is

- absolutely good: every argmax agrees and no cosine is below :data:`COSINE_GOOD`; or
- no worse than the noise floor within the :class:`Margins`, and above :class:`Margins`' absolute limits, so that a
  floor that is itself absurd (a broken measurement) excuses nothing.

The floor must come from the *stock* configuration (flash attention left to the engine, weights repacked, no cap on
the micro-batch). With the four switches of the batch-invariant configuration the engine's answer does not depend on
the micro-batch at all: the floor measured there is exactly zero and would condemn any reordering.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from orchestrator.errors import InputError
from orchestrator.types import Boundary, Contract, FloatArray

COSINE_GOOD = 0.9999
"""A cosine at or above this, at every position and with every argmax equal, passes without looking at the floor."""

_ROWS_AT_ONCE = 16  # F64 copies of 16 rows of a 200,000-word vocabulary are 26 MB each


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """How logits differ from the oracle's, position by position; see :func:`compare` and :func:`merge`."""

    cosines: npt.NDArray[np.float64] = field(repr=False)  # [n_positions]; 0 where a row is not finite
    divergences: npt.NDArray[np.float64] = field(repr=False)  # [n_positions] KL(oracle || other), nats; inf possible
    identical: npt.NDArray[np.bool_] = field(repr=False)  # [n_positions] all bytes of the row equal
    agreeing: npt.NDArray[np.bool_] = field(repr=False)  # [n_positions] same argmax
    max_difference: float  # largest |other - oracle|; inf where a value is not finite

    @property
    def positions(self) -> int:
        """Number of positions compared."""
        return len(self.cosines)

    @property
    def byte_identical(self) -> bool:
        """Tell whether every byte of every position is equal; nothing compared proves nothing."""
        return self.positions > 0 and bool(self.identical.all())

    @property
    def argmax_agreement(self) -> float:
        """Share of positions with the same argmax, 0 to 1."""
        return float(self.agreeing.mean()) if self.positions else 0.0

    @property
    def cosine_min(self) -> float:
        """Smallest cosine of any position."""
        return float(self.cosines.min()) if self.positions else 0.0

    @property
    def cosine_mean(self) -> float:
        """Mean cosine over the positions."""
        return float(self.cosines.mean()) if self.positions else 0.0

    @property
    def kl(self) -> float:
        """Mean divergence in nats."""
        return float(self.divergences.mean()) if self.positions else math.inf

    @property
    def kl_max(self) -> float:
        """Largest divergence of any position, in nats."""
        return float(self.divergences.max()) if self.positions else math.inf


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The stock engine against itself at two micro-batch sizes: the yardstick of the lossy contracts."""

    argmax_agreement: float
    cosine_min: float
    cosine_mean: float
    kl: float  # mean, nats
    positions: int
    micro_batches: tuple[int, int]  # rows; the second one is the oracle of this comparison
    repacked: bool  # whether the stock run repacked its weights (it cannot where memory does not suffice)

    @classmethod
    def of(cls, comparison: Comparison, *, micro_batches: tuple[int, int], repacked: bool) -> NoiseFloor:
        """Condense the comparison of the two stock runs."""
        return cls(
            argmax_agreement=comparison.argmax_agreement,
            cosine_min=comparison.cosine_min,
            cosine_mean=comparison.cosine_mean,
            kl=comparison.kl,
            positions=comparison.positions,
            micro_batches=micro_batches,
            repacked=repacked,
        )


@dataclass(frozen=True, slots=True)
class Margins:
    """How far beyond the noise floor a lossy contract may be, and the limits that no floor can lift.

    The cosine margins are factors on the floor's distance from 1, so that they mean the same for a model whose floor
    is 0.99995 (F16 weights) and for one whose floor is 0.986 (Q4_1). The minimum is the extreme of a few hundred
    samples and scatters more than the mean, hence its wider factor.
    """

    argmax: float = 0.01  # share of positions that may flip beyond the floor's; one position is always allowed
    cosine_min_factor: float = 1.5
    cosine_mean_factor: float = 1.25
    argmax_limit: float = 0.9
    cosine_mean_limit: float = 0.99


@dataclass(frozen=True, slots=True)
class Verdict:
    """Passed or not, and the sentence that says why."""

    passed: bool
    reason: str


def compare(logits: FloatArray, oracle: FloatArray) -> Comparison:
    """Compare logits with the oracle's, both [n_positions, n_vocab] F32.

    A row with a value that is not finite has cosine 0 and infinite divergence, unless its bytes equal the oracle's.
    Raises :class:`InputError` when the shapes or types differ: then the two runs were not of the same thing.
    """
    if logits.shape != oracle.shape or logits.ndim != 2 or logits.dtype != np.float32 or oracle.dtype != np.float32:
        raise InputError(
            f"logits {logits.dtype}{list(logits.shape)} cannot be compared with {oracle.dtype}{list(oracle.shape)}"
        )
    count = logits.shape[0]
    cosines = np.ones(count, np.float64)
    divergences = np.zeros(count, np.float64)
    identical = (_bits(logits) == _bits(oracle)).all(axis=1)
    agreeing = identical.copy()
    max_difference = 0.0
    different = np.flatnonzero(~identical)
    for start in range(0, len(different), _ROWS_AT_ONCE):
        rows = different[start : start + _ROWS_AT_ONCE]
        other, reference = logits[rows].astype(np.float64), oracle[rows].astype(np.float64)
        finite = np.isfinite(other).all(axis=1) & np.isfinite(reference).all(axis=1)
        cosines[rows] = 0.0
        divergences[rows] = np.inf
        if not finite.all():
            max_difference = math.inf
        rows, other, reference = rows[finite], other[finite], reference[finite]
        if not len(rows):
            continue
        agreeing[rows] = other.argmax(axis=1) == reference.argmax(axis=1)
        cosines[rows] = _cosine(other, reference)
        divergences[rows] = _divergence(reference, other)
        max_difference = max(max_difference, float(np.abs(other - reference).max()))
    return Comparison(cosines, divergences, identical, agreeing, max_difference)


def merge(comparisons: Iterable[Comparison]) -> Comparison:
    """Join comparisons of several prompts and phases into one over all their positions, in the order given."""
    parts = list(comparisons)
    if not parts:
        nothing = np.zeros(0, np.float64)
        return Comparison(nothing, nothing, nothing.astype(bool), nothing.astype(bool), 0.0)
    return Comparison(
        np.concatenate([part.cosines for part in parts]),
        np.concatenate([part.divergences for part in parts]),
        np.concatenate([part.identical for part in parts]),
        np.concatenate([part.agreeing for part in parts]),
        max(part.max_difference for part in parts),
    )


def judge(
    promise: Contract | Boundary,
    comparison: Comparison,
    floor: NoiseFloor | None,
    margins: Margins | None = None,
) -> Verdict:
    """Give the verdict of one contract, or kind of boundary, over all that was compared (one count, all prompts).

    ``floor`` may be None (not measured): a lossy one then passes only when it is absolutely good.
    """
    if comparison.positions == 0:
        return Verdict(False, "nothing was compared")
    if comparison.byte_identical:
        return Verdict(True, f"all {comparison.positions} positions are byte-identical")
    if promise in (Contract.EXACT, Boundary.F32):
        differing = int((~comparison.identical).sum())
        first = int(np.flatnonzero(~comparison.identical)[0])
        return Verdict(False, f"{differing} of {comparison.positions} positions differ, the first is number {first}")
    return _judge_lossy(comparison, floor, margins or Margins())


def batch_invariant(comparisons: Sequence[Comparison]) -> bool:
    """Tell whether every micro-batch size tried gave the bytes of single steps."""
    return bool(comparisons) and all(comparison.byte_identical for comparison in comparisons)


def _judge_lossy(comparison: Comparison, floor: NoiseFloor | None, margins: Margins) -> Verdict:
    if comparison.argmax_agreement == 1.0 and comparison.cosine_min >= COSINE_GOOD:
        return Verdict(True, f"every argmax agrees and no cosine is below {COSINE_GOOD}")
    if floor is None:
        return Verdict(False, "not good enough by itself, and no noise floor was measured")
    flips = 1.0 - floor.argmax_agreement + max(margins.argmax, 1.0 / comparison.positions)
    least_agreement = max(1.0 - flips, margins.argmax_limit)
    least_minimum = 1.0 - margins.cosine_min_factor * (1.0 - floor.cosine_min)
    least_mean = max(1.0 - margins.cosine_mean_factor * (1.0 - floor.cosine_mean), margins.cosine_mean_limit)
    failures = [
        f"{name} {value:.6f} is below {limit:.6f}"
        for name, value, limit in (
            ("argmax agreement", comparison.argmax_agreement, least_agreement),
            ("smallest cosine", comparison.cosine_min, min(least_minimum, COSINE_GOOD)),
            ("mean cosine", comparison.cosine_mean, min(least_mean, COSINE_GOOD)),
        )
        if not value >= limit
    ]
    if failures:
        return Verdict(False, "; ".join(failures) + " (the noise floor and its margin)")
    return Verdict(True, "not worse than the engine against itself at another micro-batch size")


def _bits(values: FloatArray) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def _cosine(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # A zero vector points nowhere: cosine 0, the verdict "different". Rounding may give 1 + 2e-16: clipped.
    lengths = np.sqrt((left * left).sum(axis=1)) * np.sqrt((right * right).sum(axis=1))
    products = (left * right).sum(axis=1)
    cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return np.asarray(np.clip(cosines, -1.0, 1.0), np.float64)


def _divergence(reference: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    expected, given = _log_softmax(reference), _log_softmax(other)
    return np.asarray(np.maximum((np.exp(expected) * (expected - given)).sum(axis=1), 0.0), np.float64)


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = values - values.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float64)
