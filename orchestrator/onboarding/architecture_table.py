"""Write the findings about architectures as tables: for the terminal, and as a page of the documentation. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.onboarding.architecture_results import ArchitectureResult
from orchestrator.onboarding.findings import WorkerCountResult
from orchestrator.types import Contract

COLUMNS: Final = (
    "architecture",
    "MoE layers",
    "hook calls per layer",
    "descriptor",
    "exact",
    "sum",
    "batch-invariant",
    "cuts",
    "notes",
)
"""Column titles of :func:`rows`."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a page says about its own making."""

    command: str
    engine: str
    isa: str
    date: str  # ISO 8601
    denominator: str


def rows(results: Iterable[ArchitectureResult]) -> list[tuple[str, ...]]:
    """Make one row per architecture that a model can be made of."""
    return [_row(result) for result in results if result.built]


def count_line(results: Sequence[ArchitectureResult]) -> str:
    """Say how many passed."""
    built = [result for result in results if result.built]
    passed = sum(result.passed for result in built)
    return f"{passed} of {len(built)} pass `exact`"


def document(
    architectures: Sequence[ArchitectureResult], shapes: Sequence[ArchitectureResult], made: Provenance
) -> str:
    """Write the page. What is here comes from the findings alone: a test holds it against the recipes."""
    failed = [result for result in (*architectures, *shapes) if result.failed]
    parts = [
        _INTRODUCTION,
        f"Made by `{made.command}` on {made.date[:10]} with engine `{made.engine}` on {made.isa}.",
        "## Every architecture with experts",
        f"{made.denominator}. **{count_line(architectures)}** ({_counts(architectures)}). {_cut_line(architectures)}",
        _markdown(COLUMNS, rows(architectures)),
        "### No experts in any file",
        "Their graph has a branch for experts, and their loader never takes it:",
        "\n".join(f"- `{result.architecture}`: {result.reason}" for result in architectures if not result.built),
        "## Shapes of known models",
        _SHAPES if shapes else "None was tried yet: `linkcpp onboard --all-shapes`.",
    ]
    if shapes:
        parts += [f"**{count_line(shapes)}**.", _markdown(_SHAPE_COLUMNS, [_shape_row(result) for result in shapes])]
    if failed:
        parts += ["## What failed", "\n".join(f"- `{result.name}`: {result.reason}" for result in failed)]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION: Final = """\
# Architectures

Every row is a small model with random weights, made from metadata alone (`linkcpp model synth ARCHITECTURE`), and
put through the gate of [numbers.md](numbers.md) over real worker processes: six prompts, prefill and decode steps,
every logit of every position compared with one process.

- **MoE layers**: layers of that small model whose experts are remote. **Hook calls per layer**: how often the graph
  asks for experts in one layer.
- **descriptor**: what a worker must know besides the weights, as the graph of this architecture says it: activation;
  gate and up matrices in one tensor or no gate at all; a clamp; router weights applied before the expert instead of
  behind it; bias and scale tensors that the architecture passes.
- **exact**: bytes of all logits equal, at these numbers of workers. **sum**: passed or not at the same numbers, and
  the smallest cosine at the largest of them. Random weights route chaotically: next to a tie between two experts a
  last bit decides, so cosines here are far lower than those of trained models; the noise floor of each model, which
  is the yardstick, is just as low.
- **batch-invariant**: bytes of one sequence do not depend on how its tokens are grouped. Where they do, `exact`
  holds for equal grouping.
- **cuts**: places where two stages gave every byte of one process (prefill and single steps), of those where the
  graph can be cut; the others with the reason."""

_SHAPES: Final = """\
The true number of layers, experts, top-k, shared experts and dense lead layers and the true attention pattern and
router of a published model, with narrow rows (`linkcpp model synth ARCHITECTURE --like NAME`). Bytes are counted at
the backbone's sockets in decode steps, both directions and all workers together; each figure is what the protocol's
frames need for these rows, byte for byte. Rows of 32 values make the frames' own bytes a large part of it."""

_TRAFFIC: Final = "bytes per token and layer: exact, sum"
_SHAPE_COLUMNS: Final = (
    "model",
    "architecture",
    "MoE layers",
    "experts",
    "top-k",
    "exact",
    "sum",
    _TRAFFIC,
)


