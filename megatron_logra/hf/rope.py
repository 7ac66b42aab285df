"""Reads the rotary embedding's settings from config.json.

They stand in `rope_theta` / `rope_scaling` (transformers 4) or in `rope_parameters` (transformers 5); a family whose
windowed layers rotate by a base of their own has it in `rope_local_base_freq`, or one `rope_parameters` for each kind
of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .families import Family

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched: `linear` all by `factor`; `llama3` the low ones only (Llama 3.1 model card)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary embedding; `local_base` is that of layers with a window where it differs."""

    base: float
    scaling: RopeScaling | None = None
    local_base: float | None = None


def read_rope(raw: Mapping[str, Any], family: Family, path: Path) -> Rope:
    """Rotary settings of `raw`, the contents of config.json at `path`.

    Raises:
        ValueError: an unsupported scaling, settings that contradict each other, or a missing number.
    """
    parameters = raw.get("rope_parameters") or {}
    if not family.local_rope:
        return _read_one({**raw, "rope_parameters": parameters}, family, path)
    kinds = {kind: parameters.get(kind) or {} for kind in ("full_attention", "sliding_attention")}
    if parameters and not any(kinds.values()):
        raise ValueError(f"{path}: rope_parameters must hold full_attention and sliding_attention, each a table")
    rope = _read_one({**raw, "rope_parameters": kinds["full_attention"]}, family, path)
    base = raw.get("rope_local_base_freq", family.config_defaults["rope_local_base_freq"])
    local = _read_one({"rope_parameters": {"rope_theta": base, **kinds["sliding_attention"]}}, family, path)
    if local.scaling is not None:
        raise ValueError(f"{path}: rope scaling of layers with sliding_attention is not supported")
    return Rope(rope.base, rope.scaling, local.base)


def _read_one(raw: Mapping[str, Any], family: Family, path: Path) -> Rope:
    rope = {**(raw.get("rope_scaling") or {}), **raw["rope_parameters"]}
    base = float(rope.get("rope_theta", raw.get("rope_theta", family.config_defaults.get("rope_theta", 1e4))))
    if "rope_theta" in raw and float(raw["rope_theta"]) != base:
        raise ValueError(
            f"{path}: rope_theta is {raw['rope_theta']} but rope_parameters.rope_theta is {base:g}; make them agree"
        )
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor {partial} is not supported; only 1 is")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rope(base)
    if kind in ("longrope", "su"):
        raise ValueError(
            f"{path}: rope type {kind!r} is not supported: its frequencies depend on the length of a sequence, and "
            "rollout engines and trainers decide about it at different lengths"
        )
    if kind not in ("linear", "llama3"):
        raise ValueError(f"{path}: rope type {kind!r} is not supported; supported are default, linear, llama3")
    keys = _LLAMA3_KEYS if kind == "llama3" else ("factor",)
    missing = [key for key in keys if key not in rope]
    if missing:
        raise ValueError(f"{path}: {kind} rope scaling lacks {', '.join(missing)}")
    return Rope(base, RopeScaling(kind, **{key: float(rope[key]) for key in keys}))
