"""Try every place where a model can be cut into stages: the bytes of one process, or the reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.engine.stage import StageSizes
from orchestrator.engine.survey import survey
from orchestrator.onboarding.stages import open_stages
from orchestrator.ring.steps import TokenBatch, one_sequence
from orchestrator.types import FloatArray, format_ranges

PARTS: Final = (1, 33, *[1] * 8)
"""Tokens of each step: two prefills, the second in other rows than the first, and single steps."""


@dataclass(frozen=True, slots=True)
class CutFindings:
    """Cuts in front of layers 1 to ``n_layer`` - 1 by what became of them.

    At ``identical`` ones two stages gave every byte of one process, at ``different`` ones they did not; ``refused``
    ones are impossible, with the reason.
    """

    n_layer: int
    identical: tuple[int, ...]
    different: tuple[int, ...]
    refused: Mapping[int, str]

    @property
    def passed(self) -> bool:
        """Tell whether every cut is identical or refused."""
        return not self.different

    def words(self) -> str:
        """Say it in a cell of a table."""
        legal = len(self.identical) + len(self.different)
        words = [f"{len(self.identical)} of {legal} identical"] if legal else ["none"]
        if self.different:
            words.append(f"FAILED in front of {format_ranges(self.different)}")
        for reason in dict.fromkeys(self.refused.values()):
            places = [place for place, other in self.refused.items() if other == reason]
            words.append(f"not in front of {format_ranges(places)}: {reason}")
        return "; ".join(words)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "layers": self.n_layer,
            "identical": list(self.identical),
            "different": list(self.different),
            "refused": {str(place): reason for place, reason in self.refused.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> CutFindings:
        """Read what :meth:`to_json` wrote; raise :class:`TypeError` or :class:`ValueError` on anything else."""
        refused, layers = value["refused"], value["layers"]
        if not isinstance(refused, Mapping) or not isinstance(layers, int):
            raise TypeError("these are no findings about cuts")
        return cls(
            layers,
            _places(value["identical"]),
            _places(value["different"]),
            {int(place): str(reason) for place, reason in refused.items()},
        )


def try_cuts(path: Path) -> CutFindings:
    """Compare two stages with one process at every legal cut of a model, all in this process."""
    sizes = StageSizes(n_ctx=sum(PARTS))
    with Model.open(path) as model:
        n_layer, cuts = model.n_layer, survey(model)
        tokens = [int(token) for token in np.random.default_rng(11).integers(0, model.n_vocab, sum(PARTS))]
        steps = _steps(tokens)
        with Context(model, n_ctx=sizes.n_ctx, n_ubatch=sizes.n_ubatch, n_batch=sizes.n_batch) as context:
            expected = [_bytes(context.decode(step).logits) for step in steps]
    verdicts = {
        cut.layer: _two_stages(path, cut.layer, n_layer, sizes, steps) == expected for cut in cuts if cut.is_legal
    }
    return CutFindings(
        n_layer,
        tuple(place for place, same in verdicts.items() if same),
        tuple(place for place, same in verdicts.items() if not same),
        {cut.layer: cut.reason for cut in cuts if cut.reason is not None},
    )


def _two_stages(path: Path, cut: int, n_layer: int, sizes: StageSizes, steps: list[TokenBatch]) -> list[bytes]:
    with open_stages(path, (0, cut, n_layer), sizes) as ring:
        return [_bytes(ring.decode(step)) for step in steps]


def _steps(tokens: list[int]) -> list[TokenBatch]:
    steps, position = [], 0
    for count in PARTS:
        steps.append(one_sequence(tokens[position : position + count], position, every=True))
        position += count
    return steps


def _bytes(logits: FloatArray | None) -> bytes:
    return b"" if logits is None else logits.tobytes()


def _places(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("these are no places of cuts")
    return tuple(int(place) for place in value)
