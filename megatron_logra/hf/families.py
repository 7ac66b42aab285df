"""The model families this package reads and writes, each as one declarative table.

A family is a list of rules; a rule is one Megatron parameter and the Hugging Face tensors its rows come
from. Names are relative to a layer (`decoder.layers.{local}.` and `model.layers.{global}.`). Both
directions, and the row order of synchronisation factors, are derived from the same rule, so they cannot
drift apart.

A tensor's size is written in these symbols: `hidden`; `q` = heads x head_dim; `kv` = query groups x head_dim;
`ffn`; `head` = head_dim; `vocab`; of a mixture of experts `experts`, `moe_ffn` (of one routed expert), `shared_ffn`
(of the shared expert) and `one`.

A rule of routed experts stands for one parameter each of every expert: `{expert}` in a Hugging Face name is the number
of the expert in its layer, `{local_expert}` in the Megatron name its number on the rank that holds it.

A new family is a `Family(...)` entry in `FAMILIES`: mostly rules shared with the others plus its own
differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Parallel = Literal["column", "row", "replicated", "vocab"]
Layout = Literal["plain", "qkv", "gate_up"]


@dataclass(frozen=True)
class Source:
    """One Hugging Face tensor (or a block of its rows) that feeds a Megatron parameter.

    `rows`, `columns` and `skip` are size symbols; `columns` is empty for a vector. `skip` lists the sizes
    of the blocks that lie before this one in a tensor that Hugging Face itself stores fused.
    """

    name: str
    rows: str
    columns: str = ""
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter: where its rows come from and how it is laid out over tensor-parallel ranks.

    `group` is the projection group (relative to the layer) when the parameter is a sketch target, else None; the
    experts of a layer share theirs. `is_expert` marks parameters of routed experts.
    """

    megatron_name: str
    sources: tuple[Source, ...]
    parallel: Parallel = "replicated"
    layout: Layout = "plain"
    group: str | None = None
    is_expert: bool = False


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

    `config_defaults` are the values `transformers` takes when a key is absent from config.json.
    `refused_flags` maps a key of config.json to the reason it is not supported when it is set (to neither null, false,
    0 nor empty). `moe` names the keys of a mixture of experts, None for a dense family.
    """

    name: str
    layer_rules: tuple[Rule, ...]
    outer_rules: tuple[Rule, Rule, Rule]
    qkv_bias: bool = False
    qk_layernorm: bool = False
    config_defaults: Mapping[str, object] = field(default_factory=dict)
    refused_flags: Mapping[str, str] = field(default_factory=dict)
    moe: MoEKeys | None = None


def _norm(megatron_name: str, hf_name: str, size: str = "hidden") -> Rule:
    return Rule(megatron_name, (Source(hf_name, size),))


_QKV = Rule(
    "self_attention.linear_qkv.weight",
    (
        Source("self_attn.q_proj.weight", "q", "hidden"),
        Source("self_attn.k_proj.weight", "kv", "hidden"),
        Source("self_attn.v_proj.weight", "kv", "hidden"),
    ),
    parallel="column",
    layout="qkv",
    group="self_attn.qkv_proj",
)
_QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias",
    (
        Source("self_attn.q_proj.bias", "q"),
        Source("self_attn.k_proj.bias", "kv"),
        Source("self_attn.v_proj.bias", "kv"),
    ),
    parallel="column",
    layout="qkv",
)
_QK_NORMS = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)
_ATTENTION_OUT = Rule(
    "self_attention.linear_proj.weight",
    (Source("self_attn.o_proj.weight", "hidden", "q"),),
    parallel="row",
    group="self_attn.o_proj",
)


def _gated_mlp(
    megatron: str,
    hf: str,
    size: str,
    group: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    is_expert: bool = False,
) -> tuple[Rule, Rule]:
    """Rules of one gated MLP of inner width `size`; `names` are those of gate, up and down in Hugging Face."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return (
        Rule(
            f"{megatron}.linear_fc1.weight",
            (Source(gate, size, "hidden"), Source(up, size, "hidden")),
            parallel="column",
            layout="gate_up",
            group=f"{group}.gate_up_proj",
            is_expert=is_expert,
        ),
        Rule(
            f"{megatron}.linear_fc2.weight",
            (Source(down, "hidden", size),),
            parallel="row",
            group=f"{group}.down_proj",
            is_expert=is_expert,
        ),
    )


