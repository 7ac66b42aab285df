"""Reads from config.json which layers attend to a window of the sequence only, and how wide it is.

A layer with window `W` attends from position `t` to positions `t - W + 1 ... t`, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .families import Family

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Windows:
    """Positions that a windowed layer sees, its own included, and for each layer whether it is one.

    `size` is None and `layers` empty if all layers attend to everything.
    """

    size: int | None = None
    layers: tuple[bool, ...] = ()


def read_windows(raw: Mapping[str, Any], family: Family, num_layers: int, path: Path) -> Windows:
    """Windows of the layers of `raw`, the contents of config.json at `path`.

    Raises:
        ValueError: `layer_types` of another length than the model, with kinds that are not supported, or with others
            than the family's own code computes; or a window that is missing or below 1.
    """
    kinds: list[Any] = raw.get("layer_types") or []
    unknown = sorted({str(kind) for kind in kinds} - {_FULL, _SLIDING})
    if unknown:
        raise ValueError(f"{path}: layer_types holds {', '.join(unknown)}; supported are {_FULL}, {_SLIDING}")
    if kinds and len(kinds) != num_layers:
        raise ValueError(f"{path}: layer_types has {len(kinds)} entries for {num_layers} layers")
    size = _window_size(raw, family)
    layers = _windowed_layers(raw, family, num_layers, size)
    differ = [layer for layer, kind in enumerate(kinds) if (kind == _SLIDING) != layers[layer]]
    if differ:
        raise ValueError(
            f"{path}: layer_types says {kinds[differ[0]]} of layer {differ[0]}, but transformers computes "
            f"{family.name} with a window of {size} in {sum(layers)} of {num_layers} layers; make them agree"
        )
    if not any(layers):
        return Windows()
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{path}: sliding_window = {size!r} must be a whole number >= 1: {sum(layers)} layers use it")
    return Windows(size, layers)


def _window_size(raw: Mapping[str, Any], family: Family) -> Any:
    if family.windows == "none":
        return None
    if family.windows == "by_layer" and family.global_every is None and not raw.get("use_sliding_window", False):
        return None
    return raw.get("sliding_window", family.config_defaults.get("sliding_window"))


def _windowed_layers(raw: Mapping[str, Any], family: Family, num_layers: int, size: Any) -> tuple[bool, ...]:
    if family.windows == "by_layer":
        if raw.get("layer_types"):
            return tuple(kind == _SLIDING for kind in raw["layer_types"])
        if family.global_every is not None:
            every = raw.get("sliding_window_pattern", family.global_every)
            return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if size is None:
        return (False,) * num_layers
    if family.windows == "all":
        return (True,) * num_layers
    first = raw.get("max_window_layers", family.config_defaults["max_window_layers"])
    return tuple(layer >= first for layer in range(num_layers))
