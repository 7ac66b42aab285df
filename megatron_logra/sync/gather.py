"""Gathers tensors that a model replica holds in pieces (TP x PP) on every rank of it, in bounded buckets.

Protocol: every rank knows what every pipeline stage holds (`GatherItem`, computed from the configuration, so no
object is ever sent). Stages take turns, in order. Of a bucket of items

    1. the stage that holds it all-gathers the sharded items' local tensors over the ranks that share them, the TP
       group for dense layers and etp x ep for routed experts, in one collective each;
    2. places each rank's rows (and columns) where they belong in the whole Hugging Face tensors;
    3. broadcasts the whole tensors over the PP group, in one collective.

Items that every rank of the stage holds in full skip step 1. An item of routed experts is the n-th local expert of
every expert-parallel rank, so that its gather gives as many experts as there are such ranks. All ranks of the replica
must consume the iterator to its end. Data is only moved: the result has the same bits on every rank and under every
layout.

Shapes: local tensors `[rows]` or `[rows, columns]`; whole ones as `GatherItem.hf_shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.rows import ParameterEntry, RowSlice, local_columns, local_rows, local_shape
from megatron_logra.parallel.collectives import all_gather_first_dim
from megatron_logra.parallel.traffic import purpose


@dataclass(frozen=True)
class Shard:
    """What one rank brings of an item: rows by `row_slices`, each in columns `columns` of the whole."""

    row_slices: tuple[RowSlice, ...]
    columns: slice


@dataclass(frozen=True)
class GatherItem:
    """One local tensor of a pipeline stage and the whole tensors it is a part of.

    Attributes:
        entry: the table entry (of experts that of the first rank; the Megatron name is the same on all); how the
            caller finds the local tensor.
        hf_shapes: shapes of the whole tensors (a factor has its rank as last dimension), by Hugging Face name.
        local_shape: shape of the local tensor, the same on every rank that shares the item.
        shards: by rank in the TP group, or in etp x ep for experts; a single one if every rank holds the whole.
    """

    entry: ParameterEntry
    hf_shapes: Mapping[str, tuple[int, ...]]
    local_shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        for name, hf_shape in self.hf_shapes.items():
            covered = sum(
                (piece.hf_rows.stop - piece.hf_rows.start) * _num_columns(shard.columns, hf_shape)
                for shard in self.shards
                for piece in shard.row_slices
                if piece.hf_name == name
            )
            if covered != math.prod(hf_shape):
                raise ValueError(
                    f"{self.entry.megatron_name}: the TP ranks hold {covered} elements of {name}, "
                    f"whose shape {hf_shape} has {math.prod(hf_shape)}"
                )

    @property
    def is_sharded(self) -> bool:
        """Whether the TP ranks hold different parts."""
        return len(self.shards) > 1

    @property
    def num_elements(self) -> int:
        """Elements of all whole tensors."""
        return sum(math.prod(hf_shape) for hf_shape in self.hf_shapes.values())


@dataclass(frozen=True)
class ShardSizes:
    """Over how many ranks a stage's tensors are spread: dense layers over TP; experts over EP, each over expert TP."""

    tp: int = 1
    etp: int = 1
    ep: int = 1
    padded_vocab: int = 0

    def shards_of(self, entry: ParameterEntry) -> int:
        """Ranks that a parameter itself is split over."""
        return self.tp if entry.expert is None else self.etp


def factor_item(entries: Sequence[ParameterEntry], shape: ModelShape, sizes: ShardSizes, *, rank: int) -> GatherItem:
    """The item of a target's factor `[O, rank]`: its rows are split as the weight's, and it has no input columns.

    So a row-parallel target's factor is whole on every rank that shares the layer.

    Args:
        entries: the entry, or of experts the entries at the same local number on every expert-parallel rank.
    """
    num_shards = sizes.shards_of(entries[0])
    shards = []
    for entry in entries:
        for at in range(num_shards):
            whole_elsewhere = entry.parallel not in ("column", "vocab") and at > 0
            rows = () if whole_elsewhere else local_rows(entry, shape, at, num_shards, sizes.padded_vocab)
            shards.append(Shard(rows, slice(None)))
    if entries[0].expert is None and entries[0].parallel not in ("column", "vocab"):
        shards = shards[:1]
    return GatherItem(
        entry=entries[0],
        hf_shapes={name: (hf_shape[0], rank) for entry in entries for name, hf_shape in entry.hf_shapes.items()},
        local_shape=(local_shape(entries[0], num_shards, sizes.padded_vocab)[0], rank),
        shards=tuple(shards),
    )


def weight_item(entries: Sequence[ParameterEntry], shape: ModelShape, sizes: ShardSizes) -> GatherItem:
    """The item of a parameter itself; vocabulary padding is cut. `entries` as in `factor_item`."""
    num_shards = 1 if entries[0].parallel == "replicated" else sizes.shards_of(entries[0])
    shards = [
        Shard(local_rows(entry, shape, at, num_shards, sizes.padded_vocab), local_columns(entry, at, num_shards))
        for entry in entries
        for at in range(num_shards)
    ]
    return GatherItem(
        entry=entries[0],
        hf_shapes={name: hf_shape for entry in entries for name, hf_shape in entry.hf_shapes.items()},
        local_shape=local_shape(entries[0], num_shards, sizes.padded_vocab),
        shards=tuple(shards),
    )


