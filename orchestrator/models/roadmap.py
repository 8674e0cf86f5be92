"""The catalogue with everything that is derived from it, as one frozen value per model; `linkcpp models` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.errors import ModelFileError
from orchestrator.models.catalog import Catalog, Standing
from orchestrator.models.catalog_rows import HubSource, ModelRow, PackageSource, UpcycleSource
from orchestrator.models.footprint import (
    GIB,
    Footprint,
    ModelShape,
    declared_footprint,
    differences,
    file_footprint,
)
from orchestrator.models.gguf import GgufFile
from orchestrator.models.inspection import size_text

ROADMAP_BITS = 4.5
"""Bits per weight at which the roadmap counts an expert, whatever the file has."""


@dataclass(frozen=True, slots=True)
class RoadmapEntry:
    """A model and its figures; ``file`` is set where they come from a file on this machine."""

    row: ModelRow
    shape: ModelShape
    standing: Standing
    footprint: Footprint
    tokens: int
    memory: float  # bytes of one machine
    file: GgufFile | None
    problem: str = ""  # why a file that is there was not believed

    @property
    def machines(self) -> int | None:
        """Machines of the asked size that a star needs; ``None`` where the first cannot hold its part."""
        return self.footprint.machines(self.memory)

    def to_json(self) -> dict[str, object]:
        """Return the entry as a JSON object; sizes in bytes."""
        shape, footprint = self.shape, self.footprint
        sizes = footprint.expert_bytes.values()
        return {
            "name": self.row.name,
            "title": self.row.title,
            "license": self.row.license or None,
            "status": self.standing.status,
            "status_since": self.standing.since or None,
            "status_engine": self.standing.engine or None,
            "status_note": self.standing.note or None,
            "contract": self.row.contract.value,
            "source": _source_json(self.row),
            "present": self.row.is_present,
            "path": str(self.row.path),
            "architecture": shape.architecture,
            "hidden_size": shape.n_embd,
            "layers": shape.n_layer,
            "moe_layers": len(shape.moe_layers),
            "dense_lead_layers": shape.n_lead,
            "experts": shape.n_expert,
            "top_k": shape.top_k,
            "expert_ffn": shape.n_ff_exp,
            "expert_row": shape.row_length,
            "shared_experts": shape.n_shared,
            "vocabulary": shape.n_vocab,
            "context_length": shape.n_ctx_train,
            "prediction_layers": shape.n_mtp,
            "parameters": round(self.row.parameters * 1e9) or None,
            "parameters_per_expert": shape.parameters_per_expert,
            "quant": self.row.quant,
            "from_file": self.file is not None,
            "problem": self.problem or None,
            "bytes_per_expert": footprint.mean_expert_bytes,
            "bytes_per_expert_min": min(sizes),
            "bytes_per_expert_max": max(sizes),
            "bytes_per_expert_at_4_5_bits": round(shape.parameters_per_expert * ROADMAP_BITS / 8),
            "routed_bytes": footprint.routed_bytes,
            "other_bytes": footprint.other_bytes,
            "wire_bytes_per_token_and_layer": dict(footprint.wire),
            "context": {
                "tokens": self.tokens,
                "bytes": footprint.context_bytes,
                "is_lower_bound": shape.has_more_state,
            },
            "fleet": {"memory_gib": self.memory / GIB, "machines": self.machines},
        }

    def cells(self) -> tuple[str, ...]:
        """Return the entry as a line of the table with :data:`COLUMNS`."""
        shape, footprint = self.shape, self.footprint
        wire = footprint.wire
        context = "not public"
        if footprint.context_bytes is not None:
            context = ("> " if shape.has_more_state else "") + size_text(footprint.context_bytes)
        status = self.standing.status
        if self.standing.since:
            status += f" ({self.standing.since[:10]})"
        return (
            self.row.name,
            status,
            "yes" if self.row.is_present else "no",
            shape.architecture,
            f"{shape.n_expert} x {len(shape.moe_layers)}, top-{shape.top_k}",
            "its file" if self.file is not None else self.row.quant,
            size_text(footprint.mean_expert_bytes),
            size_text(footprint.routed_bytes),
            " / ".join(f"{wire[name] / 1000:.1f}" for name in ("exact", "sum", "sum-f16", "sum-q8")),
            context,
            "the first is too small" if self.machines is None else str(self.machines),
        )


def columns(tokens: int, memory: float) -> tuple[str, ...]:
    """Return the titles of the table's columns."""
    return (
        "name",
        "status",
        "here",
        "architecture",
        "experts x layers",
        "types",
        "one expert",
        "all experts",
        "kB per token and layer (exact / sum / f16 / int8)",
        f"context of {tokens}",
        f"machines of {memory / GIB:g} GiB",
    )


def roadmap(catalog: Catalog, *, tokens: int, memory: float) -> list[RoadmapEntry]:
    """Derive the figures of every model of the catalogue that has experts."""
    return [_entry(catalog, row, row.shape, tokens, memory) for row in catalog.rows.values() if row.shape is not None]


def _entry(catalog: Catalog, row: ModelRow, shape: ModelShape, tokens: int, memory: float) -> RoadmapEntry:
    file, problem = _file(row, shape)
    footprint = (
        declared_footprint(shape, row.quant, row.parameters * 1e9, tokens)
        if file is None
        else file_footprint(shape, file, tokens)
    )
    return RoadmapEntry(row, shape, catalog.standing(row.name), footprint, tokens, memory, file, problem)


def _file(row: ModelRow, shape: ModelShape) -> tuple[GgufFile | None, str]:
    if not row.is_present:
        return None, ""
    try:
        file = GgufFile.open(row.path)
        wrong = differences(shape, file)
    except ModelFileError as error:
        return None, str(error)
    return (None, f"{row.path}: {'; '.join(wrong)}") if wrong else (file, "")


def _source_json(row: ModelRow) -> Mapping[str, object] | None:
    source = row.source
    if isinstance(source, HubSource):
        return {
            "kind": "huggingface",
            "repository": source.repository,
            "file": source.file,
            "revision": source.revision,
        }
    if isinstance(source, UpcycleSource):
        return {"kind": "upcycle", "base": source.base}
    if isinstance(source, PackageSource):
        return {"kind": "pypi", "package": source.package, "version": source.version}
    return None
