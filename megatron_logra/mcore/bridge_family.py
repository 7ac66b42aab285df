"""Families that `hf.families` lacks, made of what Megatron-Bridge says of them.

A model is served if it is a plain decoder, whose layers are those of `mcore.spec`, and if for each parameter the row
map of our rule is Bridge's, row by row. The rules are ours with Bridge's names; sizes are read from config.json by
`hf.config` and must be those that Bridge reads. Everything else is refused, naming all that differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_logra.hf.config import ModelShape, read_model_shape
from megatron_logra.hf.families import Activation, Family
from megatron_logra.hf.rules import (
    ATTENTION_OUT,
    DENSE_MLP,
    INPUT_NORM,
    MLP_NORM,
    OUTER,
    QK_NORMS,
    QKV,
    QKV_BIAS,
    Rule,
)
from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.hf.table import parameter_table
from megatron_logra.mcore.bridge import BridgeMap, row_differences

_FIRST_LAYER = ("decoder.layers.0.", "model.layers.0.")

# What a plain decoder may set in Bridge's provider: read into the model's shape, or without effect on its output.
_READ = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size seq_length "
    "layernorm_epsilon rotary_base share_embeddings_and_output_weights add_qkv_bias qk_layernorm activation_func "
    "layernorm_zero_centered_gamma normalization gated_linear_unit add_bias_linear position_embedding_type"
)
_NO_EFFECT = (
    "params_dtype pipeline_dtype autocast_dtype bf16 fp16 attention_backend bias_activation_fusion bias_dropout_fusion "
    "persist_layer_norm apply_rope_fusion hidden_dropout attention_dropout make_vocab_size_divisible_by hf_model_id "
    "hf_model_revision init_method_std init_method output_layer_init_method embedding_init_method "
    "embedding_init_method_std gradient_accumulation_fusion cp_comm_type"
)
_REQUIRED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
# Bridge's classes of plain decoders, and whether they scale embeddings and norms as Gemma does. Classes of their own
# build models of their own.
_PLAIN_PROVIDERS = {"GPTModelProvider": False, "GemmaModelProvider": True}
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "fast_gelu": "gelu_tanh"}


def find_family(folder: Path) -> tuple[Mapping[str, Any], Family]:
    """(config.json with transformers' defaults, family) of a model that Bridge knows and our table does not.

    Raises:
        ValueError: Bridge is missing or does not know the model; or it is not a plain decoder, with all that differs.
    """
    bridge = BridgeMap(folder)
    raw = {key: value for key, value in bridge.config.to_dict().items() if value is not None}
    problems = _beyond_plain_decoder(bridge)
    family = None
    if not problems:
        try:
            family = _build_family(bridge, raw)
            shape = read_model_shape(folder, find_other=lambda _: (raw, family))
            problems = _disagreements(bridge, shape) + _unread_tensors(folder, family)
        except ValueError as error:
            problems = [str(error)]
    if family is None or problems:
        raise ValueError(
            "of the models of Megatron-Bridge only plain decoders are served (docs/models.md); this one differs: "
            + "; ".join(problems)
        )
    return raw, family


def read_shape(folder: str | Path, overrides: Mapping[str, object] | None = None) -> ModelShape:
    """`hf.config.read_model_shape`, with the families that Megatron-Bridge adds to ours."""
    return read_model_shape(folder, overrides, find_other=find_family)


def _beyond_plain_decoder(bridge: BridgeMap) -> list[str]:
    provider, problems = bridge.provider, list[str]()
    kind = type(provider).__name__
    if kind not in _PLAIN_PROVIDERS:
        return [f"its model is built by a class of its own, {kind}"]
    if bridge.changes_values:
        problems.append("Megatron-Bridge changes the values of its weights")
    plain = bridge.plain_provider
    known = {*_READ.split(), *_NO_EFFECT.split()}
    for field in fields(provider):
        value = getattr(provider, field.name)
        if field.name not in known and value != getattr(plain, field.name, None):
            problems.append(f"{field.name} = {getattr(value, '__name__', str(value)[:40])}")
    problems += [
        f"{name} = {getattr(provider, name)} (must be {value})"
        for name, value in _REQUIRED.items()
        if getattr(provider, name) != value
    ]
    if provider.layernorm_zero_centered_gamma != _PLAIN_PROVIDERS.get(kind, False):
        problems.append(f"layernorm_zero_centered_gamma = {provider.layernorm_zero_centered_gamma}")
    if provider.activation_func.__name__ not in _ACTIVATIONS:
        problems.append(f"activation {provider.activation_func.__name__}; known are {', '.join(_ACTIVATIONS)}")
    return problems


def _build_family(bridge: BridgeMap, raw: dict[str, Any]) -> Family:
    """Our rules of a plain decoder with Bridge's names."""
    provider = bridge.provider
    rules = [INPUT_NORM, QKV, *[QKV_BIAS] * provider.add_qkv_bias, *QK_NORMS * provider.qk_layernorm]
    rules += [ATTENTION_OUT, MLP_NORM, *DENSE_MLP]
    embedding, final_norm, head = OUTER
    is_gemma = _PLAIN_PROVIDERS[type(provider).__name__]
    if is_gemma:
        # Gemma's reader looks for the names that later generations have.
        raw.update(query_pre_attn_scalar=provider.kv_channels, hidden_activation=raw["hidden_act"])
    tied = raw.get("tie_word_embeddings", False)
    return Family(
        name=str(raw["model_type"]),
        layer_rules=tuple(_rename(rule, bridge, *_FIRST_LAYER) for rule in rules),
        outer_rules=(_rename(embedding, bridge), _rename(final_norm, bridge), head if tied else _rename(head, bridge)),
        qkv_bias=provider.add_qkv_bias,
        qk_layernorm=provider.qk_layernorm,
        activation=_ACTIVATIONS[provider.activation_func.__name__],
        is_gemma=is_gemma,
        refused_flags={
            "sliding_window": "windows of families read through Megatron-Bridge are not",
            "use_bidirectional_attention": "only causal attention is",
        },
    )


def _rename(rule: Rule, bridge: BridgeMap, megatron_prefix: str = "", hf_prefix: str = "") -> Rule:
    names = bridge.hf_names(megatron_prefix + rule.megatron_name)
    if any(not name.startswith(hf_prefix) for name in names):
        raise ValueError(f"{rule.megatron_name} is stored as {', '.join(names)}, outside {hf_prefix}")
    short = [name.removeprefix(hf_prefix) for name in names]
    if len(short) == 1:  # one tensor that holds the blocks of all sources one after the other
        short *= len(rule.sources)
    sources = [replace(source, name=name) for source, name in zip(rule.sources, short, strict=True)]
    if len(names) < len(sources):
        blocks = [source.rows for source in sources]
        sources = [replace(source, skip=tuple(blocks[:at])) for at, source in enumerate(sources)]
    return replace(rule, sources=tuple(sources))


def _disagreements(bridge: BridgeMap, shape: ModelShape) -> list[str]:
    """Sizes that Bridge and our reading of config.json see differently, and row maps that are not the same."""
    provider, ours = bridge.provider, vars(shape) | {"share_embeddings_and_output_weights": shape.tie_embeddings}
    problems = [
        f"{name} is {ours[name]} in config.json and {getattr(provider, name)} for Megatron-Bridge"
        for name in _READ.split()
        if name in ours and getattr(provider, name) != ours[name]
    ]
    for entry in parameter_table(shape, layers=[0], embedding=True, final=True):
        for tp_size in (1, 2):
            if entry.num_rows(shape.vocab_size) % tp_size == 0:
                problems += row_differences(bridge, entry, shape, tp_size)
    return problems


def _unread_tensors(folder: Path, family: Family) -> list[str]:
    known = {source.name for rule in (*family.layer_rules, *family.outer_rules) for source in rule.sources}
    names = {re.sub(r"^model\.layers\.\d+\.", "", name) for name in HFReader(folder).names}
    return [f"the folder holds {name}, which no rule reads" for name in sorted(names - known)]
