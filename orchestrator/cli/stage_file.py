"""The model's file for a process that holds some layers: a local one, or a share downloaded from a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.cli.app import Terminal
from orchestrator.models.catalog import locate, resolve_model
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_writer import Progress
from orchestrator.models.slices import Selection
from orchestrator.ring.layout import LayerRange, merge


def is_remote(model: str) -> bool:
    """Tell whether a model would have to be downloaded."""
    return not isinstance(locate(model), Path)


def stage_file(
    terminal: Terminal,
    model: str,
    ranges: Sequence[LayerRange],
    *,
    without_experts: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the model's file; of a model on a server a file with these layers only, downloaded where needed.

    ``progress`` hears of a download, beside the terminal.

    Embeddings come with the first layers and the output with the last, which need the embeddings too where they are
    one. No known architecture uses either elsewhere; a graph that did would be refused by the tensor's name.
    """

    def choose(file: GgufFile) -> Selection:
        held = merge(ranges, file.n_layer)
        is_end = held[-1].last >= file.n_layer - file.number("nextn_predict_layers", 0)
        is_tied = is_end and "output.weight" not in file.manifest
        without = () if is_end else ("output*",)
        if held[0].first > 0 and not is_tied:
            without = (*without, "token_embd.*")
        layers = tuple(layer for found in held for layer in range(found.first, found.last))
        experts = without_experts and any(layer in file.moe_layers for layer in layers)
        return Selection(layers=layers, without_experts=experts, without=without)

    name = " ".join(f"{found.first}:{found.last}" for found in ranges) + " without experts" * without_experts
    return _local_or_share(terminal, model, choose, name, progress)


def tokenizer_file(terminal: Terminal, model: str) -> Path:
    """Return the model's file; of a model on a server one with little more than its metadata."""
    choose = Selection(layers=(0,), without=("output*", "token_embd.*", "blk.*exps.*", "per_layer*"))
    return _local_or_share(terminal, model, lambda _file: choose, "tokenizer")


def _local_or_share(
    terminal: Terminal,
    model: str,
    choose: Callable[[GgufFile], Selection],
    name: str,
    listener: Progress | None = None,
) -> Path:
    location = locate(model)
    if isinstance(location, Path):
        return resolve_model(location)
    from orchestrator.models.fetch import fetch_share  # loads the HTTP client, which a local file does not need

    with terminal.progress("fetching layers") as show:

        def both(done: float, total: float | None, note: str = "") -> None:
            show(done, total, note)
            if listener is not None:
                listener(done, total, note)

        return fetch_share(location, choose, name=name, progress=both, warn=terminal.error)
