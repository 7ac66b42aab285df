"""Log-probabilities of chosen tokens from hidden states, over a sharded vocabulary and in chunks of tokens.

    logprob_N = z_N,target - logsumexp_v z_Nv       entropy_N = logsumexp - sum_v p_v z_v
    z = cap(H W^T) / temperature                    cap(x) = c tanh(x / c) in families with soft-capping, else x

Logits of more than one chunk of tokens never exist: forward keeps only the log-normaliser of each token, backward
recomputes the chunk. Every tensor-parallel rank holds the logits of its own vocabulary shard; padding columns at the
end of the vocabulary take no part.

Shapes: `hidden_NH` the hidden states of `N` chosen positions, `weight_VH` the local vocabulary shard, `target_N` global
token numbers. Statistics are fp32 (fp64 where the hidden states are fp64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary a rank holds: first token number, columns before the padding, and the group.

    `softcap` is the `c` of the logits' cap, None where they have none.
    """

    first: int
    num_valid: int
    group: ProcessGroup
    softcap: float | None = None

    @classmethod
    def of_rank(
        cls, vocab_size: int, padded_vocab_size: int, group: ProcessGroup, *, softcap: float | None = None
    ) -> VocabShard:
        """Shard of this rank when `padded_vocab_size` columns are split evenly over `group`."""
        width = padded_vocab_size // dist.get_world_size(group)
        first = width * dist.get_rank(group)
        return cls(first, min(max(vocab_size - first, 0), width), group, softcap)


def compute_chunk_logits(hidden_nH: Tensor, weight_VH: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Local logits of a chunk divided by the temperature, `[n, num_valid]`, in fp32 or wider. No collectives."""
    logits = _raw_logits(hidden_nH, weight_VH, shard)
    if shard.softcap is not None:
        logits = (logits / shard.softcap).tanh_() * shard.softcap
    return logits / temperature


def compute_chunk_tangent(logits_nV: Tensor, tangent_nH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    """Derivative of `logits_nV`, those of temperature 1, along `tangent_nH` of the hidden states. No collectives."""
    tangent_nV = _raw_logits(tangent_nH, weight_VH, shard)
    return tangent_nV if shard.softcap is None else tangent_nV.mul_(_cap_slope(logits_nV, shard.softcap, 1.0))


def _raw_logits(hidden_nH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    logits = hidden_nH @ weight_VH[: shard.num_valid].t()
    return logits.to(_statistics_dtype(logits.dtype))


def _cap_slope(logits_nV: Tensor, softcap: float, temperature: float) -> Tensor:
    """Derivative of the cap where it gave `logits_nV * temperature`: `1 - tanh^2`."""
    return 1 - (logits_nV * (temperature / softcap)).square_()


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _local_statistics(logits: Tensor, target_n: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum, sum of exponentials, exponential-weighted sum of logits and the target's logit (0 when elsewhere)."""
    if logits.shape[1] == 0:
        zero = logits.new_zeros(logits.shape[0])
        return torch.full_like(zero, float("-inf")), zero, zero, zero
    peak = logits.max(dim=1).values
    weights = (logits - peak[:, None]).exp_()
    own, column = _own_targets(target_n, shard)
    picked = torch.where(own, logits.gather(1, column[:, None]).squeeze(1), torch.zeros_like(peak))
    return peak, weights.sum(1), (weights * logits).sum(1), picked


def _own_targets(target_n: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    column = target_n - shard.first
    own = (column >= 0) & (column < shard.num_valid)
    return own, column.clamp(0, max(shard.num_valid - 1, 0))


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _local_statistics(compute_chunk_logits(hidden, weight_VH, shard, temperature), target, shard)
            for hidden, target in zip(hidden_NH.split(chunk), target_N.split(chunk), strict=True)
        ]
        peak, mass, weighted, picked = (torch.cat(column) for column in zip(*parts, strict=True))
        top = peak.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
        scale = (peak - top).exp()
        sums = torch.stack([mass * scale, weighted * scale, picked])
        dist.all_reduce(sums, group=shard.group)
        normaliser = sums[0].log() + top
        entropy = normaliser - sums[1] / sums[0]
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, normaliser)
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return sums[2] - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_NH, weight_VH, target_N, normaliser = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        weight = weight_VH[: shard.num_valid]
        # The output layer is frozen unless the dense optimizer trains it.
        grad_weight = torch.zeros_like(weight_VH, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        grads = []
        for hidden, target, lse, grad in zip(
            *(t.split(ctx.chunk) for t in (hidden_NH, target_N, normaliser, grad_N)), strict=True
        ):
            logits = compute_chunk_logits(hidden, weight_VH, shard, ctx.temperature)
            slope = None if shard.softcap is None else _cap_slope(logits, shard.softcap, ctx.temperature)
            probabilities = logits.sub_(lse[:, None]).exp_()
            grad_logits = probabilities.mul_(-grad[:, None] / ctx.temperature)
            own, column = _own_targets(target, shard)
            if shard.num_valid:
                share = torch.where(own, grad / ctx.temperature, torch.zeros_like(grad))
                grad_logits.scatter_add_(1, column[:, None], share[:, None].to(grad_logits.dtype))
            if slope is not None:
                grad_logits.mul_(slope)
            if grad_weight is not None:
                grad_weight[: shard.num_valid].addmm_(grad_logits.t(), hidden.to(grad_logits.dtype))
            grads.append(grad_logits.to(hidden.dtype) @ weight)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        return torch.cat(grads), grad_weight, None, None, None, None


def vocab_parallel_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    shard: VocabShard,
    temperature: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each position, `([N], [N])` in nats, equal on all TP ranks.

    The gradient with respect to `hidden_NH` is this rank's share: the caller sums it over TP (`copy_to_group` or
    `gather_sequence` before this function), and the one with respect to the weight is that of its rows. The entropy
    carries no gradient.

    Collectives: two all-reduces of at most `3 N` numbers over `shard.group`, none in backward.
    """
    if hidden_NH.shape[0] == 0:
        empty = hidden_NH.sum(-1).to(_statistics_dtype(hidden_NH.dtype))
        return empty, empty.detach()
    return _VocabParallelLogProbs.apply(hidden_NH, weight_VH, target_N, shard, temperature, chunk_size)
