"""The architectures with experts of the pinned engine, and a recipe for a tiny model of each. PURE.

A :class:`Recipe` is what the engine's loader needs to build the architecture from metadata alone: the keys that
it reads, in small sizes, with at least two periods of the attention pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orchestrator.models.hyperparameters import (
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
    Dimensions,
    Keys,
    base,
    delta_attention,
    delta_net,
    experts_only,
    grouped_output,
    hashed_ngrams,
    hyper_connections,
    indexer,
    indexer_types,
    latent_attention,
    latent_attention_window,
    lead,
    mamba,
    merge,
    one_head_count,
    recurrent_by_heads,
    rope_sections,
    routed,
    shared,
    shared_width,
    window,
    window_flags,
)

_SMALL: Final = Dimensions()
_FOUR: Final = Dimensions(n_layer=8, period=4)
_MANY: Final = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one architecture.

    ``source`` is the file of the engine whose graph calls ``build_moe_ffn``; ``keys`` maps dimensions to
    hyperparameters. ``either_ffn`` says that the loader takes dense and expert tensors as optional in each
    layer, so those of the other kind are left out. ``bidirectional`` marks models that attend to later tokens
    as well, ``embeds`` those that answer with an embedding of each token instead of logits. ``predicts`` is the
    most prediction layers (MTP) that the engine's graph computes: with several, each guesses one token further.
    """

    source: str
    keys: Callable[[Dimensions], Keys]
    dimensions: Dimensions = _SMALL
    either_ffn: bool = False
    bidirectional: bool = False
    embeds: bool = False
    predicts: int = 0


def _nemotron(d: Dimensions) -> Keys:
    return merge(
        base(d),
        routed(d, norm=True, scale=2.5),
        shared(d),
        shared_width(d),
        mamba(d),
        {
            "attention.layer_norm_epsilon": 1e-5,
            "moe_latent_size": d.latent,
            # each layer is one thing only: mamba, experts, attention, experts
            "attention.head_count_kv": d.per_layer(lambda layer: d.n_head_kv if layer % 4 == 2 else 0),
            "feed_forward_length": d.per_layer(lambda layer: d.n_ff if layer % 2 else 0),
        },
    )


