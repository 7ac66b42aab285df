"""The rules of which parameter tables are made: one Megatron parameter and the Hugging Face tensors its rows come from.

Names are relative to a layer (`decoder.layers.{local}.` and `model.layers.{global}.`). Both directions, and the row
order of synchronisation factors, are derived from the same rule, so they cannot drift apart.

A tensor's size is written in these symbols: `hidden`; `q` = heads x head_dim; `kv` = query groups x head_dim;
`ffn`; `head` = head_dim; `vocab`; of a mixture of experts `experts`, `moe_ffn` (of one routed expert), `shared_ffn`
(of the shared expert) and `one`.

A rule of routed experts stands for one parameter each of every expert: `{expert}` in a Hugging Face name is the number
of the expert in its layer, `{local_expert}` in the Megatron name its number on the rank that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def norm(megatron_name: str, hf_name: str, size: str = "hidden") -> Rule:
    """Rule of a norm's weight."""
    return Rule(megatron_name, (Source(hf_name, size),))


def _qkv_weight(*sources: Source) -> Rule:
    return Rule(
        "self_attention.linear_qkv.weight", sources, parallel="column", layout="qkv", group="self_attn.qkv_proj"
    )


def gated_mlp(
    megatron: str,
    hf: str,
    size: str,
    group: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    is_expert: bool = False,
) -> tuple[Rule, Rule]:
    """Rules of one gated MLP of inner width `size`; `names` are those of gate, up and down in Hugging Face.

    With one name for gate and up, that tensor holds the rows of the gate and then those of up.
    """
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return (
        Rule(
            f"{megatron}.linear_fc1.weight",
            (Source(gate, size, "hidden"), Source(up, size, "hidden", skip=(size,) if up == gate else ())),
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


def experts(hf: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[Rule, Rule, Rule]:
    """Router and routed experts whose Hugging Face names start with `hf`."""
    return (
        Rule("mlp.router.weight", (Source(f"{hf}.gate.weight", "experts", "hidden"),)),
        *gated_mlp(
            "mlp.experts.local_experts.{local_expert}",
            hf + ".experts.{expert}",
            "moe_ffn",
            "mlp.experts",
            names,
            is_expert=True,
        ),
    )


QKV = _qkv_weight(
    Source("self_attn.q_proj.weight", "q", "hidden"),
    Source("self_attn.k_proj.weight", "kv", "hidden"),
    Source("self_attn.v_proj.weight", "kv", "hidden"),
)
FUSED_QKV = _qkv_weight(
    Source("self_attn.qkv_proj.weight", "q", "hidden"),
    Source("self_attn.qkv_proj.weight", "kv", "hidden", skip=("q",)),
    Source("self_attn.qkv_proj.weight", "kv", "hidden", skip=("q", "kv")),
)
QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias",
    (
        Source("self_attn.q_proj.bias", "q"),
        Source("self_attn.k_proj.bias", "kv"),
        Source("self_attn.v_proj.bias", "kv"),
    ),
    parallel="column",
    layout="qkv",
)
QK_NORMS = (
    norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)
ATTENTION_OUT = Rule(
    "self_attention.linear_proj.weight",
    (Source("self_attn.o_proj.weight", "hidden", "q"),),
    parallel="row",
    group="self_attn.o_proj",
)
INPUT_NORM = norm("input_layernorm.weight", "input_layernorm.weight")
MLP_NORM = norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")

DENSE_MLP = gated_mlp("mlp", "mlp", "ffn", "mlp")
FUSED_MLP = gated_mlp("mlp", "mlp", "ffn", "mlp", ("gate_up_proj", "gate_up_proj", "down_proj"))
QWEN_EXPERTS = experts("mlp")
SHARED_EXPERT = (
    *gated_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_ffn", "mlp.shared_expert"),
    Rule("mlp.shared_experts.gate_weight", (Source("mlp.shared_expert_gate.weight", "one", "hidden"),)),
)

# Embedding, final norm and language-model head, in this order. Names are absolute.
OUTER: tuple[Rule, Rule, Rule] = (
    Rule(
        "embedding.word_embeddings.weight",
        (Source("model.embed_tokens.weight", "vocab", "hidden"),),
        parallel="vocab",
    ),
    norm("decoder.final_layernorm.weight", "model.norm.weight"),
    Rule("output_layer.weight", (Source("lm_head.weight", "vocab", "hidden"),), parallel="vocab"),
)
