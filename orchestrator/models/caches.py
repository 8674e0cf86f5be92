"""What the engine's caches take per layer, read from the shapes of a model's tensors.

Attention keeps a row of keys and a row of values per token in F16; latent attention keeps one shared row, sparse
attention the keys of its indexer too. Recurrent layers keep a state of constant size per sequence in F32. Sliding
windows save nothing: the engine keeps the whole context of such layers, so that sequences can be cut.

The tests hold these figures against what the engine allocates for every architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_manifest import Shape4

CELL_STEP: Final = 256
"""The engine rounds the tokens of a sequence's cache up to a multiple of this."""

_HALF, _SINGLE = 2, 4  # bytes of F16 and F32
_NO_CACHE: Final = frozenset({"nomic-bert-moe", "llada-moe", "rnd1"})  # they read the whole text at once


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Bytes that one layer keeps: for each token of each sequence, and for each sequence whatever its length."""

    per_token: int
    per_sequence: int


def layer_caches(model: GgufFile) -> tuple[LayerCache, ...]:
    """Return the caches of all layers; for an attention that is not recognised a bound from above."""
    shapes: list[dict[str, Shape4]] = [{} for _ in range(model.n_layer)]
    for name, entry in model.manifest.items():
        prefix, _, rest = name.partition(".")
        number, _, tail = rest.partition(".")
        if prefix == "blk" and number.isdecimal() and int(number) < model.n_layer:
            shapes[int(number)][tail] = entry.shape
    with_keys = model.n_layer - model.number("attention.shared_kv_layers", 0)
    caches = []
    for layer, own in enumerate(shapes):
        if "attn_kv.weight" in own and "hc_attn_fn.weight" in own:
            caches.append(_compressed(model, layer, own))
        else:
            caches.append(
                LayerCache(_attention(model, layer, own) if layer < with_keys else 0, _recurrent(model, layer, own))
            )
    return tuple(caches)


def context_cells(n_ctx: int) -> int:
    """Return how many tokens the engine makes room for where ``n_ctx`` are asked."""
    return -(-n_ctx // CELL_STEP) * CELL_STEP


def _is_linear(model: GgufFile, layer: int, shapes: Mapping[str, Shape4]) -> bool:
    """Tell whether a layer mixes tokens by a recurrent state instead of attention."""
    if any(name.startswith(("ssm_", "shortconv.")) for name in shapes):
        return "attn_k.weight" not in shapes or "ssm_conv1d_q.weight" in shapes
    interval = model.number("full_attention_interval", 0)
    return interval > 0 and (layer + 1) % interval != 0 and "attn_k.weight" not in shapes


def _attention(model: GgufFile, layer: int, shapes: Mapping[str, Shape4]) -> int:
    if model.architecture in _NO_CACHE or _is_linear(model, layer, shapes):
        return 0
    if not any(name.startswith("attn_") and name.endswith(".weight") for name in shapes):
        return 0
    latent = shapes.get("attn_kv_a_mqa.weight")
    if latent is not None:
        row = latent[1]  # keys and values are one row
    elif "attn_k.weight" in shapes:
        values = shapes.get("attn_v.weight", shapes["attn_k.weight"])
        row = shapes["attn_k.weight"][1] + values[1]
    else:
        row = _row_of_metadata(model, layer)
    return _HALF * (row + _indexer(model, layer, shapes))


def _row_of_metadata(model: GgufFile, layer: int) -> int:
    """Return keys and values of a layer whose projections are fused: heads times their lengths."""
    heads = _per_layer(model, "attention.head_count", layer, 1)
    key_heads = _per_layer(model, "attention.head_count_kv", layer, heads)
    length = model.number("embedding_length", 0) // max(heads, 1)
    key = model.number("attention.key_length", length)
    value = model.number("attention.value_length", length)
    return key_heads * (key + value)


def _indexer(model: GgufFile, layer: int, shapes: Mapping[str, Shape4]) -> int:
    """Return the cached elements of a sparse attention's indexer, 0 where a layer owns none."""
    keys = shapes.get("indexer.attn_k.weight") or shapes.get("indexer.k_proj.weight")
    if keys is None or not _per_layer(model, "attention.indexer.types", layer, 1):
        return 0
    row = keys[1]
    if model.number("attention.indexer.kpool", 0):
        row *= 3  # pooled keys and their gates besides
    if "attention.indexer.block_size" in _keys(model):
        row += _value_length(model)  # the cache of keys has a row of values there that nothing uses
    return row


def _value_length(model: GgufFile) -> int:
    heads = max(_per_layer(model, "attention.head_count", 0, 1), 1)
    return model.number("attention.value_length", model.number("embedding_length", 0) // heads)


def _compressed(model: GgufFile, layer: int, shapes: Mapping[str, Shape4]) -> LayerCache:
    """Return the caches of an attention over raw rows and rows that stand for several tokens (deepseek4)."""
    row = shapes["attn_kv.weight"][1]
    if "attention.compress_ratios" not in _keys(model):
        return LayerCache(_HALF * 2 * row, 0)
    ratio = _per_layer(model, "attention.compress_ratios", layer, 0)
    per_token, per_sequence = float(row), 0
    if ratio:
        indexed = "indexer.proj.weight" in shapes
        key = model.number("attention.indexer.key_length", 0) if indexed else 0
        per_token += (row + key) / ratio
        # the compressor's window: twice as wide and as long where compressed rows overlap, which they do if indexed
        overlap = 4 if indexed else 1
        per_sequence = _HALF * CELL_STEP * (row + key) + 2 * _SINGLE * overlap * ratio * (row + key)
    return LayerCache(int(_HALF * per_token), per_sequence)


def _keys(model: GgufFile) -> frozenset[str]:
    prefix = model.architecture + "."
    return frozenset(key[len(prefix) :] for key in model.metadata if key.startswith(prefix))


def _recurrent(model: GgufFile, layer: int, shapes: Mapping[str, Shape4]) -> int:
    """Return the bytes of a layer's convolution window and state."""
    if not (_is_linear(model, layer, shapes) or any(name.startswith("ssm_") for name in shapes)):
        return 0
    kernel = model.number("ssm.conv_kernel", 0)
    heads = _per_layer(model, "attention.head_count", layer, 1)
    if "shortconv.conv.weight" in shapes:
        window, channels = shapes["shortconv.conv.weight"][:2]
        return _SINGLE * (window - 1) * channels
    if "ssm_conv1d_q.weight" in shapes:
        head = model.number("kda.head_dim", 0)
        return _SINGLE * heads * head * (3 * (kernel - 1) + head)
    inner, state = model.number("ssm.inner_size", 0), model.number("ssm.state_size", 0)
    if inner:
        channels = shapes["ssm_conv1d.weight"][1] if "ssm_conv1d.weight" in shapes else inner
        history = shapes.get("ple_conv1d.weight")
        window = model.number("ple.ngram_size", 1) * (kernel - 1) * history[1] if history is not None else 0
        return _SINGLE * ((kernel - 1) * channels + inner * state + window)
    head = model.number("embedding_length", 0) // max(heads, 1)
    return _SINGLE * heads * head * head  # linear attention: one square of state per head


def _per_layer(model: GgufFile, key: str, layer: int, default: int) -> int:
    """Return a whole number that the metadata gives once, or once for each layer."""
    value = model.metadata.get(f"{model.architecture}.{key}")
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else value[-1] if value else default
    return int(value) if isinstance(value, (int, bool)) else default
