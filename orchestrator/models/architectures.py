"""The architectures with experts of the pinned engine, and hyperparameters that make a tiny model of each. PURE.

A :class:`Recipe` is what the engine's loader needs to build the architecture from metadata alone: the keys that
its hyperparameter loader reads, in small sizes, with at least two periods of its attention pattern. Keys are
written without the architecture's prefix (``expert_count`` stands for ``qwen2moe.expert_count``), except those
that begin with ``general.`` or ``tokenizer.``.

Source: the loaders in ``src/models`` of the engine that ``patches/UPSTREAM`` pins; :data:`Recipe.source` names
the file whose graph calls ``build_moe_ffn``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Unsigned64:
    """An array that the file must hold as unsigned 64-bit numbers."""

    values: tuple[int, ...]


Value: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Unsigned64
Keys: TypeAlias = Mapping[str, Value]

SOFTMAX: Final = 1  # llama_expert_gating_func_type of the engine
SIGMOID: Final = 2
SOFTMAX_WEIGHT: Final = 3
SQRT_SOFTPLUS: Final = 4


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a synthetic model. ``n_ff`` is the dense feed-forward width, ``window`` the sliding window."""

    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 96
    n_ff_exp: int = 64
    n_ff_shexp: int = 32
    n_expert: int = 16
    top_k: int = 4
    n_shared: int = 1
    n_lead: int = 1
    n_vocab: int = 320
    n_ctx: int = 4096
    window: int = 64
    period: int = 2
    kv_rank: int = 32
    q_rank: int = 48

    @property
    def head(self) -> int:
        """Elements of one attention head."""
        return self.n_embd // self.n_head

    def per_layer(self, value: Callable[[int], int]) -> tuple[int, ...]:
        """One value for each layer."""
        return tuple(value(layer) for layer in range(self.n_layer))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one architecture: ``keys`` of given dimensions, and what a plain loader call would get wrong.

    ``either_ffn`` says that the loader takes dense and expert tensors in each layer as optional, so those of
    the other kind are left out. ``reason`` is set where the engine cannot build or run it from metadata.
    ``encoder`` marks models without a causal mask, which answer a whole batch at once.
    """

    source: str
    keys: Callable[[Dimensions], Keys]
    dimensions: Dimensions = Dimensions()
    either_ffn: bool = False
    encoder: bool = False
    reason: str | None = None


def _all(*parts: Keys) -> Keys:
    merged: dict[str, Value] = {}
    for part in parts:
        merged.update(part)
    return merged


def _base(d: Dimensions) -> dict[str, Value]:
    return {
        "vocab_size": d.n_vocab,
        "context_length": d.n_ctx,
        "embedding_length": d.n_embd,
        "block_count": d.n_layer,
        "feed_forward_length": d.n_ff,
        "attention.head_count": d.n_head,
        "attention.head_count_kv": d.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": d.n_expert,
        "expert_used_count": d.top_k,
    }


def _routed(
    d: Dimensions, *, ff: bool = True, gate: int | None = None, norm: bool = False, scale: float = 0.0
) -> Keys:
    keys: dict[str, Value] = {}
    if ff:
        keys["expert_feed_forward_length"] = d.n_ff_exp
    if gate is not None:
        keys["expert_gating_func"] = gate
    if norm:
        keys["expert_weights_norm"] = True
    if scale:
        keys["expert_weights_scale"] = scale
    return keys


def _shared(d: Dimensions) -> Keys:
    return {"expert_shared_count": d.n_shared}


def _shared_width(d: Dimensions) -> Keys:
    return {"expert_shared_feed_forward_length": d.n_ff_shexp}


def _lead(d: Dimensions) -> Keys:
    return {"leading_dense_block_count": d.n_lead}


def _window(d: Dimensions) -> Keys:
    return {"attention.sliding_window": d.window}


def _window_flags(d: Dimensions) -> Keys:
    """A window on every layer but the last of each period, as one flag per layer."""
    flags = d.per_layer(lambda layer: int((layer + 1) % d.period != 0))
    return _all(_window(d), {"attention.sliding_window_pattern": flags, "rope.freq_base_swa": 10000.0})


def _mla(d: Dimensions) -> Keys:
    """Multi-head latent attention: the cache holds one latent row and one rotary row per token."""
    nope, rope, value = 16, 16, 16
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": d.kv_rank + rope,
        "attention.value_length": d.kv_rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": value,
        "attention.q_lora_rank": d.q_rank,
        "attention.kv_lora_rank": d.kv_rank,
        "rope.dimension_count": rope,
    }


def _indexer(d: Dimensions) -> Keys:
    # a top-k above the lengths that tests use keeps all rows: near-ties would else flip between machines
    return {
        "attention.indexer.head_count": d.n_head,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 2048,
    }


def _hyper(_: Dimensions) -> Keys:
    return {
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
    }


def _recurrent_heads(d: Dimensions, *, uniform_q: bool = True) -> Keys:
    """Layers without key and value heads are recurrent: all but the last of each period."""
    heads = d.per_layer(lambda layer: d.n_head_kv if (layer + 1) % d.period == 0 else 0)
    keys: dict[str, Value] = {"attention.head_count_kv": heads}
    if not uniform_q:
        keys["attention.head_count"] = tuple(d.n_head if kv else 0 for kv in heads)
    return keys


def _kda(d: Dimensions) -> Keys:
    """Kimi delta attention layers between latent attention layers."""
    heads = d.per_layer(lambda layer: 1 if (layer + 1) % d.period == 0 else 0)
    return _all(
        _mla(d),
        {
            "attention.head_count_kv": heads,
            "ssm.conv_kernel": 4,
            "kda.head_dim": 16,
            "kda.gate_lower_bound": -5.0,
        },
    )


def _delta_net(d: Dimensions) -> Keys:
    """Gated delta net: n_head value heads of 16, half as many key heads."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 16 * d.n_head,
        "ssm.state_size": 16,
        "ssm.time_step_rank": d.n_head,
        "ssm.group_count": max(1, d.n_head // 2),
        "full_attention_interval": d.period,
    }


