"""What the gate found about each architecture, as frozen values, as JSON, and kept in the data folder.

One file per architecture (or shape of a known model), in a folder per engine build and instruction set: change
either and everything is tried again. A finding also names what the model was made from, so that a changed recipe
is tried again as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.config import data_dir
from orchestrator.errors import ConfigError
from orchestrator.onboarding.cuts import CutFindings
from orchestrator.onboarding.descriptors import DescriptorSummary
from orchestrator.onboarding.findings import GateRecord
from orchestrator.onboarding.traffic import Traffic
from orchestrator.types import Contract, EngineIdentity

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class ArchitectureResult:
    """One architecture: ``built`` says whether a model of it can be made, ``record`` what the gate then found.

    ``like`` names the known model whose shape was taken. ``source`` is the engine's file with its graph,
    ``recipe`` a hash of what the model was made from, empty where none was made.
    """

    architecture: str
    like: str | None
    source: str
    recipe: str
    built: bool
    reason: str
    seconds: float = 0.0
    record: GateRecord | None = None
    descriptors: DescriptorSummary | None = None
    hybrid: bool = False
    whole_text: bool = False
    embeds: bool = False
    traffic: tuple[Traffic, ...] = ()  # only of shapes
    cuts: CutFindings | None = None  # only of architectures

    @property
    def name(self) -> str:
        """The name in tables: the known model's, or the architecture's."""
        return self.like or self.architecture

    @property
    def passed(self) -> bool:
        """Tell whether ``exact`` was byte-identical at every number of workers tried."""
        return self.record is not None and self.record.passes(Contract.EXACT)

    @property
    def tried(self) -> bool:
        """Tell whether the gate was run, or tried to."""
        return bool(self.recipe)

    @property
    def failed(self) -> bool:
        """Tell whether a model could be made and did not pass, or gave other bytes when it was cut into stages."""
        is_cut_right = self.cuts is None or self.cuts.passed
        return self.built and self.tried and not (self.passed and is_cut_right)

    def covers(self, recipe: str, worker_counts: Sequence[int]) -> bool:
        """Tell whether this is a pass of the same model at these numbers of workers (or more)."""
        tried = self.record.contracts.get(Contract.EXACT, {}) if self.record is not None else {}
        was_cut = self.cuts is not None or self.like is not None
        return self.passed and was_cut and self.recipe == recipe and set(worker_counts) <= set(tried)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object; ``passed``, ``exact`` and ``sum`` repeat what the record says."""
        contracts = self.record.contracts if self.record is not None else {}
        return {
            "format": FORMAT,
            "architecture": self.architecture,
            "like": self.like,
            "passed": self.passed,
            "reason": self.reason,
            "built": self.built,
            "source": self.source,
            "exact": {str(n): cell.passed for n, cell in sorted(contracts.get(Contract.EXACT, {}).items())},
            "sum": {str(n): cell.passed for n, cell in sorted(contracts.get(Contract.SUM, {}).items())},
            "hook_calls_per_layer": None if self.descriptors is None else self.descriptors.calls,
            "moe_layers": None if self.descriptors is None else self.descriptors.layers,
            "descriptor": None if self.descriptors is None else self.descriptors.to_json(),
            "batch_invariant": None if self.record is None else self.record.invariance.one,
            "hybrid": self.hybrid,
            "whole_text": self.whole_text,
            "embeds": self.embeds,
            "traffic": [each.to_json() for each in self.traffic],
            "cuts": None if self.cuts is None else self.cuts.to_json(),
            "seconds": self.seconds,
            "recipe": self.recipe,
            "record": None if self.record is None else self.record.to_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> ArchitectureResult:
        """Read what :meth:`to_json` wrote; raise :class:`ConfigError` on anything else."""
        try:
            if not isinstance(value, Mapping) or value["format"] != FORMAT:
                raise ValueError(f"no result of format {FORMAT}")
            record, descriptors, cuts = value["record"], value["descriptor"], value.get("cuts")
            return cls(
                architecture=str(value["architecture"]),
                like=None if value["like"] is None else str(value["like"]),
                source=str(value["source"]),
                recipe=str(value["recipe"]),
                built=bool(value["built"]),
                reason=str(value["reason"]),
                seconds=float(value["seconds"]),
                record=None if record is None else GateRecord.from_json(record),
                descriptors=None if descriptors is None else DescriptorSummary.from_json(descriptors),
                hybrid=bool(value["hybrid"]),
                whole_text=bool(value["whole_text"]),
                embeds=bool(value["embeds"]),
                traffic=tuple(Traffic.from_json(each) for each in value["traffic"]),
                cuts=None if cuts is None else CutFindings.from_json(cuts),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no result of an architecture: {error!r}") from error


class ResultStore:
    """The findings of one engine: a folder of JSON files."""

    def __init__(self, identity: EngineIdentity) -> None:
        features = hashlib.sha256(identity.isa.encode()).hexdigest()[:8]
        build = re.sub(r"[^A-Za-z0-9.+_]+", "_", identity.build)[:60] or "none"
        self.folder = data_dir() / "architectures" / f"{build}-{features}"

    def load(self, name: str, *, shape: bool = False) -> ArchitectureResult | None:
        """Read the finding about an architecture or shape; None where there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, ConfigError):  # a damaged file is tried again
            return ArchitectureResult.from_json(json.loads(self._path(name, shape).read_text(encoding="utf-8")))
        return None

    def load_all(self, names: Iterable[str], *, shape: bool = False) -> dict[str, ArchitectureResult]:
        """Read the findings that there are."""
        found = ((name, self.load(name, shape=shape)) for name in names)
        return {name: result for name, result in found if result is not None}

    def save(self, result: ArchitectureResult) -> None:
        """Keep a finding, atomically; raise :class:`ConfigError` where the folder cannot be written."""
        path = self._path(result.name, result.like is not None)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(result.to_json(), file, indent=1, ensure_ascii=False, allow_nan=False)
                file.write("\n")
            os.replace(temporary, path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    def _path(self, name: str, shape: bool) -> Path:
        # some models are called like their architecture
        return self.folder / f"{'like-' if shape else ''}{name}.json"
