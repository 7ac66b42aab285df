"""Where a rank's parameter stands in a checkpoint that Megatron-Core writes (`torch_dist`), whatever the layout.

A stored tensor is the whole parameter of all ranks. Layers are stacked along a first axis and experts along a second:

    decoder.layers.self_attention.linear_qkv.weight         [layers, rows, columns]
    decoder.layers.mlp.experts.experts.linear_fc1.weight    [layers, experts, rows, columns]
    embedding.word_embeddings.weight                        [padded vocabulary, columns]

Rows stand in the order of one tensor-parallel rank: query groups one after the other, all gate rows before all up rows.
A layer's norms have the names they have in Transformer Engine's fused layers, as in every Megatron checkpoint. Tied
embeddings are stored once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .config import ModelShape
from .table import LocalParameter

EMBEDDING_KEY = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.(.+)")
_MODULES_WITH_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.experts.experts.linear_fc1",
    "mlp.experts.experts.linear_fc2",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)


@dataclass(frozen=True)
class StoredBlock:
    """Local rows of a parameter that are consecutive in the stored tensor.

    Attributes:
        key: name of the stored tensor.
        global_shape: its shape, stacked axes first.
        offset: place of the block's first entry in it.
        rows: the block's rows in the local parameter (all of its columns).
        num_stacked: number of stacked axes, in which the block has size 1.
        is_padded: the rows are vocabulary rows, whose number depends on the tensor-parallel size.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    rows: slice
    num_stacked: int
    is_padded: bool


def stored_blocks(
    parameter: LocalParameter,
    shape: ModelShape,
    *,
    rank: int,
    size: int,
    layers: Mapping[int, int],
    padded_vocab: int,
) -> list[StoredBlock]:
    """The blocks that shard `rank` of `size` of a parameter consists of, in the order of its rows.

    Args:
        rank, size: tensor-parallel rank and size; for a routed expert those of expert tensor parallelism.
        layers: global number of each layer by the local one in the parameter's name, both 0-based.
    """
    entry = parameter.entry
    key, stacked = _key_of(entry.megatron_name, layers, shape.num_experts is not None)
    stacked_shape = [shape.num_layers] if stacked else []
    if entry.expert is not None:
        assert shape.num_experts is not None
        stacked, stacked_shape = [*stacked, entry.expert], [*stacked_shape, shape.num_experts]
    if not entry.exported:
        key = EMBEDDING_KEY
    num_local, width = parameter.shape[0], parameter.shape[1:]
    total_rows, first_column = entry.num_rows(padded_vocab), parameter.columns.start or 0
    global_width = () if entry.num_columns is None else (entry.num_columns,)
    # The halves of a gated MLP are stored one after the other, so a rank's rows are two blocks.
    parts = 2 if entry.layout == "gate_up" else 1
    blocks = []
    for part in range(parts):
        count = num_local // parts
        first = part * total_rows // parts
        if entry.parallel in ("column", "vocab"):
            first += rank * count
        blocks.append(
            StoredBlock(
                key=key,
                global_shape=(*stacked_shape, total_rows, *global_width),
                offset=(*stacked, first, *((first_column,) if width else ())),
                rows=slice(part * count, (part + 1) * count),
                num_stacked=len(stacked),
                is_padded=entry.parallel == "vocab",
            )
        )
    return blocks


def module_states(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Megatron's modules that ask for an extra state, with the number of them along each stacked axis."""
    states: dict[str, tuple[int, ...]] = {}
    for name in _MODULES_WITH_STATE:
        counts = (shape.num_layers, shape.num_experts or 0) if ".experts.experts." in name else (shape.num_layers,)
        if 0 not in counts:
            states[f"decoder.layers.{name}._extra_state"] = counts
    states["output_layer._extra_state"] = (1,)
    return states


def of_layer(stored: StoredBlock) -> StoredBlock:
    """The block in a tensor of its layer alone, which exists for some layers only: states of what is trained.

    The layer's number moves from the first axis into the key: `decoder.layers.3.self_attention.linear_qkv.weight`.
    """
    prefix = "decoder.layers."
    if not stored.key.startswith(prefix):
        return stored
    return replace(
        stored,
        key=f"{prefix}{stored.offset[0]}.{stored.key.removeprefix(prefix)}",
        global_shape=stored.global_shape[1:],
        offset=stored.offset[1:],
        num_stacked=stored.num_stacked - 1,
    )


def _key_of(megatron_name: str, layers: Mapping[int, int], has_experts: bool) -> tuple[str, list[int]]:
    """Stored name of a parameter and its place along the axis of layers (empty outside the layers)."""
    in_layer = _LAYER.fullmatch(megatron_name)
    if in_layer is None:
        return megatron_name, []
    name = in_layer[2]
    if name == "input_layernorm.weight":
        name = "self_attention.linear_qkv.layer_norm_weight"
    elif name == "pre_mlp_layernorm.weight" and not has_experts:
        name = "mlp.linear_fc1.layer_norm_weight"
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        name = f"mlp.experts.experts.{expert[1]}"
    return f"decoder.layers.{name}", [layers[int(in_layer[1])]]