def _mamba2(d: Dimensions) -> Keys:
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * d.n_embd,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 8,
        "ssm.group_count": 2,
    }


def _sections(d: Dimensions) -> Keys:
    quarter = max(1, d.head // 8)
    return {"rope.dimension_sections": (quarter, quarter, quarter, quarter)}


_FOUR = Dimensions(n_layer=8, period=4)

_RECIPES: dict[str, Recipe] = {
    "llama": Recipe("llama.cpp", lambda d: _all(_base(d), {"feed_forward_length": d.n_ff_exp})),
    "qwen2moe": Recipe("qwen2moe.cpp", lambda d: _all(_base(d), _routed(d), _shared_width(d))),
    "qwen3moe": Recipe("qwen3moe.cpp", lambda d: _all(_base(d), _routed(d))),
    "deepseek2": Recipe(
        "deepseek2.cpp",
        lambda d: _all(
            _base(d),
            _mla(d),
            _routed(d, gate=SIGMOID, norm=True, scale=2.5),
            _shared(d),
            _lead(d),
            {"expert_group_count": 4, "expert_group_used_count": 2},
        ),
    ),
    "gpt-oss": Recipe("openai-moe.cpp", lambda d: _all(_base(d), _routed(d), _window(d))),
    "llama4": Recipe(
        "llama4.cpp",
        lambda d: _all(_base(d), _routed(d), {"interleave_moe_layer_step": 2}),
        Dimensions(n_layer=8, period=4, top_k=1),
    ),
    "grovemoe": Recipe(
        "grovemoe.cpp",
        lambda d: _all(
            _base(d),
            _routed(d),
            {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.05, "experts_per_group": 2},
        ),
    ),
    "step35": Recipe(
        "step35.cpp",
        lambda d: _all(
            _base(d),
            _routed(d, gate=SIGMOID, norm=True, scale=3.0),
            _shared_width(d),
            _lead(d),
            _window_flags(d),
        ),
        _FOUR,
        either_ffn=True,
    ),
    "qwen35moe": Recipe(
        "qwen35moe.cpp",
        lambda d: _all(_base(d), _routed(d), _shared_width(d), _delta_net(d), _sections(d)),
        _FOUR,
    ),
}

RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(_RECIPES)
"""Architecture name in the GGUF -> recipe."""
