"""The model that a bench measures with: the default one is fetched and made where it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from orchestrator.models.catalog import resolve_model
from orchestrator.models.gguf_writer import Progress
from orchestrator.models.sources import get_model

DEFAULT_MODEL: Final = "smollm2-moe"


def bench_model(model: str, progress: Progress) -> Path:
    """Return the model's file; raises what :func:`resolve_model` and :func:`get_model` raise."""
    return get_model(model, progress=progress) if model == DEFAULT_MODEL else resolve_model(model)
