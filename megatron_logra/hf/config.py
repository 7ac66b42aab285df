"""Reads the shape of a model from a Hugging Face folder's config.json.

Everything that decides a tensor's size or the forward pass is taken from config.json and checked here; what
this package cannot compute faithfully (sliding windows, unknown rope scalings, quantised weights, biases
outside qkv) is an error and never ignored. Positions of the rope settings: `rope_theta` / `rope_scaling`
(transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .families import FAMILIES, Family

_LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelShape:
    """Sizes and forward-pass constants of one decoder, dense or with a mixture of experts in every layer.

    Sizes are counts; `kv_channels` is the size of one attention head (not always hidden_size /
    num_attention_heads); `num_query_groups` is the number of key/value heads; `rope_scaling` is None or the
    four numbers of the Llama 3 scaling (`factor`, `low_freq_factor`, `high_freq_factor`,
    `original_max_position_embeddings`); `dtype` is the type config.json declares (float32 when it declares
    none), which single tensors on disk may differ from.

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
    rope_scaling: Mapping[str, float] | None
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

    @property
    def query_size(self) -> int:
        """Rows of q_proj: heads x head size."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_size(self) -> int:
        """Rows of k_proj and of v_proj: query groups x head size."""
        return self.num_query_groups * self.kv_channels

    def size_of(self, symbol: str) -> int:
        """The number behind a size symbol of `hf.families`."""
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


def read_model_shape(folder: str | Path, overrides: Mapping[str, object] | None = None) -> ModelShape:
    """Read and check `folder`/config.json.

    Args:
        folder: a Hugging Face model folder.
        overrides: settings the user gave on the command line, by flag name (`num_layers`, `hidden_size`,
            `ffn_hidden_size`, `num_attention_heads`, `num_query_groups`, `kv_channels`, `vocab_size`,
            `max_position_embeddings`, `normalization`, `rotary_base`,
            `untie_embeddings_and_output_weights`). None values are ignored. They can only confirm what
            config.json says.

    Raises:
        ValueError: missing folder or file, invalid JSON, unsupported family or feature, missing key, sizes
            that do not fit together, or a setting that contradicts config.json (all contradictions in one
            message).
    """
    path = Path(folder) / "config.json"
    raw = _read_json(path)
    family = _find_family(raw, path)
    _refuse_unsupported(raw, family, path)
    shape = _build_shape(raw, family, path)
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


def _find_family(raw: dict[str, Any], path: Path) -> Family:
    model_type = str(raw.get("model_type"))
    if model_type not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{path}: model_type {model_type!r} is not a supported family; supported are {supported}")
    return FAMILIES[model_type]


def _refuse_unsupported(raw: dict[str, Any], family: Family, path: Path) -> None:
    problems = []
    for key, reason in family.refused_flags.items():
        if raw.get(key):
            problems.append(f"{key} = {raw[key]!r} is not supported: {reason}")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act {raw['hidden_act']!r} is not supported: the gated MLP here uses silu")
    if raw.get("decoder_sparse_step", 1) != 1:
        problems.append(f"decoder_sparse_step {raw['decoder_sparse_step']} is not supported: every layer needs experts")
    if raw.get("quantization_config"):
        problems.append("quantization_config is set: give an unquantised checkpoint")
    window = _sliding_window_problem(raw)
    if window:
        problems.append(window)
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))


def _sliding_window_problem(raw: dict[str, Any]) -> str | None:
    other_types = sorted({kind for kind in raw.get("layer_types") or () if kind != "full_attention"})
    if other_types:
        return f"layer_types holds {', '.join(other_types)}; only full_attention is supported"
    if not raw.get("use_sliding_window", False) or raw.get("layer_types"):
        return None
    window, first = raw.get("sliding_window", 4096), raw.get("max_window_layers", 28)
    num_layers = raw.get("num_hidden_layers", 0)
    if window is None or first >= num_layers:
        return None
    return (
        f"sliding_window {window} is in use from layer {first} of {num_layers} (use_sliding_window is true); "
        "only full attention is supported"
    )


def _build_shape(raw: dict[str, Any], family: Family, path: Path) -> ModelShape:
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
    rotary_base, rope_scaling = _read_rope(raw, path)
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
        num_layers=integer("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=integer("num_key_value_heads", heads),
        kv_channels=integer("head_dim", hidden // heads),
        vocab_size=integer("vocab_size"),
        max_position_embeddings=integer("max_position_embeddings"),
        layernorm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        rotary_base=rotary_base,
        rope_scaling=rope_scaling,
        qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_layernorm,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=_read_dtype(raw, path),
        **experts,
    )


def _read_rope(raw: dict[str, Any], path: Path) -> tuple[float, dict[str, float] | None]:
    """Rotary base and Llama 3 scaling, from `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    base = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if "rope_theta" in raw and float(raw["rope_theta"]) != base:
        raise ValueError(
            f"{path}: rope_theta is {raw['rope_theta']} but rope_parameters.rope_theta is {base:g}; make them agree"
        )
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor {partial} is not supported; only 1 is")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise ValueError(f"{path}: rope type {kind!r} is not supported; supported are default, llama3")
    missing = [key for key in _LLAMA3_ROPE_KEYS if key not in rope]
    if missing:
        raise ValueError(f"{path}: llama3 rope scaling lacks {', '.join(missing)}")
    return base, {key: float(rope[key]) for key in _LLAMA3_ROPE_KEYS}


def _read_dtype(raw: dict[str, Any], path: Path) -> torch.dtype:
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
