"""The weights of a model that transformers has loaded, by the names that its checkpoint has on disk.

Transformers keeps the experts of a layer fused, `experts.gate_up_proj` `[E, 2F, H]` and `experts.down_proj`
`[E, H, F]`, and some families under other prefixes than their files. Checkpoints, packets and exports use the names on
disk; what is returned are views, so that a change in place reaches the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from .config import ModelShape
from .table import full_table

_EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_ROUTER = re.compile(r"(.*)\.block_sparse_moe\.gate\.weight")
_GATES, _UPS = ("gate_proj", "w1"), ("up_proj", "w3")


def checkpoint_views(parameters: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Every weight of the checkpoint as a view of `parameters`, a loaded model's by its own names (tied ones once).

    They may as well be gradients, or anything else that has one tensor a parameter.

    Raises:
        ValueError: `parameters` lack a weight of the family, or have one more.
    """
    unused = set(parameters)
    views: dict[str, Tensor] = {}
    for entry in full_table(shape):
        for name in entry.hf_names:
            source, view = _find(name, parameters, shape)
            unused.discard(source)
            views[name] = view
    if unused:
        raise ValueError(f"the model has weights that its family does not: {', '.join(sorted(unused))}")
    return views


def _find(name: str, parameters: Mapping[str, Tensor], shape: ModelShape) -> tuple[str, Tensor]:
    """(the model's own name, view) of one weight."""
    source, router, expert = name, _ROUTER.fullmatch(name), _EXPERT.fullmatch(name)
    if name not in parameters and router is not None:
        source = f"{router[1]}.mlp.gate.weight"
    elif name not in parameters and expert is not None:
        prefix, number, part = expert[1], int(expert[2]), expert[3]
        fused = part in _GATES or part in _UPS
        source = f"{prefix}.mlp.experts.{'gate_up_proj' if fused else 'down_proj'}"
        if source in parameters:
            whole, half = parameters[source][number], shape.moe_ffn_hidden_size
            return source, (whole[:half] if part in _GATES else whole[half:]) if fused else whole
    if source not in parameters:
        raise ValueError(f"the model has no weight {name}")
    return source, parameters[source]
