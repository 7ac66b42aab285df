"""Tensor-parallel collectives as linear maps that know their transpose, for backward mode and forward mode.

Every collective between the layers of a tensor-parallel transformer is linear in its input. A linear map `f` with
transpose `f^T` has backward `g -> f^T(g)` and tangent `t -> f(t)`, so one autograd function serves them all:

    map                          forward           backward          tangent
    copy_to_group                identity          all-reduce        identity
    reduce_from_group            all-reduce        identity          all-reduce
    gather_sequence              all-gather dim 0  reduce-scatter    all-gather dim 0
    reduce_scatter_sequence      reduce-scatter    all-gather        reduce-scatter
    gather_last_dim              all-gather last   reduce-scatter    all-gather last

Megatron-Core's own versions have no tangent, which is why these exist.

Shapes: `x_SBH`, sequence first as in Megatron-Core; with sequence parallelism dimension 0 holds `S / tp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

LinearMap = Callable[[Tensor], Tensor]

# torch 2.13 renamed both; the old names still serve older builds.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _LinearCollective(torch.autograd.Function):
    """A linear map given together with its transpose."""

    @staticmethod
    def forward(x: Tensor, linear_map: LinearMap, transpose: LinearMap) -> Tensor:
        return linear_map(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.linear_map, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return ctx.linear_map(tangent)


def all_reduce_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum of `x` over `group`, in a new contiguous tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather_first_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenation over `group` of equally shaped tensors along dimension 0: `[n, ...] -> [size * n, ...]`."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    _all_gather_single(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter_first_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over `group` of which each rank keeps its chunk of dimension 0: `[size * n, ...] -> [n, ...]`."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    if x.shape[0] % size:
        raise ValueError(
            f"dimension 0 of length {x.shape[0]} cannot be scattered over {size} ranks: "
            f"{x.shape[0]} % {size} = {x.shape[0] % size}; pad the sequence to a multiple of {size}"
        )
    scattered = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    _reduce_scatter_single(scattered, x.contiguous(), group=group)
    return scattered


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity whose gradient is summed over `group`: the input of column-parallel layers."""
    if dist.get_world_size(group) == 1:
        return x
    return _LinearCollective.apply(x, lambda t: t.clone(), lambda g: all_reduce_sum(g, group))


def reduce_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over `group` whose gradient passes through: the output of row-parallel layers."""
    if dist.get_world_size(group) == 1:
        return x
    return _LinearCollective.apply(x, lambda t: all_reduce_sum(t, group), lambda g: g.clone())


def gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """Whole sequence from its shards (sequence parallelism); the gradient is reduce-scattered."""
    if dist.get_world_size(group) == 1:
        return x
    return _LinearCollective.apply(
        x, lambda t: all_gather_first_dim(t, group), lambda g: reduce_scatter_first_dim(g, group)
    )


def reduce_scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """Shard of the summed sequence (sequence parallelism); the gradient is gathered."""
    if dist.get_world_size(group) == 1:
        return x
    return _LinearCollective.apply(
        x, lambda t: reduce_scatter_first_dim(t, group), lambda g: all_gather_first_dim(g, group)
    )


def gather_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenation along the last dimension; the gradient is summed and cut back into the ranks' parts."""
    if dist.get_world_size(group) == 1:
        return x
    size = dist.get_world_size(group)

    def gather(t: Tensor) -> Tensor:
        return torch.cat(all_gather_first_dim(t[None], group).unbind(0), dim=-1)

    def scatter(g: Tensor) -> Tensor:
        return reduce_scatter_first_dim(torch.stack(g.chunk(size, dim=-1)), group)[0]

    return _LinearCollective.apply(x, gather, scatter)


def gather_rows_(x: Tensor, group: ProcessGroup) -> None:
    """Complete `x` `[n, ...]` in place: rank `r` of `group` brings the rows that `own_rows(n, r, size)` names."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return
    if x.dtype == torch.int16:
        x = x.view(torch.bfloat16)  # no backend sends int16; nothing is computed, so the bits are safe
    if x.shape[0] % size == 0 and x.is_contiguous():
        # In place: the rank's own rows are already where they belong.
        _all_gather_single(x, x[own_rows(x.shape[0], rank, size)], group=group)
        return
    for owner in range(size):
        rows = own_rows(x.shape[0], owner, size)
        if rows.start < rows.stop:
            dist.broadcast(x[rows], group_src=owner, group=group)


def own_rows(num_rows: int, rank: int, size: int) -> slice:
    """Rows of the share of `rank` when `num_rows` rows are divided among `size` ranks, the last shares shorter."""
    share = -(-num_rows // size)
    return slice(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


def start_all_reduce(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Begin summing `x` over `group` in place; the returned function waits and gives the sum."""
    if dist.get_world_size(group) == 1:
        return lambda: x
    x = x.contiguous()
    work = dist.all_reduce(x, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return x

    return wait


def start_reduce_scatter_first_dim(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Begin a reduce-scatter of `x` along dimension 0; the returned function waits and gives this rank's chunk."""
    size = dist.get_world_size(group)
    if size == 1:
        return lambda: x
    scattered = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    work = _reduce_scatter_single(scattered, x.contiguous(), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return scattered

    return wait