def stream_gathered(
    stages: Sequence[Sequence[GatherItem]],
    read_local: Callable[[ParameterEntry], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tp_group: ProcessGroup | None,
    pp_group: ProcessGroup | None,
    expert_group: ProcessGroup | None = None,
    bucket_bytes: int,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the whole tensors bucket by bucket, in the order of the stages and their items, on every rank.

    Args:
        stages: items of every pipeline stage, the same on all ranks; `stages[i]` is held by rank i of `pp_group`.
        read_local: local tensor of an entry of this rank's own stage; cast to `dtype` here.
        dtype, device: of the result.
        tp_group: ranks that share a stage's dense layers (all-gather); None for one rank.
        expert_group: ranks that share a stage's experts, etp x ep (all-gather); None for one rank.
        pp_group: ranks that hold the stages (broadcast); None for one stage.
        bucket_bytes: most bytes of whole tensors in a bucket; a larger item travels alone.

    Returns:
        Lists of (Hugging Face name, tensor). The tensors are views of their bucket's buffer, which lives as
        long as one of them does.

    Raises:
        ValueError: a wrong number of stages or shards, or a local tensor of a wrong shape (before any collective).
    """
    _check_layout(stages, _size(tp_group), _size(expert_group), _size(pp_group), bucket_bytes)
    own_stage = 0 if pp_group is None else dist.get_rank(pp_group)
    itemsize = torch.empty((), dtype=dtype).element_size()
    for stage, items in enumerate(stages):
        for bucket in _split_in_buckets(items, bucket_bytes // itemsize):
            whole = torch.empty(sum(item.num_elements for item in bucket), dtype=dtype, device=device)
            views = _whole_views(bucket, whole)
            if stage == own_stage:
                _fill_bucket(bucket, views, read_local, tp_group, expert_group, whole)
            if pp_group is not None and _size(pp_group) > 1:
                with purpose("weight_sync"):
                    dist.broadcast(whole, group_src=stage, group=pp_group)
            yield [(name, view) for item_views in views for name, view in item_views.items()]


def _fill_bucket(
    bucket: Sequence[GatherItem],
    views: Sequence[Mapping[str, Tensor]],
    read_local: Callable[[ParameterEntry], Tensor],
    tp_group: ProcessGroup | None,
    expert_group: ProcessGroup | None,
    like: Tensor,
) -> None:
    """Places the local tensors of all ranks in the whole tensors of a bucket of this rank's stage."""
    dense, experts = [], []
    for item, item_views in zip(bucket, views, strict=True):
        local = read_local(item.entry).detach()
        if tuple(local.shape) != item.local_shape:
            raise ValueError(
                f"the local tensor of {item.entry.megatron_name} has shape {tuple(local.shape)}, "
                f"needs {item.local_shape}"
            )
        local = local.to(device=like.device, dtype=like.dtype)
        if not item.is_sharded:
            _place(item.shards[0], local, item_views)
        elif item.entry.expert is None:
            dense.append((item, item_views, local))
        else:
            experts.append((item, item_views, local))
    _gather_shards(dense, tp_group)
    _gather_shards(experts, expert_group)


def _gather_shards(
    sharded: Sequence[tuple[GatherItem, Mapping[str, Tensor], Tensor]], group: ProcessGroup | None
) -> None:
    if not sharded:
        return
    # Flat and contiguous: gloo takes the storage of a strided tensor without a word.
    send = torch.cat([local.reshape(-1) for _, _, local in sharded])
    with purpose("weight_sync"):
        received = send[None] if group is None else all_gather_first_dim(send[None], group)
    for rank in range(_size(group)):
        start = 0
        for item, item_views, local in sharded:
            block = received[rank, start : start + local.numel()].view(item.local_shape)
            _place(item.shards[rank], block, item_views)
            start += local.numel()


def _place(shard: Shard, local: Tensor, views: Mapping[str, Tensor]) -> None:
    for piece in shard.row_slices:
        target = views[piece.hf_name][piece.hf_rows]
        target = target if target.dim() == 1 else target[:, shard.columns]
        target.copy_(local[piece.local_rows])


def _whole_views(bucket: Sequence[GatherItem], whole: Tensor) -> list[dict[str, Tensor]]:
    """The whole tensors of each item, back to back in one flat buffer."""
    views, start = [], 0
    for item in bucket:
        item_views = {}
        for name, hf_shape in item.hf_shapes.items():
            item_views[name] = whole[start : start + math.prod(hf_shape)].view(hf_shape)
            start += math.prod(hf_shape)
        views.append(item_views)
    return views


def _split_in_buckets(items: Sequence[GatherItem], max_elements: int) -> Iterator[list[GatherItem]]:
    bucket: list[GatherItem] = []
    num_elements = 0
    for item in items:
        if bucket and num_elements + item.num_elements > max_elements:
            yield bucket
            bucket, num_elements = [], 0
        bucket.append(item)
        num_elements += item.num_elements
    if bucket:
        yield bucket


def _check_layout(
    stages: Sequence[Sequence[GatherItem]], tp_size: int, expert_size: int, pp_size: int, bucket_bytes: int
) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
    if len(stages) != pp_size:
        raise ValueError(f"{len(stages)} stages were described, but the pipeline group has {pp_size} ranks")
    owners: dict[str, str] = {}
    for stage, items in enumerate(stages):
        for item in items:
            size = tp_size if item.entry.expert is None else expert_size
            if len(item.shards) not in (1, size):
                raise ValueError(
                    f"{item.entry.megatron_name} was described for {len(item.shards)} ranks, the group has {size}"
                )
            for name in item.hf_shapes:
                owner = f"{item.entry.megatron_name} of stage {stage}"
                if name in owners:
                    raise ValueError(f"{name} has two owners: {owners[name]} and {owner}")
                owners[name] = owner


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _num_columns(columns: slice, hf_shape: tuple[int, ...]) -> int:
    return 1 if len(hf_shape) == 1 else len(range(*columns.indices(hf_shape[1])))
