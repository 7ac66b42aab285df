"""Moves rows between Hugging Face tensors and a rank's Megatron parameter, both ways, without arithmetic.

    from Hugging Face:  local[s.local_rows] = hf[s.hf_name][s.hf_rows, columns]   for every slice s, rest 0
    to Hugging Face:    hf[s.hf_name][s.hf_rows, columns] = local[s.local_rows]

Shapes: local tensors are `[rows]` or `[rows, columns]` of one tensor-parallel rank; a factor `[rows, R]`
uses the same row slices and has its own last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .config import ModelShape
from .rows import ParameterEntry, RowSlice, local_columns, local_rows

ReadRows = Callable[[str, slice, slice], Tensor]
"""`read(hf_name, rows, columns)` gives that block of a tensor; `columns` is `slice(None)` for a vector."""


def assemble_local(
    entry: ParameterEntry,
    row_slices: Sequence[RowSlice],
    column_slice: slice,
    read: ReadRows,
    local_shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A rank's Megatron parameter from Hugging Face tensors; rows in no slice (vocabulary padding) are zero.

    `dtype` None keeps the tensors' own type (the wider one where the sources differ, so that no bit is lost).

    Raises:
        ValueError: a block that `read` returns does not have the shape its place needs.
    """
    blocks = []
    for row_slice in row_slices:
        block = read(row_slice.hf_name, row_slice.hf_rows, column_slice)
        expected = (row_slice.num_rows, *local_shape[1:])
        if tuple(block.shape) != expected:
            raise ValueError(
                f"{entry.megatron_name} needs {expected} from {row_slice.hf_name} rows "
                f"{row_slice.hf_rows.start}:{row_slice.hf_rows.stop}, got {tuple(block.shape)}"
            )
        blocks.append(block)
    if dtype is None:
        dtype = blocks[0].dtype if blocks else torch.float32
        for block in blocks[1:]:
            dtype = torch.promote_types(dtype, block.dtype)
    device = blocks[0].device if blocks else None
    local = torch.zeros(local_shape, dtype=dtype, device=device)
    for row_slice, block in zip(row_slices, blocks, strict=True):
        local[row_slice.local_rows] = block.to(dtype)
    return local


def take_rows(row_slices: Sequence[RowSlice], rows: slice) -> list[RowSlice]:
    """The slices of local rows `rows` alone, which are counted from the first of them."""
    taken = []
    for piece in row_slices:
        begin, end = max(piece.local_rows.start, rows.start), min(piece.local_rows.stop, rows.stop)
        if begin < end:
            shift = piece.hf_rows.start - piece.local_rows.start
            hf_rows = slice(begin + shift, end + shift)
            taken.append(RowSlice(piece.hf_name, hf_rows, slice(begin - rows.start, end - rows.start)))
    return taken


def scatter_rows(local: Tensor, row_slices: Sequence[RowSlice]) -> Iterator[tuple[str, slice, Tensor]]:
    """The reverse of `assemble_local`: (Hugging Face name, its rows, view of the local rows), no copy.

    For weights (export) and for factors alike; the columns are whatever the local tensor has.
    """
    for row_slice in row_slices:
        yield row_slice.hf_name, row_slice.hf_rows, local[row_slice.local_rows]


def merge_shards(
    entry: ParameterEntry,
    shape: ModelShape,
    shards: Sequence[Tensor],
    padded_vocab: int,
) -> dict[str, Tensor]:
    """Whole Hugging Face tensors from the shards of all tensor-parallel ranks, in rank order.

    A tensor that is one piece of one shard is a view of it, others are copies.
    Vocabulary padding is cut. A replicated parameter is taken from the first shard. Every source row must
    be covered: the result of a partial set of shards would hold garbage, so the number of shards is the TP
    size by definition.
    """
    tp_size = len(shards)
    ranks = range(1) if entry.parallel == "replicated" else range(tp_size)
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        columns = local_columns(entry, rank, tp_size)
        row_slices = local_rows(entry, shape, rank, tp_size, padded_vocab)
        for name, rows, block in scatter_rows(shards[rank], row_slices):
            if block.shape == entry.hf_shapes[name]:
                whole[name] = block
                continue
            if name not in whole:
                whole[name] = block.new_empty(entry.hf_shapes[name])
            target = whole[name][rows] if block.dim() == 1 else whole[name][rows, columns]
            target.copy_(block)
    return whole