_RECIPES: dict[str, Recipe] = {
    "llama": Recipe("llama.cpp", lambda d: merge(base(d), experts_only(d))),
    "llama-embed": Recipe(
        "llama.cpp",
        lambda d: merge(base(d), experts_only(d), {"attention.causal": False}),
        bidirectional=True,
        embeds=True,
    ),
    "mistral3": Recipe("mistral3.cpp", lambda d: merge(base(d), experts_only(d))),
    "qwen2moe": Recipe("qwen2moe.cpp", lambda d: merge(base(d), routed(d), shared_width(d))),
    "qwen3moe": Recipe("qwen3moe.cpp", lambda d: merge(base(d), routed(d))),
    "qwen3vlmoe": Recipe("qwen3vlmoe.cpp", lambda d: merge(base(d), routed(d), rope_sections(d))),
    "qwen3next": Recipe("qwen3next.cpp", lambda d: merge(base(d), routed(d), shared_width(d), delta_net(d)), _FOUR),
    "qwen35moe": Recipe(
        "qwen35moe.cpp",
        lambda d: merge(base(d), routed(d), shared_width(d), delta_net(d), rope_sections(d)),
        _FOUR,
        predicts=1,
    ),
    "qwen4exp": Recipe(
        "qwen4exp.cpp",
        lambda d: merge(
            base(d),
            routed(d),
            shared_width(d),
            delta_net(d),
            rope_sections(d),
            hyper_connections(d),
            indexer(d),
            hashed_ngrams(d),
            {
                "hyper_connection.low_rank": 8,
                "attention.compress_ratios": d.per_layer(lambda _: 4),
            },
        ),
        _FOUR,
    ),
    "deepseek": Recipe("deepseek.cpp", lambda d: merge(base(d), routed(d, scale=1.0), shared(d), lead(d))),
    "deepseek2": Recipe(
        "deepseek2.cpp",
        lambda d: merge(
            base(d),
            latent_attention(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            lead(d),
            {"expert_group_count": 4, "expert_group_used_count": 2},
        ),
        predicts=1,
    ),
    "deepseek2-ocr": Recipe(
        "deepseek2.cpp",
        lambda d: merge(base(d), routed(d, gate=SOFTMAX, scale=1.0), shared(d), lead(d), one_head_count(d)),
    ),
    "mistral4": Recipe(
        "deepseek2.cpp",
        lambda d: merge(
            base(d), latent_attention(d), routed(d, gate=SOFTMAX, norm=True, scale=1.0), shared(d), lead(d)
        ),
    ),
    "deepseek32": Recipe(
        "deepseek32.cpp",
        lambda d: merge(
            base(d),
            latent_attention(d),
            indexer(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            lead(d),
            {"rope.scaling.yarn_log_multiplier": 0.1},
        ),
        predicts=1,
    ),
    "deepseek4": Recipe(
        "deepseek4.cpp",
        lambda d: merge(
            base(d),
            indexer(d),
            grouped_output(d),
            routed(d, gate=SQRT_SOFTPLUS, norm=True, scale=1.0),
            shared(d),
            window(d),
            {
                "attention.compress_rope_freq_base": 160000.0,
                # uncompressed, then every fourth and every 128th key, twice
                "attention.compress_ratios": d.per_layer(lambda layer: (0, 4, 128)[layer % 3]),
                "hash_layer_count": 0,
            },
        ),
        Dimensions(n_layer=6, period=3),
    ),
    "dflash": Recipe(
        "dflash.cpp",
        lambda d: merge(
            base(d),
            grouped_output(d),
            routed(d, gate=SQRT_SOFTPLUS, norm=True, scale=1.0),
            shared(d),
            window(d),
            {"target_layers": (1, 2), "block_size": 4},
        ),
    ),
    "glm4moe": Recipe(
        "glm4-moe.cpp",
        lambda d: merge(base(d), routed(d, gate=SIGMOID, norm=True, scale=2.5), shared(d), lead(d)),
        predicts=1,
    ),
    "glm-dsa": Recipe(
        "glm-dsa.cpp",
        lambda d: merge(
            base(d),
            latent_attention(d),
            indexer(d),
            indexer_types(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            lead(d),
        ),
        _FOUR,
        predicts=1,
    ),
    "glm5-next": Recipe(
        "glm5-next.cpp",
        lambda d: merge(
            base(d),
            delta_attention(d),
            indexer(d),
            hyper_connections(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            lead(d),
            {
                # latent attention without rotary part: the cache row is the latent alone
                "attention.key_length": d.kv_rank,
                "rope.dimension_count": 0,
                "attention.layer_norm_epsilon": 1e-5,
                "attention.indexer.kpool": 4,
                "attention.indexer.kpool_select_tail": True,
                "swiglu_clamp_exp": 10.0,
            },
        ),
        _FOUR,
    ),
    "minimax-01": Recipe(
        "minimax-01.cpp",
        lambda d: merge(base(d), experts_only(d), {"residual_scale": 3.5565588, "full_attention_interval": d.period}),
        _FOUR,
    ),
    "minimax-m2": Recipe("minimax-m2.cpp", lambda d: merge(base(d), routed(d, gate=SIGMOID), experts_only(d))),
    "minimax-m3": Recipe(
        "minimax-m3.cpp",
        lambda d: merge(
            base(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.0),
            shared(d),
            lead(d),
            {
                # one indexer head for each key and value head; top-k counts blocks here
                "attention.indexer.head_count": d.n_head_kv,
                "attention.indexer.key_length": 32,
                "attention.indexer.top_k": 2048,
                "attention.indexer.block_size": 4,
                "attention.indexer.local_blocks": 1,
            },
        ),
    ),
    "kimi-linear": Recipe(
        "kimi-linear.cpp",
        lambda d: merge(base(d), delta_attention(d), routed(d, gate=SIGMOID, scale=2.446), shared(d), lead(d)),
        _FOUR,
    ),
    "kimi-k3": Recipe(
        "kimi-k3.cpp",
        lambda d: merge(
            base(d),
            delta_attention(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.827),
            shared(d),
            lead(d),
            {
                "expert_latent_length": d.latent,
                "attn_res.block_size": 12,
                "activation.situ_beta": 4.0,
                "activation.situ_linear_beta": 25.0,
            },
        ),
        # more than 12 layers: the residual of a block of 12 is used behind it
        Dimensions(n_layer=16, period=4, n_shared=2),
    ),
    "gpt-oss": Recipe("openai-moe.cpp", lambda d: merge(base(d), routed(d), window(d))),
    "llama4": Recipe(
        "llama4.cpp",
        lambda d: merge(base(d), routed(d), {"interleave_moe_layer_step": 2}),
        Dimensions(n_layer=8, period=4, top_k=1),
    ),
    "grovemoe": Recipe(
        "grovemoe.cpp",
        lambda d: merge(
            base(d),
            routed(d),
            {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.05, "experts_per_group": 2},
        ),
    ),
    "step35": Recipe(
        "step35.cpp",
        lambda d: merge(
            base(d),
            routed(d, gate=SIGMOID, norm=True, scale=3.0),
            shared_width(d),
            lead(d),
            window_flags(d),
        ),
        _FOUR,
        either_ffn=True,
        predicts=_MANY,
    ),
    "afmoe": Recipe(
        "afmoe.cpp",
        lambda d: merge(base(d), routed(d, gate=SIGMOID, norm=True, scale=2.826), shared(d), lead(d), window(d)),
        _FOUR,
    ),
    "arctic": Recipe("arctic.cpp", base),
    "bailingmoe": Recipe(
        "bailingmoe.cpp", lambda d: merge(base(d), routed(d, norm=True, scale=1.0), shared(d), lead(d))
    ),
    "bailingmoe2": Recipe(
        "bailingmoe2.cpp",
        lambda d: merge(base(d), routed(d, gate=SIGMOID, norm=True, scale=2.5), shared(d), shared_width(d), lead(d)),
    ),
    "bailingmoe3": Recipe(
        "bailingmoe3.cpp",
        lambda d: merge(
            base(d),
            delta_attention(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            shared_width(d),
            lead(d),
            {
                "kda.safe_gate": True,
                "swiglu_clamp_exp": tuple(4.0 if layer % 2 else 0.0 for layer in range(d.n_layer)),
                "swiglu_clamp_shexp": tuple(5.0 if layer % 2 else 0.0 for layer in range(d.n_layer)),
            },
        ),
        _FOUR,
    ),
    "cohere2moe": Recipe(
        "cohere2moe.cpp",
        lambda d: merge(
            base(d),
            routed(d, gate=SIGMOID, norm=True),
            shared(d),
            shared_width(d),
            lead(d),
            window(d),
            {"logit_scale": 1.0},
        ),
        _FOUR,
        predicts=1,
    ),
    "dbrx": Recipe(
        "dbrx.cpp",
        lambda d: merge(base(d), experts_only(d), {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 8.0}),
    ),
    "dots1": Recipe(
        "dots1.cpp",
        lambda d: merge(
            base(d), routed(d, gate=SIGMOID, norm=True, scale=2.5), shared(d), lead(d), one_head_count(d)
        ),
    ),
    "dots3note": Recipe(
        "dots3note.cpp",
        lambda d: merge(
            base(d),
            latent_attention(d),
            latent_attention_window(d),
            indexer(d),
            window_flags(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            lead(d),
            # the indexer belongs to the layers with full attention
            {"attention.indexer.types": d.per_layer(lambda layer: int(d.closes_period(layer)))},
        ),
        _FOUR,
    ),
    "ernie4_5-moe": Recipe(
        "ernie4-5-moe.cpp",
        lambda d: merge(base(d), routed(d), shared_width(d), lead(d), {"interleave_moe_layer_step": 1}),
    ),
    "exaone-moe": Recipe(
        "exaone-moe.cpp",
        lambda d: merge(
            base(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            shared_width(d),
            lead(d),
            window(d),
        ),
        _FOUR,
    ),
    "granite": Recipe(
        "granite.cpp", lambda d: merge(base(d), experts_only(d), shared_width(d), {"logit_scale": 1.0})
    ),
    "granitemoe": Recipe(
        "granite.cpp", lambda d: merge(base(d), experts_only(d), shared_width(d), {"logit_scale": 1.0})
    ),
    "minicpm": Recipe(
        "granite.cpp", lambda d: merge(base(d), experts_only(d), {"embedding_scale": 1.0, "residual_scale": 0.7})
    ),
    "granitehybrid": Recipe(
        "granite-hybrid.cpp",
        lambda d: merge(base(d), experts_only(d), shared_width(d), recurrent_by_heads(d), mamba(d)),
        _FOUR,
    ),
    "granite_swa": Recipe(
        "granite-swa.cpp",
        lambda d: merge(base(d), experts_only(d), shared_width(d), window_flags(d), {"logit_scale": 1.0}),
        _FOUR,
    ),
    "grok": Recipe("grok.cpp", lambda d: merge(base(d), routed(d), {"embedding_scale": 2.0})),
    "hunyuan-moe": Recipe("hunyuan-moe.cpp", lambda d: merge(base(d), experts_only(d), routed(d), shared_width(d))),
    "hy_v3": Recipe(
        "hy-v3.cpp",
        lambda d: merge(base(d), routed(d, gate=SIGMOID, norm=True, scale=2.5), shared_width(d), lead(d)),
        either_ffn=True,
        predicts=_MANY,
    ),
    "hy_v4": Recipe(
        "hy-v4.cpp",
        lambda d: merge(
            base(d),
            latent_attention(d),
            indexer(d),
            indexer_types(d),
            hyper_connections(d),
            routed(d, gate=SIGMOID, norm=True, scale=1.0),
            shared(d),
            lead(d),
            {"hyper_connection.magnitude": 2.0, "swiglu_clamp_exp": 10.0},
        ),
    ),
    "jamba": Recipe("jamba.cpp", lambda d: merge(base(d), experts_only(d), recurrent_by_heads(d), mamba(d)), _FOUR),
    "laguna": Recipe(
        "laguna.cpp",
        lambda d: merge(
            base(d),
            routed(d, gate=SIGMOID, norm=True, scale=2.5),
            shared(d),
            shared_width(d),
            lead(d),
            window(d),
        ),
        _FOUR,
    ),
    "lfm2moe": Recipe(
        "lfm2.cpp",
        lambda d: merge(base(d), routed(d, gate=SIGMOID), lead(d), recurrent_by_heads(d), {"shortconv.l_cache": 3}),
        _FOUR,
    ),
    "llada-moe": Recipe("llada-moe.cpp", lambda d: merge(base(d), routed(d)), bidirectional=True),
    "maple": Recipe(
        "maple.cpp",
        lambda d: merge(base(d), routed(d), window_flags(d), {"swiglu_clamp_exp": 7.0}),
        _FOUR,
    ),
    "mellum": Recipe("mellum.cpp", lambda d: merge(base(d), routed(d), window(d)), _FOUR),
    "mimo2": Recipe("mimo2.cpp", lambda d: merge(base(d), routed(d), window_flags(d)), _FOUR, either_ffn=True),
    "nemotron_h": Recipe("nemotron-h.cpp", _nemotron, _FOUR),
    "nemotron_h_moe": Recipe("nemotron-h-moe.cpp", _nemotron, _FOUR),
    "olmoe": Recipe("olmoe.cpp", lambda d: merge(base(d), experts_only(d), one_head_count(d))),
    "phimoe": Recipe("phi3.cpp", lambda d: merge(base(d), experts_only(d))),
    "rnd1": Recipe("rnd1.cpp", lambda d: merge(base(d), routed(d)), bidirectional=True),
    "smallthinker": Recipe("smallthinker.cpp", lambda d: merge(base(d), routed(d, gate=SIGMOID), window(d)), _FOUR),
    "nomic-bert-moe": Recipe(
        "bert.cpp",
        lambda d: merge(
            base(d),
            experts_only(d),
            {
                "attention.layer_norm_epsilon": 1e-5,
                "moe_every_n_layers": 2,
                "attention.causal": False,
                "tokenizer.ggml.token_type_count": 2,
            },
        ),
        bidirectional=True,
        embeds=True,
    ),
    "gemma4": Recipe(
        "gemma4.cpp",
        lambda d: merge(
            base(d),
            routed(d),
            window_flags(d),
            {
                "embedding_length_per_layer_input": 16,
                "attention.shared_kv_layers": 0,
                "attention.key_length_swa": d.head_length,
                "attention.value_length_swa": d.head_length,
            },
        ),
        Dimensions(n_layer=10, period=5),
    ),
}

RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(_RECIPES)
"""Architecture name in the GGUF -> recipe."""

WITHOUT_EXPERTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bert": "shares the graph of nomic-bert-moe, its loader knows no experts",
        "jina-bert-v2": "shares the graph of nomic-bert-moe, its loader knows no experts",
        "jina-bert-v3": "shares the graph of nomic-bert-moe, its loader knows no experts",
        "nomic-bert": "shares the graph of nomic-bert-moe, its loader knows no experts",
        "lfm2": "shares the graph of lfm2moe, its loader takes every layer as dense",
        "phi3": "shares the graph of phimoe, its loader knows no experts",
    }
)
"""Architectures whose graph has a branch for experts that no file of theirs can reach, with the cause."""
