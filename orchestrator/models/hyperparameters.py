"""Hyperparameters of small models, by feature: what the engine's loaders read for each kind of layer. PURE.

Keys are written without the architecture's prefix (``expert_count`` stands for ``qwen2moe.expert_count``),
except those that begin with ``general.`` or ``tokenizer.``. Source: the loaders in ``src/models`` of the pinned
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Unsigned64:
    """An array that the file must hold as unsigned 64-bit numbers."""

    values: tuple[int, ...]


Value: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Unsigned64
Keys: TypeAlias = Mapping[str, Value]

SOFTMAX: Final = 1  # llama_expert_gating_func_type of the engine
SIGMOID: Final = 2
SQRT_SOFTPLUS: Final = 4

_ROPE: Final = 16  # elements of a latent attention head that carry the position
_NOPE: Final = 16  # and those that do not
_STATE: Final = 16  # state size of recurrent layers, per head


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a synthetic model.

    ``head`` is the length of an attention head (0: ``n_embd / n_head``); ``n_ff`` the dense feed-forward width;
    ``n_ff_exp`` a routed expert's, ``n_ff_shexp`` the shared expert's where the two are separate keys;
    ``n_lead`` the dense layers before the first with experts; ``window`` the sliding window; ``period`` the
    length of the attention pattern in layers; ``kv_rank`` and ``q_rank`` the latent widths; ``latent`` the row
    length of routed experts where an architecture has one of their own; ``n_predict`` the prediction layers (MTP)
    behind the ``n_layer`` others.
    """

    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head: int = 0
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
    latent: int = 32
    n_predict: int = 0

    @property
    def head_length(self) -> int:
        """Elements of one attention head."""
        return self.head or self.n_embd // self.n_head

    def per_layer(self, value: Callable[[int], int]) -> tuple[int, ...]:
        """One value for each layer, prediction layers included."""
        return tuple(value(layer) for layer in range(self.n_layer + self.n_predict))

    def closes_period(self, layer: int) -> bool:
        """Tell whether a layer is the last of its period: there patterns put the full attention."""
        return (layer + 1) % self.period == 0


def merge(*parts: Keys) -> dict[str, Value]:
    """Join key groups; a later one wins."""
    merged: dict[str, Value] = {}
    for part in parts:
        merged.update(part)
    return merged


def base(d: Dimensions) -> Keys:
    """What every model has."""
    keys: dict[str, Value] = {
        "vocab_size": d.n_vocab,
        "context_length": d.n_ctx,
        "embedding_length": d.n_embd,
        "block_count": d.n_layer + d.n_predict,
        "feed_forward_length": d.n_ff,
        "attention.head_count": d.n_head,
        "attention.head_count_kv": d.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": d.n_expert,
        "expert_used_count": d.top_k,
    }
    if d.n_predict:
        keys["nextn_predict_layers"] = d.n_predict
    if d.head:
        keys |= {"attention.key_length": d.head, "attention.value_length": d.head, "rope.dimension_count": d.head}
    return keys


def one_head_count(d: Dimensions) -> Keys:
    """As many key and value heads as query heads."""
    return {"attention.head_count_kv": d.n_head}


def experts_only(d: Dimensions) -> Keys:
    """For loaders without a width of their own for experts."""
    return {"feed_forward_length": d.n_ff_exp}


def routed(d: Dimensions, *, gate: int | None = None, norm: bool = False, scale: float = 0.0) -> Keys:
    """Width of the routed experts, and how the router's logits become weights."""
    keys: dict[str, Value] = {"expert_feed_forward_length": d.n_ff_exp}
    if gate is not None:
        keys["expert_gating_func"] = gate
    if norm:
        keys["expert_weights_norm"] = True
    if scale:
        keys["expert_weights_scale"] = scale
    return keys


def shared(d: Dimensions) -> Keys:
    """Shared experts, counted."""
    return {"expert_shared_count": d.n_shared}


def shared_width(d: Dimensions) -> Keys:
    """The shared expert, by its width."""
    return {"expert_shared_feed_forward_length": d.n_ff_shexp}


def lead(d: Dimensions) -> Keys:
    """Dense layers before the first with experts."""
    return {"leading_dense_block_count": d.n_lead}


def window(d: Dimensions) -> Keys:
    """A sliding window; where it applies is the loader's default."""
    return {"attention.sliding_window": d.window}


