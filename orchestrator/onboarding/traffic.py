"""Count the bytes that decode steps move over a star, and hold them against what the protocol says they must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.prompts import random_tokens
from orchestrator.onboarding.star import Star, open_fleet, uneven_shares
from orchestrator.types import Contract
from orchestrator.wire.codec import DISPATCH, RESULT
from orchestrator.wire.frame import HEADER_SIZE

CONTRACTS: Final = (Contract.EXACT, Contract.SUM)
"""Those whose rows travel as F32."""

_PROMPT: Final = 8
_PAIR: Final = 4 + 2  # weight F32, expert U16
_RUN: Final = 2  # U16: how many pairs a row has
_PADDING: Final = 2  # a request is padded to four bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one token and layer moves in a decode step, as means over steps and MoE calls; bytes over all workers.

    ``requests`` counts the workers that hold one of the token's experts.
    """

    workers: int
    contract: Contract
    row: int  # values of a routed row
    top_k: int
    bytes_out: float
    bytes_in: float
    requests: float

    @property
    def row_bytes(self) -> float:
        """Bytes of rows alone: one to each worker asked, and one back for each expert or worker."""
        back = self.top_k if self.contract is Contract.EXACT else self.requests
        return 4.0 * self.row * (self.requests + back)

    @property
    def expected(self) -> tuple[float, float]:
        """Least and most bytes, out and in together, that the protocol's frames need for these rows."""
        frames = 2 * HEADER_SIZE + DISPATCH.size + RESULT.size + _RUN
        least = self.row_bytes + self.requests * frames + self.top_k * _PAIR
        return least, least + self.requests * _PADDING

    @property
    def as_expected(self) -> bool:
        """Tell whether the bytes counted at the sockets are those that the frames need."""
        least, most = self.expected
        return least <= self.bytes_out + self.bytes_in <= most

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "workers": self.workers,
            "contract": self.contract.value,
            "row": self.row,
            "top_k": self.top_k,
            "bytes_out": self.bytes_out,
            "bytes_in": self.bytes_in,
            "requests": self.requests,
            "row_bytes": self.row_bytes,
            "expected": list(self.expected),
            "as_expected": self.as_expected,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Traffic:
        """Read what :meth:`to_json` wrote; raise ``KeyError``, ``TypeError`` or ``ValueError`` on anything else."""
        return cls(
            workers=int(str(value["workers"])),
            contract=Contract(value["contract"]),
            row=int(str(value["row"])),
            top_k=int(str(value["top_k"])),
            bytes_out=float(str(value["bytes_out"])),
            bytes_in=float(str(value["bytes_in"])),
            requests=float(str(value["requests"])),
        )


def measure_traffic(file: GgufFile, row: int, worker_counts: Sequence[int], *, steps: int = 8) -> tuple[Traffic, ...]:
    """Decode ``steps`` random tokens over local workers and count; ``row`` is the length of a routed row."""
    found = []
    for count in worker_counts:
        with open_fleet(file, uneven_shares(file.moe_layers, file.n_expert, count)) as fleet:
            for contract in CONTRACTS:
                with fleet.connect(contract, n_ctx=_PROMPT + steps) as star:
                    found.append(_measure(star, contract, count, row, file.top_k, steps))
    return tuple(found)


def _measure(star: Star, contract: Contract, count: int, row: int, top_k: int, steps: int) -> Traffic:
    tokens = random_tokens(star.model.n_vocab, _PROMPT + steps, seed=3)
    star.session.decode(tokens[:_PROMPT])
    before, rows_before = star.counters(), sum(star.rows_by_worker().values())
    for token in tokens[_PROMPT:]:
        star.session.decode([token])
    spent = star.counters() - before
    rows = sum(star.rows_by_worker().values()) - rows_before
    calls = spent.round_trips
    return Traffic(count, contract, row, top_k, spent.bytes_out / calls, spent.bytes_in / calls, rows / calls)
