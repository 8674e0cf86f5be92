"""Say in one frozen value what a model file holds; `linkcpp model inspect` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_manifest import format_shares, is_expert_tensor
from orchestrator.types import format_ranges


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model's shape: all sizes in bytes, ``types`` count tensors, ``expert_types`` only the routed experts'."""

    name: str
    architecture: str
    files: tuple[Path, ...]
    n_bytes: int
    n_layer: int
    moe_layers: tuple[int, ...]
    n_expert: int
    top_k: int
    expert_bytes: tuple[int, ...]  # of one expert, per MoE layer
    expert_types: Mapping[str, int]
    types: Mapping[str, int]
    n_tensors: int
    absent_tensors: int
    held: tuple[tuple[str, str], ...]  # (layers, experts) in the file, as ranges
    n_ctx_train: int
    n_embd: int
    is_slice: bool
    has_chat_template: bool
    header_sha256: str

    @classmethod
    def of(cls, model: GgufFile) -> Inspection:
        """Collect the facts of an opened model, those of absent tensors from its manifest."""
        shapes = model.manifest.values()
        return cls(
            name=model.name,
            architecture=model.architecture,
            files=model.files,
            n_bytes=model.n_bytes,
            n_layer=model.n_layer,
            moe_layers=model.moe_layers,
            n_expert=model.n_expert,
            top_k=model.top_k,
            expert_bytes=tuple(model.bytes_per_expert(layer) for layer in model.moe_layers),
            expert_types=dict(Counter(shape.type.name for shape in shapes if is_expert_tensor(shape.name))),
            types=dict(Counter(shape.type.name for shape in shapes)),
            n_tensors=len(model.manifest),
            absent_tensors=len(model.manifest) - len(model.tensors),
            held=tuple(
                (layers, experts) for layers, _, experts in (t.partition(":") for t in format_shares(model.shares))
            ),
            n_ctx_train=model.number("context_length", 0),
            n_embd=model.number("embedding_length", 0),
            is_slice=model.is_slice,
            has_chat_template="tokenizer.chat_template" in model.metadata,
            header_sha256=model.header_sha256,
        )

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all routed experts of all layers: what workers can take over."""
        return self.n_expert * sum(self.expert_bytes)

    def to_json(self) -> dict[str, object]:
        """Return the facts as a JSON object."""
        return {
            "name": self.name,
            "architecture": self.architecture,
            "files": [str(path) for path in self.files],
            "bytes": self.n_bytes,
            "layers": self.n_layer,
            "moe_layers": list(self.moe_layers),
            "experts": self.n_expert,
            "top_k": self.top_k,
            "bytes_per_expert": dict(zip(map(str, self.moe_layers), self.expert_bytes, strict=True)),
            "expert_bytes": self.all_expert_bytes,
            "expert_types": dict(self.expert_types),
            "types": dict(self.types),
            "tensors": self.n_tensors,
            "absent_tensors": self.absent_tensors,
            "held": [{"layers": layers, "experts": experts} for layers, experts in self.held],
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "chat_template": self.has_chat_template,
            "header_sha256": self.header_sha256,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as lines for people."""
        rows = [
            ("name", self.name),
            ("architecture", self.architecture),
            ("files", ", ".join(path.name for path in self.files)),
            ("size", size_text(self.n_bytes)),
            ("layers", str(self.n_layer)),
            ("context", f"{self.n_ctx_train} tokens"),
            ("row length", str(self.n_embd)),
            ("tensors", f"{self.n_tensors} ({_counts(self.types)})"),
            ("chat template", "yes" if self.has_chat_template else "no"),
        ]
        if self.is_slice:
            rows.append(("slice", f"{self.absent_tensors} of the tensors are not in this file"))
        if not self.moe_layers:
            return [*rows, ("experts", "none: a dense model")]
        per_expert = " to ".join(dict.fromkeys(map(size_text, (min(self.expert_bytes), max(self.expert_bytes)))))
        return [
            *rows,
            ("MoE layers", f"{format_ranges(self.moe_layers)} ({len(self.moe_layers)})"),
            ("experts", f"{self.n_expert}, top-{self.top_k}"),
            *[("experts here", f"{experts} of layers {layers}") for layers, experts in self.held if self.is_slice],
            ("expert types", _counts(self.expert_types)),
            ("one expert", f"{per_expert} per layer"),
            ("all experts", f"{size_text(self.all_expert_bytes)} in all layers"),
        ]


def size_text(count: int) -> str:
    """Write a number of bytes in decimal units with three digits: ``98.4 MB``."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007 - the unit at which the loop ends is the result
        value /= 1000
        if value < 999.5:
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _counts(types: Mapping[str, int]) -> str:
    ordered = sorted(types.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} x {name}" for name, count in ordered)