def window_flags(d: Dimensions) -> Keys:
    """A window on every layer but the last of each period, as one flag per layer."""
    flags = d.per_layer(lambda layer: int(not d.closes_period(layer)))
    return merge(window(d), {"attention.sliding_window_pattern": flags, "rope.freq_base_swa": 10000.0})


def latent_attention(d: Dimensions) -> Keys:
    """Multi-head latent attention: the cache holds one latent row and one rotary row per token."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": d.kv_rank + _ROPE,
        "attention.value_length": d.kv_rank,
        "attention.key_length_mla": _NOPE + _ROPE,
        "attention.value_length_mla": 16,
        "attention.q_lora_rank": d.q_rank,
        "attention.kv_lora_rank": d.kv_rank,
        "rope.dimension_count": _ROPE,
    }


def latent_attention_window(d: Dimensions) -> Keys:
    """The same geometry once more for layers with a window."""
    return {
        "attention.kv_lora_rank_swa": d.kv_rank,
        "attention.key_length_swa": d.kv_rank + _ROPE,
        "attention.value_length_swa": d.kv_rank,
        "attention.key_length_mla_swa": _NOPE + _ROPE,
        "attention.value_length_mla_swa": 16,
    }


def indexer(d: Dimensions) -> Keys:
    """Sparse attention's indexer."""
    # a top-k above the lengths that tests use keeps all rows: near-ties would else flip between machines
    return {
        "attention.indexer.head_count": d.n_head,
        "attention.indexer.key_length": 64,  # the smallest that the rotation of cached keys takes
        "attention.indexer.top_k": 2048,
    }


def indexer_types(d: Dimensions) -> Keys:
    """Layers that own an indexer (the first of each period) and layers that share the one before."""
    # prediction layers do without
    return {"attention.indexer.types": d.per_layer(lambda layer: int(layer % d.period == 0))[: d.n_layer]}


def hyper_connections(_: Dimensions) -> Keys:
    """Four residual streams."""
    return {
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
    }


def grouped_output(d: Dimensions) -> Keys:
    """One key and value head for all, a low-rank grouped output projection, four residual streams."""
    return merge(
        hyper_connections(d),
        {
            "attention.head_count_kv": 1,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 16,
            "attention.q_lora_rank": d.q_rank,
            "attention.output_group_count": 2,
            "attention.output_lora_rank": 32,
            "swiglu_clamp_exp": 10.0,
        },
    )


def recurrent_by_heads(d: Dimensions) -> Keys:
    """Layers without key and value heads are recurrent: all but the last of each period."""
    return {"attention.head_count_kv": d.per_layer(lambda layer: d.n_head_kv if d.closes_period(layer) else 0)}


def delta_attention(d: Dimensions) -> Keys:
    """Kimi delta attention, with latent attention in the last layer of each period."""
    return merge(
        latent_attention(d),
        {
            "attention.head_count_kv": d.per_layer(lambda layer: int(d.closes_period(layer))),
            "ssm.conv_kernel": 4,
            "kda.head_dim": _STATE,
            "kda.gate_lower_bound": -5.0,
        },
    )


def delta_net(d: Dimensions) -> Keys:
    """Gated delta net: one value head for each attention head, half as many key heads."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": _STATE * d.n_head,
        "ssm.state_size": _STATE,
        "ssm.time_step_rank": d.n_head,
        "ssm.group_count": max(1, d.n_head // 2),
        "full_attention_interval": d.period,
    }


def mamba(d: Dimensions) -> Keys:
    """Mamba: inner width twice the model's, as the loaders demand; heads and groups for the second kind."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * d.n_embd,
        "ssm.state_size": _STATE,
        "ssm.time_step_rank": 8,
        "ssm.group_count": 2,
    }


def rope_sections(d: Dimensions) -> Keys:
    """Multi-axis rotary sections; together half a head."""
    eighth = max(1, d.head_length // 8)
    return {"rope.dimension_sections": (eighth, eighth, eighth, eighth)}


def hashed_ngrams(d: Dimensions) -> Keys:
    """Per-layer embeddings of hashed n-grams, in layer 0: two- and three-grams with two heads each."""
    heads = 4
    return {
        "ple.layers": (0,),
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 2,
        "embedding_length_per_layer_input": d.n_embd // heads,
        "ple.layer_multipliers": Unsigned64((1, 3, 5)),
        "ple.head_offsets": Unsigned64(tuple(head * d.n_vocab for head in range(heads))),
        "ple.head_vocab_sizes": Unsigned64((d.n_vocab,) * heads),
    }
