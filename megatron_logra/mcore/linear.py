"""Megatron's column- and row-parallel linears with a sketch in place of the weight gradient.

For a local weight shard `W_OI` and the local columns `A_RI` of its group's projection:

    forward    Y = X W^T,  P = X A^T                 saved for backward: P (R wide), never X
    backward   dX = dY W,  S += dY^T P               the weight gradient itself is never formed
    tangent    dY = W dX - P D^T                     for the proposed update  W -> W - D A

Column parallel: `X` is replicated over TP (or, with sequence parallelism, its sequence is sharded), so each rank
projects only its own share of the tokens, and the backward pass gathers `P`, R wide, while the collective of `dX` is
in flight. Row parallel: `P` and hence `S` are partial sums over TP, reduced once a step with the whole buffer.

The linears of routed experts communicate nothing: the dispatcher brings each expert its tokens, on every rank that
holds a shard of it, and adds up what they make of them.

Shapes: `x_SBI` sequence first (`x_TI` in an expert); `T = S B` tokens. Collectives run over the layer's tensor-parallel
group. With weight decay the tangent is that of `W -> (1 - decay) W - D A`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.parallel.collectives import (
    all_gather_first_dim,
    copy_to_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    start_all_reduce,
    start_reduce_scatter_first_dim,
)
from megatron_logra.parallel.traffic import purpose
from megatron_logra.sketch.target import SketchTarget


class LostTangentError(RuntimeError):
    """A tensor of the tangent pass came without a tangent: an operation before it dropped the derivative."""


def record_backward_(target: SketchTarget, grad_out_TO: Tensor, projected_TR: Tensor) -> None:
    """What a backward pass leaves behind in the current phase: a share of the sketch, or of the update's score."""
    if target.phase.current == "score":
        assert target.phase.score is not None
        direction_OR = target.require_sketch().to(grad_out_TO.dtype)
        target.phase.score -= ((grad_out_TO @ direction_OR) * projected_TR).sum(dtype=torch.float64)
    else:
        accumulate_sketch_(target.require_sketch(), grad_out_TO, projected_TR)


def accumulate_sketch_(sketch_OR: Tensor, grad_out_TO: Tensor, projected_TR: Tensor) -> None:
    """Add `dY^T P` to the sketch with fp32 (or wider) accumulation, in place and without collectives."""
    wide = sketch_OR.dtype
    if grad_out_TO.is_cuda and grad_out_TO.dtype != wide:
        # The tensor cores multiply in the compute dtype and accumulate in fp32.
        sketch_OR += torch.mm(grad_out_TO.t(), projected_TR, out_dtype=wide)
    else:
        sketch_OR.addmm_(grad_out_TO.t().to(wide), projected_TR.to(wide))


def project(x: Tensor, target: SketchTarget) -> Tensor:
    """`P = X A^T` in the dtype of `x`: `[..., I] -> [T, R]`, leading dimensions flattened. No collectives.

    The product is with `sqrt(R) A`, whose entries are exact in every dtype, and the scale follows it.
    """
    projection = target.require_projection()
    return (x.reshape(-1, x.shape[-1]) @ projection.unscaled(x.dtype).t()).mul_(projection.scale)


