"""The gate over quantisation types: are the bytes of a star equal for every type that experts come in?

Each type is a job in a process of its own (:mod:`orchestrator.onboarding.one_quant`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.config import cache_dir
from orchestrator.engine.synth_quantize import QUANTISED_TYPES
from orchestrator.errors import ConfigError, InputError
from orchestrator.onboarding.children import JobFailedError, run_job
from orchestrator.onboarding.meter import Progress
from orchestrator.onboarding.quant_cases import BODIES, MIX, SETTINGS, bodies_for

TYPES: Final = (*QUANTISED_TYPES, MIX)
"""Every type tried, in the table's order."""

BEGIN: Final = "<!-- quantisation types: begin (made by `linkcpp onboard --all-quants --table FILE`) -->"
END: Final = "<!-- quantisation types: end -->"

_JOB: Final = "orchestrator.onboarding.one_quant"
_LARGEST_SECONDS: Final = 1800.0
_NEED_IMPORTANCE: Final = ("IQ1", "IQ2")


@dataclass(frozen=True, slots=True)
class QuantCell:
    """One body in one setting. ``like_first_setting``: one process gave the bytes that it gives as it serves."""

    body: str
    setting: str
    byte_identical: bool
    positions: int
    differing: int
    max_difference: float
    like_first_setting: bool

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> QuantCell:
        """Read a cell of a job's answer; raise ``KeyError`` or ``TypeError`` on anything else."""
        return cls(**{name: value[name] for name in cls.__dataclass_fields__})  # type: ignore[arg-type]

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class QuantResult:
    """All cells of one type; ``reason`` says what failed, or how much was compared."""

    type_name: str
    cells: tuple[QuantCell, ...]
    reason: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Tell whether every cell was byte-identical."""
        return bool(self.cells) and all(cell.byte_identical for cell in self.cells)

    @property
    def repacks(self) -> bool:
        """Tell whether repacking changes the bytes of some body: then it is in effect for this type here."""
        return any(not cell.like_first_setting for cell in self.cells if cell.setting == SETTINGS[1].name)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "type": self.type_name,
            "passed": self.passed,
            "reason": self.reason,
            "repacking_changes_bytes": self.repacks,
            "cells": [cell.to_json() for cell in self.cells],
            "seconds": self.seconds,
        }


def run_quants(
    names: Sequence[str], *, progress: Progress | None = None, now: Callable[[], float] = time.monotonic
) -> list[QuantResult]:
    """Judge types (all where ``names`` is empty); raise :class:`InputError` for an unknown one."""
    unknown = [name for name in names if name not in TYPES]
    if unknown:
        raise InputError(f"no type is called {unknown[0]!r}", hint=f"known: {', '.join(TYPES)}")
    chosen = [name for name in TYPES if not names or name in names]
    results = []
    for done, name in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), name)
        results.append(_judge(name, now))
    if progress is not None:
        progress(len(chosen), len(chosen), "done")
    return results


def _judge(name: str, now: Callable[[], float]) -> QuantResult:
    begin = now()
    with tempfile.TemporaryDirectory(prefix="gate-", dir=cache_dir()) as folder:
        try:
            answer = run_job(_JOB, {"type": name}, timeout=_LARGEST_SECONDS, environment={"LINKCPP_CACHE": folder})
        except JobFailedError as error:
            return QuantResult(name, (), str(error), round(now() - begin, 1))
    cells = answer["cells"]
    if not isinstance(cells, list):
        raise TypeError("the job's cells are no list")
    found = tuple(QuantCell.from_json(cell) for cell in cells)
    wrong = [cell for cell in found if not cell.byte_identical]
    reason = f"{sum(cell.positions for cell in found)} positions byte-identical"
    if wrong:
        reason = "; ".join(
            f"{cell.body}, {cell.setting}: {cell.differing} of {cell.positions} positions differ" for cell in wrong
        )
    return QuantResult(name, found, reason, round(now() - begin, 1))


COLUMNS: Final = ("type", *(body.title for body in BODIES), "repacking changes bytes")
"""Column titles of :func:`rows`."""


def rows(results: Sequence[QuantResult]) -> list[tuple[str, ...]]:
    """Make one row per type: the settings in which each body was byte-identical."""
    return [
        (
            result.type_name + (" (importance matrix)" if result.type_name.startswith(_NEED_IMPORTANCE) else ""),
            *(_cell(result, body.name) for body in BODIES),
            ("yes" if result.repacks else "no") if result.cells else "-",
        )
        for result in results
    ]


def section(results: Sequence[QuantResult], *, engine: str, isa: str, date: str) -> str:
    """Write the section of the page, markers included."""
    passed = sum(result.passed for result in results)
    failed = [f"- {result.type_name}: {result.reason}" for result in results if not result.passed]
    settings = ", ".join(f"*{setting.name}*" for setting in SETTINGS)
    lines = [
        BEGIN,
        f"**{passed} of {len(results)} types are byte-identical** under `exact` over three workers with uneven "
        f"shares, in all of: {settings} (engine `{engine}`, {isa}, {date[:10]}).",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in rows(results)),
        *(["", "What failed:", "", *failed] if failed else []),
        END,
    ]
    return "\n".join(lines)


def write_section(path: Path, text: str) -> None:
    """Put the section between the markers of a page; raise :class:`ConfigError` where it has none."""
    try:
        page = path.read_text(encoding="utf-8")
        before, begin, rest = page.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ConfigError(
                f"{path} has no place for the table", hint=f"put these two lines into it: {BEGIN} {END}"
            )
        path.write_text(before + text + after, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _cell(result: QuantResult, body: str) -> str:
    cells = [cell for cell in result.cells if cell.body == body]
    if not cells:
        applies = any(each.name == body for each in bodies_for(result.type_name))
        return "FAILED" if applies else "-"
    wrong = [cell.setting for cell in cells if not cell.byte_identical]
    return f"DIFFERS: {', '.join(wrong)}" if wrong else "identical"