def _row(result: ArchitectureResult) -> tuple[str, ...]:
    descriptors = result.descriptors
    return (
        result.architecture,
        "-" if descriptors is None else str(descriptors.layers),
        "-" if descriptors is None else str(descriptors.calls),
        "-" if descriptors is None else descriptors.words(),
        _exact(result),
        _sum(result),
        _invariance(result),
        "-" if result.cuts is None else result.cuts.words(),
        _notes(result),
    )


def _shape_row(result: ArchitectureResult) -> tuple[str, ...]:
    descriptors = result.descriptors
    figures = (
        ("-", "-", "-") if descriptors is None else (descriptors.layers, descriptors.n_expert, descriptors.top_k)
    )
    return (
        result.name,
        result.architecture,
        *map(str, figures),
        _exact(result),
        _sum(result),
        _traffic(result),
    )


def _traffic(result: ArchitectureResult) -> str:
    """Give the bytes at the largest number of workers, and say where they are not what the protocol needs."""
    most = max((each.workers for each in result.traffic), default=0)
    cells = [
        f"{each.bytes_out + each.bytes_in:.0f}{'' if each.as_expected else ' (UNEXPECTED)'}"
        for each in result.traffic
        if each.workers == most
    ]
    return f"{', '.join(cells)} ({most} workers)" if cells else "-"


def _exact(result: ArchitectureResult) -> str:
    cells = _cells(result, Contract.EXACT)
    if not cells:
        return "FAILED" if result.tried else "not tried"
    return ", ".join(f"{count}: {'identical' if cell.passed else 'FAILED'}" for count, cell in cells)


def _sum(result: ArchitectureResult) -> str:
    cells = _cells(result, Contract.SUM)
    if not cells:
        return "-"
    verdicts = ", ".join(f"{count}: {'passed' if cell.passed else 'not passed'}" for count, cell in cells)
    return f"{verdicts} ({_cosine(cells[-1][1].cosine_min)})"


def _cells(result: ArchitectureResult, contract: Contract) -> list[tuple[int, WorkerCountResult]]:
    return [] if result.record is None else sorted(result.record.contracts.get(contract, {}).items())


def _cosine(value: float) -> str:
    """Write a cosine so that 0.99999 does not become 1."""
    return "1" if value == 1.0 else f"{min(value, 0.999999):.6f}".rstrip("0")


def _invariance(result: ArchitectureResult) -> str:
    if result.whole_text:
        return "-"
    one = None if result.record is None else result.record.invariance.one
    return "-" if one is None else "yes" if one else "no"


def _notes(result: ArchitectureResult) -> str:
    descriptors = result.descriptors
    notes = [result.reason] if result.failed else []
    if result.embeds:
        notes.append("gives embeddings, which are compared instead of logits")
    if result.whole_text:
        notes.append("reads the whole text at once")
    if result.hybrid:
        notes.append("recurrent layers")
    if descriptors is not None and descriptors.calls > 1:
        notes.append(f"{descriptors.calls} groups of experts in each layer")
    if descriptors is not None and descriptors.weight_before_ffn:
        notes.append("weights travel with the rows")
    notes += [f"sum over {count}: {cell.reason}" for count, cell in _cells(result, Contract.SUM) if not cell.passed]
    return "; ".join(notes)


def _counts(results: Sequence[ArchitectureResult]) -> str:
    counts = sorted({count for result in results for count, _ in _cells(result, Contract.EXACT)})
    words = " and ".join(str(count) for count in counts) or "no"
    return f"byte-identical over {words} workers"


def _cut_line(results: Sequence[ArchitectureResult]) -> str:
    found = [result.cuts for result in results if result.cuts is not None]
    identical = sum(len(cuts.identical) for cuts in found)
    legal = identical + sum(len(cuts.different) for cuts in found)
    able = sum(bool(cuts.identical or cuts.different) for cuts in found)
    return f"{able} of {len(found)} can be cut, at {legal} places: {identical} gave the bytes of one process."


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join(
        [*head, *(f"| {' | '.join(cell or ' ' for cell in line)} |".replace("|  ", "| ") for line in lines)]
    )
