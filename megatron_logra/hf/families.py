"""The model families this package reads and writes: what each has, which rules its tensors follow, what it refuses.

A new family is a `Family(...)` entry in `FAMILIES`: mostly rules shared with the others (`hf.rules`) plus its own
differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from .rules import (
    ATTENTION_OUT,
    DENSE_MLP,
    FUSED_MLP,
    FUSED_QKV,
    INPUT_NORM,
    MLP_NORM,
    OUTER,
    QK_NORMS,
    QKV,
    QKV_BIAS,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    Rule,
    experts,
    norm,
)

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class MoEKeys:
    """Where config.json of a mixture of experts keeps its sizes; several spellings of a key in order of preference.

    `normalize_topk` is the key that says whether the weights of a token's experts are scaled to sum 1; None if they
    always are. `shared_ffn_size` is the key of the shared expert's inner width, None where there is none.
    """

    num_experts: tuple[str, ...]
    ffn_size: str
    topk: str = "num_experts_per_tok"
    normalize_topk: str | None = None
    shared_ffn_size: str | None = None


@dataclass(frozen=True)
class Family:
    """One Hugging Face model family.

    Attributes:
        config_defaults: the values `transformers` takes when a key is absent from config.json.
        refused_flags: the reason why a key of config.json is not supported when it is set (to neither null, false, 0
            nor empty).
        moe: keys of a mixture of experts, None for a dense family.
        windows: which layers `sliding_window` is for: `none`; `all`; `by_layer` as `layer_types` says.
        global_every: with `by_layer` and without `layer_types`, every so manieth layer attends to everything; None:
            the layers before `max_window_layers` do, if `use_sliding_window` is set.
        is_gemma: norms multiply by weight + 1, embeddings by sqrt(hidden_size), attention and MLP outputs are
            normalised before they are added, `query_pre_attn_scalar` scales the queries, and attention scores and
            logits may be capped softly.
        local_rope: layers with a window have a rotary base of their own.
    """

    name: str
    layer_rules: tuple[Rule, ...]
    outer_rules: tuple[Rule, Rule, Rule] = OUTER
    qkv_bias: bool = False
    qk_layernorm: bool = False
    config_defaults: Mapping[str, object] = field(default_factory=dict)
    refused_flags: Mapping[str, str] = field(default_factory=dict)
    moe: MoEKeys | None = None
    activation: Activation = "silu"
    windows: Literal["none", "all", "by_layer"] = "none"
    global_every: int | None = None
    is_gemma: bool = False
    local_rope: bool = False


_QKVO_BIAS = MappingProxyType({"attention_bias": "it puts a bias on q_proj, k_proj, v_proj and o_proj"})
_DENSE_LAYERS_AMONG = MappingProxyType({"mlp_only_layers": "dense layers among mixture-of-experts layers"})
_WINDOWS_UNTRIED = MappingProxyType({"use_sliding_window": "sliding windows are not supported for this family"})

_LLAMA = Family(
    "llama",
    layer_rules=(INPUT_NORM, QKV, ATTENTION_OUT, MLP_NORM, *DENSE_MLP),
    config_defaults=MappingProxyType({"max_position_embeddings": 2048}),
    refused_flags=MappingProxyType(
        {**_QKVO_BIAS, "mlp_bias": "it puts a bias on gate_proj, up_proj and down_proj"},
    ),
)
_MISTRAL = Family(
    "mistral",
    layer_rules=_LLAMA.layer_rules,
    config_defaults=MappingProxyType(
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    windows="all",
)
_QWEN2 = Family(
    "qwen2",
    layer_rules=(INPUT_NORM, QKV, QKV_BIAS, ATTENTION_OUT, MLP_NORM, *DENSE_MLP),
    qkv_bias=True,
    config_defaults=MappingProxyType(
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
    ),
    windows="by_layer",
)
_QWEN3 = Family(
    "qwen3",
    layer_rules=(INPUT_NORM, QKV, *QK_NORMS, ATTENTION_OUT, MLP_NORM, *DENSE_MLP),
    qk_layernorm=True,
    config_defaults=MappingProxyType({**_QWEN2.config_defaults, "head_dim": 128}),
    refused_flags=_QKVO_BIAS,
    windows="by_layer",
)
_PHI3 = Family(
    "phi3",
    layer_rules=(INPUT_NORM, FUSED_QKV, ATTENTION_OUT, MLP_NORM, *FUSED_MLP),
    config_defaults=MappingProxyType({"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    windows="all",
)
_MIXTRAL = Family(
    "mixtral",
    layer_rules=(INPUT_NORM, QKV, ATTENTION_OUT, MLP_NORM, *experts("block_sparse_moe", ("w1", "w3", "w2"))),
    config_defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        }
    ),
    moe=MoEKeys(num_experts=("num_local_experts",), ffn_size="intermediate_size"),
    windows="all",
)
_QWEN2_MOE = Family(
    "qwen2_moe",
    layer_rules=(INPUT_NORM, QKV, QKV_BIAS, ATTENTION_OUT, MLP_NORM, *QWEN_EXPERTS, *SHARED_EXPERT),
    qkv_bias=True,
    config_defaults=MappingProxyType(
        {"num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60, "num_experts_per_tok": 4}
    ),
    refused_flags=MappingProxyType({**_DENSE_LAYERS_AMONG, **_WINDOWS_UNTRIED}),
    moe=MoEKeys(
        num_experts=("num_experts", "num_local_experts"),
        ffn_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        shared_ffn_size="shared_expert_intermediate_size",
    ),
)
_QWEN3_MOE = Family(
    "qwen3_moe",
    layer_rules=(INPUT_NORM, QKV, *QK_NORMS, ATTENTION_OUT, MLP_NORM, *QWEN_EXPERTS),
    qk_layernorm=True,
    config_defaults=MappingProxyType(
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8}
    ),
    refused_flags=MappingProxyType({**_DENSE_LAYERS_AMONG, **_WINDOWS_UNTRIED, **_QKVO_BIAS}),
    moe=MoEKeys(
        num_experts=("num_experts", "num_local_experts"),
        ffn_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
    ),
)

_GEMMA_NORMS = (
    INPUT_NORM,
    norm("post_self_attn_layernorm.weight", "post_attention_layernorm.weight"),
    norm("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
    norm("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"),
)
_GEMMA_DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
)
_BIDIRECTIONAL = MappingProxyType({"use_bidirectional_attention": "only causal attention is"})
_GEMMA2 = Family(
    "gemma2",
    layer_rules=(*_GEMMA_NORMS, QKV, ATTENTION_OUT, *DENSE_MLP),
    config_defaults=MappingProxyType(
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    ),
    refused_flags=MappingProxyType({**_QKVO_BIAS, **_BIDIRECTIONAL}),
    activation="gelu_tanh",
    windows="by_layer",
    global_every=2,
    is_gemma=True,
)
_GEMMA3 = Family(
    "gemma3_text",
    layer_rules=(*_GEMMA_NORMS, QKV, *QK_NORMS, ATTENTION_OUT, *DENSE_MLP),
    qk_layernorm=True,
    config_defaults=MappingProxyType(
        {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    ),
    refused_flags=MappingProxyType(
        {**_QKVO_BIAS, **_BIDIRECTIONAL, "attn_logit_softcapping": "transformers reads it and does not apply it"}
    ),
    activation="gelu_tanh",
    windows="by_layer",
    global_every=6,
    is_gemma=True,
    local_rope=True,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            _LLAMA,
            _MISTRAL,
            _QWEN2,
            _QWEN3,
            _PHI3,
            _GEMMA2,
            _GEMMA3,
            _MIXTRAL,
            _QWEN2_MOE,
            _QWEN3_MOE,
        )
    }
)
"""Supported families by the `model_type` of config.json."""

_HYBRID = "its gated delta net layers are not supported; docs/models.md says what stands in the way"
REFUSED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "gemma3": "it also holds a vision tower; docs/models.md shows how to take the language model out of it",
        **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), _HYBRID),
    }
)
"""What to say of another `model_type` that users bring."""
