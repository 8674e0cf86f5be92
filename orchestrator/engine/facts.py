"""The facts of a model that a plan is made from: sizes from the file, cuts from the engine's graph of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from orchestrator.engine.context import INVARIANT_ROWS
from orchestrator.engine.model import Model
from orchestrator.engine.survey import survey
from orchestrator.models.caches import LayerCache, context_cells, layer_caches
from orchestrator.models.deployment import Deployment
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_manifest import TensorShape, expert_count, is_expert_tensor
from orchestrator.planner.inventory import Cut, Layer, Load, ModelFacts

_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_OUTPUT: Final = re.compile(r"(output|dense_|cls)")
_SINGLE: Final = 4  # bytes of F32


def load_of(n_ctx: int, n_sequences: int = 1) -> Load:
    """Return the load of a context as the engine rounds it."""
    return Load(context_cells(n_ctx), n_sequences)


def ring_rows(deployment: Deployment) -> int:
    """Return the micro-batch that all processes of a ring can have: an even one where experts are computed elsewhere.

    There a model with recurrent state keeps a twin of its one sequence, and its micro-batch is a multiple of two.
    """
    has_twins = bool(deployment.workers) and deployment.sequences == 1
    return INVARIANT_ROWS // 2 * 2 if has_twins else INVARIANT_ROWS


def model_facts(path: str | Path, load: Load, *, rows: int = INVARIANT_ROWS) -> ModelFacts:
    """Read a model's header and survey its cuts; no weights are read. ``rows`` is the micro-batch.

    Raises :class:`ModelFileError` for the file, :class:`EngineError` where there is no engine to survey it.
    """
    file = GgufFile.open(path)
    with Model.open(path, without_experts=True) as model:
        cuts = tuple(Cut(cut.layer, cut.bytes_per_token, cut.reason) for cut in survey(model))
        n_layer = model.n_layer
    return file_facts(file, load, cuts, n_layer=n_layer, rows=rows)


def file_facts(
    file: GgufFile, load: Load, cuts: tuple[Cut, ...] = (), *, n_layer: int | None = None, rows: int = INVARIANT_ROWS
) -> ModelFacts:
    """Collect what the header says; prediction (MTP) layers from ``n_layer`` on count to the last one before them."""
    count = file.n_layer if n_layer is None else n_layer
    own: list[list[TensorShape]] = [[] for _ in range(count)]
    inputs: list[TensorShape] = []
    outputs: list[TensorShape] = []
    for name, entry in file.manifest.items():
        match = _LAYER.match(name)
        if match is not None:
            own[min(int(match[1]), count - 1)].append(entry)
        else:
            (outputs if _OUTPUT.match(name) else inputs).append(entry)
    if "output.weight" not in file.manifest:  # the output layer is the embedding, which the last stage holds too
        outputs += [entry for entry in inputs if entry.name == "token_embd.weight"]
    vocabulary = file.manifest["token_embd.weight"].shape[1] if "token_embd.weight" in file.manifest else 0
    caches = layer_caches(file)
    rows = max(rows // load.sequences * load.sequences, load.sequences)
    return ModelFacts(
        name=file.name,
        layers=tuple(_layer(file, tensors, cache) for tensors, cache in zip(own, caches[:count], strict=True)),
        input_weights=_bytes(inputs),
        output_weights=_bytes(outputs),
        output_read=_bytes(outputs),
        cuts=cuts,
        scratch=_scratch(file, load, rows),
        output_scratch=2 * _SINGLE * rows * vocabulary,  # logits of a micro-batch, in the graph and as its result
        n_expert=file.n_expert,
    )


def _layer(file: GgufFile, tensors: list[TensorShape], cache: LayerCache) -> Layer:
    experts = [entry for entry in tensors if is_expert_tensor(entry.name)]
    weights, routed = _bytes(tensors), _bytes(experts)
    chosen = sum(
        entry.n_bytes * min(1.0, file.top_k / max(1, expert_count(entry.name, entry.shape))) for entry in experts
    )
    return Layer(weights, routed, cache.per_token, cache.per_sequence, weights - routed + int(chosen), int(chosen))


def _scratch(file: GgufFile, load: Load, rows: int) -> int:
    """Bound what the engine allocates for the values of a graph (the tests hold it against the engine's log)."""
    width = file.number("embedding_length", 0)
    streams = max(1, file.number("hyper_connection.count", 1))
    heads = _largest(file, "attention.head_count")
    head = max(
        width // max(heads, 1),
        *(
            _largest(file, key)
            for key in ("attention.key_length", "attention.value_length", "attention.key_length_mla")
        ),
    )
    top_k = max(1, file.top_k)
    inner = max(_largest(file, "feed_forward_length"), top_k * _largest(file, "expert_feed_forward_length"))
    values = rows * (8 * width * streams + 3 * inner + top_k * width + 6 * heads * head)
    # masks, twice where layers have windows; scores of all heads where the engine cannot fuse them
    cells = load.cells * load.sequences
    scores = (
        _largest(file, "attention.indexer.head_count") + 4 if _largest(file, "attention.indexer.head_count") else 0
    )
    scores += heads if file.architecture == "grok" else 0
    return _SINGLE * (values + rows * cells * scores) + 12 * rows * load.cells


def _largest(file: GgufFile, key: str) -> int:
    """Return a whole number of the metadata, the largest where it is given for each layer; 0 where it is missing."""
    value = file.metadata.get(f"{file.architecture}.{key}")
    if isinstance(value, list):
        return max((item for item in value if isinstance(item, int)), default=0)
    return value if isinstance(value, int) else 0


def _bytes(tensors: list[TensorShape]) -> int:
    return sum(entry.n_bytes for entry in tensors)