def _token_share(x_TI: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's share of replicated tokens, equally long on every rank (the last one padded with zeros)."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return x_TI
    share = -(-x_TI.shape[0] // size)
    own = x_TI[rank * share : (rank + 1) * share]
    return F.pad(own, (0, 0, 0, share - own.shape[0]))


def _gather_projected(projected: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
    """Whole `P_TR` from the ranks' shares; padding rows are cut off."""
    with purpose("projected"):
        return all_gather_first_dim(projected, group)[:num_tokens]


class _SketchedColumnLinear(torch.autograd.Function):
    """`Y = X W^T` of a column-parallel layer, recording `P` and accumulating `S` in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: SketchTarget, group: ProcessGroup, sequence: bool
    ) -> Tensor:
        share = x.reshape(-1, x.shape[-1]) if sequence else _token_share(x.reshape(-1, x.shape[-1]), group)
        ctx.save_for_backward(weight, project(share, target))
        ctx.target, ctx.group, ctx.sequence = target, group, sequence
        x_full = all_gather_first_dim(x, group) if sequence else x
        return F.linear(x_full, weight)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, projected = ctx.saved_tensors
        grad_in = grad_out @ weight
        start = start_reduce_scatter_first_dim if ctx.sequence else start_all_reduce
        wait_for_grad_in = start(grad_in, ctx.group)
        grad_out_TO = grad_out.reshape(-1, grad_out.shape[-1])
        projected = _gather_projected(projected, grad_out_TO.shape[0], ctx.group)
        record_backward_(ctx.target, grad_out_TO, projected)
        return wait_for_grad_in(), None, None, None, None


class _SketchedLocalLinear(torch.autograd.Function):
    """`Y = X W^T` on this rank alone, recording `P` and accumulating `S` in backward.

    Of a row-parallel layer all three are partial sums; of an expert the tokens are those dispatched to it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: SketchTarget) -> Tensor:
        ctx.save_for_backward(weight, project(x, target))
        ctx.target = target
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        weight, projected = ctx.saved_tensors
        record_backward_(ctx.target, grad_out.reshape(-1, grad_out.shape[-1]), projected)
        return grad_out @ weight, None, None


def split_dual(x: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Primal and tangent of a dual number. Raises `LostTangentError`, naming `where`, when there is no tangent."""
    primal, tangent = forward_ad.unpack_dual(x)
    if tangent is None:
        raise LostTangentError(
            f"{where} has no tangent: an operation before it dropped the derivative, as detach() and custom operators "
            "without forward mode do"
        )
    return primal, tangent


def add_update_tangent(y: Tensor, projected_TR: Tensor, target: SketchTarget) -> Tensor:
    """Add `-P D^T - decay y`, the layer's own share of the tangent, to that of the dual tensor `y_SBO`."""
    primal, tangent = split_dual(y, f"the output of {target.group}")
    direction_OR = target.require_sketch().to(projected_TR.dtype)
    own = -(projected_TR @ direction_OR.t()).view_as(primal)
    if target.decay:
        own = own - target.decay * primal
    # A fresh dual number is a view of its primal; Megatron passes views through a function without tangent.
    return forward_ad.make_dual(primal, tangent + own).clone()


class SketchedColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear whose weight is a LoGRA target once `bind_target` was called."""

    target: SketchTarget | None = None

    def bind_target(self, target: SketchTarget) -> None:
        """Make the weight a target; from then on it is frozen for autograd."""
        self.target = target
        self.weight.requires_grad_(False)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`[S(/tp), B, I] -> [S, B, O/tp]`; returns the output and, with `skip_bias_add`, the bias."""
        if self.target is None:
            # Megatron's own linear makes the weight's gradient; it has no forward mode, which the probe needs.
            if self.weight.requires_grad and torch.is_grad_enabled():
                return super().forward(input_, weight, runtime_gather_output)
            output = F.linear(self._whole_input(input_), self.weight)
        else:
            output = self._target_forward(input_, self.target)
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        return output, self.bias if self.skip_bias_add else None

    def _target_forward(self, x: Tensor, target: SketchTarget) -> Tensor:
        if target.phase.current == "tangent":
            return self._tangent_forward(x, target)
        if target.phase.records and torch.is_grad_enabled():
            if self.is_expert:
                return _SketchedLocalLinear.apply(x, self.weight, target)
            return _SketchedColumnLinear.apply(x, self.weight, target, self.tp_group, self.sequence_parallel)
        return F.linear(self._whole_input(x), self.weight)

    def _whole_input(self, x: Tensor) -> Tensor:
        if self.is_expert:
            return x
        gather = gather_sequence if self.sequence_parallel else copy_to_group
        return gather(x, self.tp_group)

    def _tangent_forward(self, x: Tensor, target: SketchTarget) -> Tensor:
        primal, _ = split_dual(x, f"the input of {target.group}")
        x_full = self._whole_input(x)
        if self.is_expert:
            projected = project(primal, target)
        else:
            share = primal.reshape(-1, primal.shape[-1])
            if not self.sequence_parallel:
                share = _token_share(share, self.tp_group)
            num_tokens = x_full.shape[0] * x_full.shape[1]
            projected = _gather_projected(project(share, target), num_tokens, self.tp_group)
        return add_update_tangent(F.linear(x_full, self.weight), projected, target)


class SketchedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear whose weight is a LoGRA target once `bind_target` was called."""

    target: SketchTarget | None = None

    def bind_target(self, target: SketchTarget) -> None:
        """Make the weight a target; from then on it is frozen for autograd."""
        self.target = target
        self.weight.requires_grad_(False)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """`[S, B, I/tp] -> [S(/tp), B, O]`, summed over TP; returns the output and, with `skip_bias_add`, the bias."""
        if self.target is None:
            if self.weight.requires_grad and torch.is_grad_enabled():
                return super().forward(input_)
            output = F.linear(input_, self.weight)
        else:
            output = self._target_forward(input_, self.target)
        if not self.is_expert:
            reduce = reduce_scatter_sequence if self.sequence_parallel else reduce_from_group
            output = reduce(output, self.tp_group)
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        return output, self.bias if self.skip_bias_add else None

    def _target_forward(self, x: Tensor, target: SketchTarget) -> Tensor:
        """This rank's part of the sum."""
        if target.phase.current == "tangent":
            primal, _ = split_dual(x, f"the input of {target.group}")
            projected = project(primal, target)
            return add_update_tangent(F.linear(x, self.weight), projected, target)
        if target.phase.records and torch.is_grad_enabled():
            return _SketchedLocalLinear.apply(x, self.weight, target)
        return F.linear(x, self.weight)