def _experts(hf: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[Rule, Rule, Rule]:
    """Router and routed experts whose Hugging Face names start with `hf`."""
    return (
        Rule("mlp.router.weight", (Source(f"{hf}.gate.weight", "experts", "hidden"),)),
        *_gated_mlp(
            "mlp.experts.local_experts.{local_expert}",
            hf + ".experts.{expert}",
            "moe_ffn",
            "mlp.experts",
            names,
            is_expert=True,
        ),
    )


_DENSE_MLP = _gated_mlp("mlp", "mlp", "ffn", "mlp")
_QWEN_EXPERTS = _experts("mlp")
_SHARED_EXPERT = (
    *_gated_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_ffn", "mlp.shared_expert"),
    Rule("mlp.shared_experts.gate_weight", (Source("mlp.shared_expert_gate.weight", "one", "hidden"),)),
)
_INPUT_NORM = _norm("input_layernorm.weight", "input_layernorm.weight")
_MLP_NORM = _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")

# Embedding, final norm and language-model head, in this order. Names are absolute.
_OUTER: tuple[Rule, Rule, Rule] = (
    Rule(
        "embedding.word_embeddings.weight",
        (Source("model.embed_tokens.weight", "vocab", "hidden"),),
        parallel="vocab",
    ),
    _norm("decoder.final_layernorm.weight", "model.norm.weight"),
    Rule("output_layer.weight", (Source("lm_head.weight", "vocab", "hidden"),), parallel="vocab"),
)

_LLAMA = Family(
    "llama",
    layer_rules=(_INPUT_NORM, _QKV, _ATTENTION_OUT, _MLP_NORM, *_DENSE_MLP),
    outer_rules=_OUTER,
    config_defaults=MappingProxyType({"max_position_embeddings": 2048}),
    refused_flags=MappingProxyType(
        {
            "attention_bias": "it puts a bias on q_proj, k_proj, v_proj and o_proj",
            "mlp_bias": "it puts a bias on gate_proj, up_proj and down_proj",
        }
    ),
)
_QWEN2 = Family(
    "qwen2",
    layer_rules=(_INPUT_NORM, _QKV, _QKV_BIAS, _ATTENTION_OUT, _MLP_NORM, *_DENSE_MLP),
    outer_rules=_OUTER,
    qkv_bias=True,
    config_defaults=MappingProxyType({"num_key_value_heads": 32, "max_position_embeddings": 32768}),
)
_QWEN3 = Family(
    "qwen3",
    layer_rules=(_INPUT_NORM, _QKV, *_QK_NORMS, _ATTENTION_OUT, _MLP_NORM, *_DENSE_MLP),
    outer_rules=_OUTER,
    qk_layernorm=True,
    config_defaults=MappingProxyType({"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}),
    refused_flags=MappingProxyType({"attention_bias": "it puts a bias on q_proj, k_proj, v_proj and o_proj"}),
)
_DENSE_LAYERS_AMONG = MappingProxyType({"mlp_only_layers": "dense layers among mixture-of-experts layers"})
_MIXTRAL = Family(
    "mixtral",
    layer_rules=(
        _INPUT_NORM,
        _QKV,
        _ATTENTION_OUT,
        _MLP_NORM,
        *_experts("block_sparse_moe", ("w1", "w3", "w2")),
    ),
    outer_rules=_OUTER,
    config_defaults=MappingProxyType(
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    refused_flags=MappingProxyType({"sliding_window": "only full attention is"}),
    moe=MoEKeys(num_experts=("num_local_experts",), ffn_size="intermediate_size"),
)
_QWEN2_MOE = Family(
    "qwen2_moe",
    layer_rules=(_INPUT_NORM, _QKV, _QKV_BIAS, _ATTENTION_OUT, _MLP_NORM, *_QWEN_EXPERTS, *_SHARED_EXPERT),
    outer_rules=_OUTER,
    qkv_bias=True,
    config_defaults=MappingProxyType(
        {"num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60, "num_experts_per_tok": 4}
    ),
    refused_flags=_DENSE_LAYERS_AMONG,
    moe=MoEKeys(
        num_experts=("num_experts", "num_local_experts"),
        ffn_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
        shared_ffn_size="shared_expert_intermediate_size",
    ),
)
_QWEN3_MOE = Family(
    "qwen3_moe",
    layer_rules=(_INPUT_NORM, _QKV, *_QK_NORMS, _ATTENTION_OUT, _MLP_NORM, *_QWEN_EXPERTS),
    outer_rules=_OUTER,
    qk_layernorm=True,
    config_defaults=MappingProxyType(
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8}
    ),
    refused_flags=MappingProxyType(
        {**_DENSE_LAYERS_AMONG, "attention_bias": "it puts a bias on q_proj, k_proj, v_proj and o_proj"}
    ),
    moe=MoEKeys(
        num_experts=("num_experts", "num_local_experts"),
        ffn_size="moe_intermediate_size",
        normalize_topk="norm_topk_prob",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (_LLAMA, _QWEN2, _QWEN3, _MIXTRAL, _QWEN2_MOE, _QWEN3_MOE)}
)
"""Supported families by the `model_type` of config.json."""
