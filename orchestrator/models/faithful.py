"""Models with the true shape of known large ones: every expert, router and attention pattern, small widths. PURE.

Counts of layers, experts, top-k, shared experts, dense lead layers, router kind and attention pattern are those
of the published configurations; widths are cut so that the largest stays below one gigabyte. Heads are cut in
proportion. Multi-token prediction layers are left out: the engine does not load them for plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.hyperparameters import Dimensions, Keys


def _no_keys(_: Dimensions) -> Keys:
    return {}


@dataclass(frozen=True, slots=True)
class Faithful:
    """The shape of one model; ``keys`` replace those of the architecture's recipe."""

    name: str
    architecture: str
    dimensions: Dimensions
    keys: Callable[[Dimensions], Keys] = _no_keys
    expert_type: GgmlType = GgmlType.F32
    matrix_type: GgmlType = GgmlType.F32


def _small(**sizes: int) -> Dimensions:
    widths = {"n_embd": 32, "head": 16, "n_ff": 64, "n_ff_exp": 32, "n_ff_shexp": 32}
    return Dimensions(**(widths | sizes))


def _step(d: Dimensions) -> Keys:
    # one layer in four attends to everything, the first of each four; the others have half as many heads more
    def full(layer: int) -> bool:
        return layer % 4 == 0

    return {
        "attention.sliding_window_pattern": d.per_layer(lambda layer: int(not full(layer))),
        "attention.head_count": d.per_layer(lambda layer: d.n_head if full(layer) else d.n_head * 3 // 2),
    }


def _deepseek(_: Dimensions) -> Keys:
    return {"expert_group_count": 8, "expert_group_used_count": 4}


def _glm(d: Dimensions) -> Keys:
    # 21 of 78 layers own an indexer, the others share the one before
    return {"attention.indexer.types": d.per_layer(lambda layer: int(layer < 2 or layer % 4 == 2))}


def _kimi_k3(d: Dimensions) -> Keys:
    # latent attention in the last layer of each four and in the very last: 24 of 93
    def latent(layer: int) -> bool:
        return layer % 4 == 3 or layer == d.n_layer - 1

    return {"attention.head_count_kv": d.per_layer(lambda layer: int(latent(layer)))}


def _qwen35_layer(_: Dimensions) -> Keys:
    # the delta net's sizes are assumed; all others are published
    return {"ssm.inner_size": 128 * 64, "ssm.state_size": 128, "ssm.time_step_rank": 64, "ssm.group_count": 16}


_MODELS: Final = (
    Faithful(
        "step-3.7-flash",
        "step35",
        _small(n_layer=45, n_lead=3, n_expert=288, top_k=8, n_head=8, n_head_kv=1, window=512, period=4),
        _step,
    ),
    Faithful(
        "qwen3.5-122b",
        "qwen35moe",
        _small(n_layer=48, n_expert=256, top_k=8, n_head=16, n_head_kv=1, period=4),
    ),
    Faithful(
        "glm-5.2",
        "glm-dsa",
        _small(n_layer=78, n_lead=3, n_expert=256, top_k=8, n_head=8, head=0),
        _glm,
    ),
    Faithful(
        "glm-4.6",
        "glm4moe",
        _small(n_layer=92, n_lead=3, n_expert=160, top_k=8, n_head=12, n_head_kv=1),
    ),
    Faithful(
        "minimax-m2",
        "minimax-m2",
        _small(n_layer=62, n_expert=256, top_k=8, n_head=6, n_head_kv=1),
    ),
    Faithful(
        "deepseek-v3",
        "deepseek2",
        _small(n_layer=61, n_lead=3, n_expert=256, top_k=8, n_head=8, head=0),
        _deepseek,
    ),
    Faithful(
        "kimi-k3",
        "kimi-k3",
        _small(n_layer=93, n_expert=896, top_k=16, n_shared=2, n_head=4, n_embd=64, latent=32, period=4, head=0),
        _kimi_k3,
        expert_type=GgmlType.F16,
    ),
    Faithful(
        "qwen3-235b",
        "qwen3moe",
        _small(n_layer=94, n_expert=128, top_k=8, n_head=16, n_head_kv=1),
    ),
    Faithful(
        "gpt-oss-120b",
        "gpt-oss",
        _small(n_layer=36, n_expert=128, top_k=4, n_head=8, n_head_kv=1, window=128),
    ),
    Faithful(
        "llama-4-maverick",
        "llama4",
        _small(n_layer=48, n_expert=128, top_k=1, n_head=5, n_head_kv=1, n_embd=64, period=4),
    ),
    Faithful(
        "minimax-m3",
        "minimax-m3",
        _small(n_layer=60, n_lead=3, n_expert=128, top_k=4, n_head=16, n_head_kv=1),
    ),
    Faithful(
        "mixtral-8x22b",
        "llama",
        _small(n_layer=56, n_expert=8, top_k=2, n_head=6, n_head_kv=1, n_embd=96, n_ff_exp=128),
    ),
    Faithful(
        "qwen3.5-122b-layer",
        "qwen35moe",
        Dimensions(
            n_layer=2,
            n_embd=3072,
            n_head=32,
            n_head_kv=2,
            head=256,
            n_ff_exp=1024,
            n_ff_shexp=1024,
            n_expert=256,
            top_k=8,
            period=2,
        ),
        _qwen35_layer,
        expert_type=GgmlType.Q4_K,
        matrix_type=GgmlType.Q4_K,
    ),
)

FAITHFUL: Final[Mapping[str, Faithful]] = MappingProxyType({model.name: model for model in _MODELS})
"""Name -> shape. The last is not a whole model but two of its layers at full width, for measuring."""
