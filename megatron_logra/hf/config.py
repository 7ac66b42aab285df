"""Reads the shape of a model from a Hugging Face folder's config.json.

Everything that decides a tensor's size or the forward pass is taken from config.json and checked here; what
this package cannot compute faithfully (unknown rope scalings, quantised weights, biases outside qkv) is an error and
never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .families import FAMILIES, REFUSED_TYPES, Activation, Family
from .rope import RopeScaling, read_rope
from .windows import read_windows

_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}
FindFamily = Callable[[Path], tuple[Mapping[str, Any], Family]]
"""Gives, for a folder whose family is not in `FAMILIES`, config.json with all defaults and a family."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and forward-pass constants of one decoder, dense or with a mixture of experts in every layer.

    Sizes are counts; `kv_channels` is the size of one attention head (not always hidden_size /
    num_attention_heads); `num_query_groups` is the number of key/value heads; `dtype` is the type config.json declares
    (float32 when it declares none), which single tensors on disk may differ from.

    Layers whose entry in `sliding_layers` (empty: none) is true attend to the last `sliding_window` positions only, and
    rotate by `local_rotary_base`, unscaled, if that is not None. `softmax_scale` None is `kv_channels ** -0.5`. A soft
    cap `c` makes `c tanh(x / c)` of attention scores `x` or of logits. `is_gemma` is explained at `hf.families.Family`.

    `num_experts` None means dense. Otherwise a token goes to `moe_router_topk` of them, each of inner width
    `moe_ffn_hidden_size`, with weights that sum to 1 if `normalize_topk` is true, and through a shared expert
    of inner width `moe_shared_expert_size` if that is not None.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rotary_base: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    qk_layernorm: bool
    tie_embeddings: bool
    dtype: torch.dtype
    normalization: str = "RMSNorm"
    num_experts: int | None = None
    moe_router_topk: int = 1
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_size: int | None = None
    normalize_topk: bool = True
    activation: Activation = "silu"
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    local_rotary_base: float | None = None
    softmax_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    is_gemma: bool = False
    other_family: Family | None = field(default=None, compare=False, repr=False)

    @property
    def table(self) -> Family:
        """Rules of this model's tensors: those of `family` in our table, or `other_family` where it was read by one."""
        return FAMILIES[self.family] if self.other_family is None else self.other_family

    @property
    def post_norms(self) -> bool:
        """Whether what attention and MLP add to the residual stream is normalised before."""
        return any(rule.megatron_name == "post_mlp_layernorm.weight" for rule in self.table.layer_rules)

    @property
    def query_size(self) -> int:
        """Rows of q_proj: heads x head size."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_size(self) -> int:
        """Rows of k_proj and of v_proj: query groups x head size."""
        return self.num_query_groups * self.kv_channels

    def size_of(self, symbol: str) -> int:
        """The number behind a size symbol of `hf.rules`."""
        sizes = {
            "hidden": self.hidden_size,
            "q": self.query_size,
            "kv": self.key_value_size,
            "ffn": self.ffn_hidden_size,
            "head": self.kv_channels,
            "vocab": self.vocab_size,
            "experts": self.num_experts or 0,
            "moe_ffn": self.moe_ffn_hidden_size,
            "shared_ffn": self.moe_shared_expert_size or 0,
            "one": 1,
        }
        return sizes[symbol]


def read_model_shape(
    folder: str | Path, overrides: Mapping[str, object] | None = None, *, find_other: FindFamily | None = None
) -> ModelShape:
    """Read and check `folder`/config.json.

    Args:
        folder: a Hugging Face model folder.
        overrides: settings the user gave on the command line, by flag name (`num_layers`, `hidden_size`,
            `ffn_hidden_size`, `num_attention_heads`, `num_query_groups`, `kv_channels`, `vocab_size`,
            `max_position_embeddings`, `normalization`, `rotary_base`,
            `untie_embeddings_and_output_weights`). None values are ignored. They can only confirm what
            config.json says.
        find_other: asked about a `model_type` that is not in our table.

    Raises:
        ValueError: missing folder or file, invalid JSON, unsupported family or feature, missing key, sizes
            that do not fit together, or a setting that contradicts config.json (all contradictions in one
            message).
    """
    path = Path(folder) / "config.json"
    raw: Mapping[str, Any] = _read_json(path)
    other = None
    if find_other is not None and raw.get("model_type") not in {*FAMILIES, *REFUSED_TYPES}:
        try:
            raw, other = find_other(path.parent)
        except ValueError as error:
            raise ValueError(f"{_unsupported_family(raw, path)}; {error}") from error
    family = other or _find_family(raw, path)
    _refuse_unsupported(raw, family, path)
    shape = replace(_build_shape(raw, family, path), other_family=other)
    _check_sizes(shape, path)
    _check_overrides(shape, overrides or {}, path)
    return shape


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ValueError(f"hf_checkpoint {path.parent} is not a folder; give a Hugging Face model folder")
    if not path.is_file():
        raise ValueError(f"hf_checkpoint {path.parent} has no config.json; give a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _find_family(raw: Mapping[str, Any], path: Path) -> Family:
    if raw.get("model_type") not in FAMILIES:
        raise ValueError(_unsupported_family(raw, path))
    return FAMILIES[raw["model_type"]]


def _unsupported_family(raw: Mapping[str, Any], path: Path) -> str:
    model_type = str(raw.get("model_type"))
    reason = f": {REFUSED_TYPES[model_type]}" if model_type in REFUSED_TYPES else ""
    supported = ", ".join(sorted(FAMILIES))
    return f"{path}: model_type {model_type!r} is not a supported family{reason}; supported are {supported}"


def _refuse_unsupported(raw: Mapping[str, Any], family: Family, path: Path) -> None:
    problems = []
    for key, reason in family.refused_flags.items():
        if raw.get(key):
            problems.append(f"{key} = {raw[key]!r} is not supported: {reason}")
    # Gemma's own key is hidden_activation; an old hidden_act beside it is not read by transformers.
    key = "hidden_activation" if family.is_gemma else "hidden_act"
    known = _ACTIVATIONS[family.activation]
    if raw.get(key, known[0]) not in known:
        problems.append(f"{key} {raw[key]!r} is not supported: {family.name} is computed with {known[0]}")
    if raw.get("decoder_sparse_step", 1) != 1:
        problems.append(f"decoder_sparse_step {raw['decoder_sparse_step']} is not supported: every layer needs experts")
    if raw.get("quantization_config"):
        problems.append("quantization_config is set: give an unquantised checkpoint")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))


def _build_shape(raw: Mapping[str, Any], family: Family, path: Path) -> ModelShape:
    def integer(key: str, default: object = None) -> int:
        value = raw.get(key)
        if value is None:
            value = family.config_defaults.get(key, default) if key not in raw else default
        if value is None:
            raise ValueError(f"{path}: key {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: {key} = {value!r} must be a whole number >= 1")
        return value

    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    if not raw.get("head_dim") and "head_dim" not in family.config_defaults and hidden % heads:
        raise ValueError(
            f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} "
            f"({hidden} % {heads} = {hidden % heads}) and head_dim is not given"
        )
    num_layers = integer("num_hidden_layers")
    rope, windows = read_rope(raw, family, path), read_windows(raw, family, num_layers, path)
    experts: dict[str, Any] = {}
    if family.moe is not None:
        keys = family.moe
        present = next((key for key in keys.num_experts if key in raw), keys.num_experts[0])
        experts = {
            "num_experts": integer(present),
            "moe_router_topk": integer(keys.topk),
            "moe_ffn_hidden_size": integer(keys.ffn_size),
            "normalize_topk": keys.normalize_topk is None or bool(raw.get(keys.normalize_topk, False)),
        }
        if keys.shared_ffn_size is not None:
            experts["moe_shared_expert_size"] = integer(keys.shared_ffn_size)
    return ModelShape(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=integer("num_key_value_heads", heads),
        kv_channels=integer("head_dim", hidden // heads),
        vocab_size=integer("vocab_size"),
        max_position_embeddings=integer("max_position_embeddings"),
        layernorm_epsilon=float(raw.get("rms_norm_eps", family.config_defaults.get("rms_norm_eps", 1e-6))),
        rotary_base=rope.base,
        rope_scaling=rope.scaling,
        qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_layernorm,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.config_defaults.get("tie_word_embeddings", False))),
        dtype=_read_dtype(raw, path),
        activation=family.activation,
        sliding_window=windows.size,
        sliding_layers=windows.layers,
        local_rotary_base=rope.local_base if windows.size is not None else None,
        **experts,
        **(_read_gemma(raw, family, path) if family.is_gemma else {}),
    )


def _read_gemma(raw: Mapping[str, Any], family: Family, path: Path) -> dict[str, Any]:
    def positive(key: str) -> float | None:
        value = raw.get(key, family.config_defaults.get(key))
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"{path}: {key} = {value!r} must be a number > 0, or null where there is none")
        return value

    scalar = positive("query_pre_attn_scalar")
    if scalar is None:
        raise ValueError(f"{path}: key 'query_pre_attn_scalar' is null")
    return {
        "is_gemma": True,
        "softmax_scale": scalar**-0.5,
        "attention_softcap": positive("attn_logit_softcapping"),
        "final_softcap": positive("final_logit_softcapping"),
    }


def _read_dtype(raw: Mapping[str, Any], path: Path) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{path}: dtype {name!r} is not a floating-point type of torch")
    return dtype


def _check_sizes(shape: ModelShape, path: Path) -> None:
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        raise ValueError(
            f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}: "
            f"{heads} % {groups} = {heads % groups}"
        )
    if shape.num_experts is not None and shape.moe_router_topk > shape.num_experts:
        raise ValueError(f"{path}: a token cannot go to {shape.moe_router_topk} of {shape.num_experts} experts")
    if shape.kv_channels % 2:
        raise ValueError(f"{path}: head_dim {shape.kv_channels} must be even for rotary embeddings")


def _check_overrides(shape: ModelShape, overrides: Mapping[str, object], path: Path) -> None:
    known = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.kv_channels,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "normalization": shape.normalization,
        "rotary_base": shape.rotary_base,
        "untie_embeddings_and_output_weights": not shape.tie_embeddings,
    }
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"unknown model settings {', '.join(unknown)}; known are {', '.join(known)}")
    problems = [
        f"--{name.replace('_', '-')} is {value!r} but {path} says {known[name]!r}"
        for name, value in overrides.items()
        if value is not None and value != known[name]
    ]
    if problems:
        raise ValueError("; ".join(problems) + "; leave the setting out, the checkpoint decides")
