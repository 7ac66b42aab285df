"""Predicted KL without forward mode: the Fisher form of the same quantity, from ordinary backward passes.

For labels `y_t` drawn from the policy at the probe positions `t` of a response,

    c = <sum_t grad log p(y_t), proposed update> = -sum over targets <S, D>,   S = sum of dY^T P,
    E[c^2] / 2 = sum_t 1/2 Var_p(dz_t),

because the scores of different positions are uncorrelated and have mean 0: an unbiased estimate of the sum of predicted
KLs, whatever the layers are made of, fused attention included. `<S, D>` is taken product by product in backward
(`sum((dY D) * P)`), so that no second sketch buffer exists. With scores that are near Gaussian `c^2 / 2` has the
variance `2 KL^2`, which the reported standard error assumes.

Labels are drawn by inverse distribution function from uniform numbers that belong to the positions of a response, so
the estimate does not depend on the layout.

Shapes: `N` chosen positions of one response on this rank; `V` local vocabulary columns; `P` ranks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_logra.mcore.logprobs import VocabShard, compute_chunk_logits, vocab_parallel_logprobs
from megatron_logra.mcore.policy import Policy, as_megatron_loss
from megatron_logra.parallel.reductions import sum_over
from megatron_logra.rl.batching import MicroBatch


@dataclass(frozen=True)
class FisherEstimate:
    """Sum over this data-parallel rank's probe positions of the predicted KL, and the variance of it; fp64 0-d, nats.

    Given on one rank of those that share the responses, 0 on the others, so that a sum over the world counts them once.
    """

    total: Tensor
    variance: Tensor


def compute_fisher_kl(
    policy: Policy, batches: Sequence[MicroBatch], uniforms: Sequence[Tensor], *, temperature: float
) -> FisherEstimate:
    """Estimate from one backward pass for each response and draw.

    The targets must hold the proposed direction in their sketches. Weights, sketches and optimizer state are untouched.

    Args:
        batches: one response each; the same number on all ranks.
        uniforms: per response `[draws, entries]` fp64 in [0, 1), of all its entries in order.
    """
    draws = uniforms[0].shape[0]
    total = torch.zeros((), dtype=torch.float64, device=policy.device)
    variance = torch.zeros_like(total)
    for batch, uniform in zip(batches, uniforms, strict=True):
        own = uniform.to(policy.device)[:, batch.entry_index_N]
        values = torch.stack([_half_square(policy, batch, own[draw], temperature) for draw in range(draws)])
        total += values.mean()
        # Var(c^2 / 2) is two thirds of E[(c^2 / 2)^2] for a Gaussian c.
        variance += values.square().mean() * (2 / 3) / draws
    groups = policy.groups
    counts = groups.is_last_stage and groups.tp_rank == 0 and groups.cp_rank == 0
    if policy.shape.num_experts is not None:
        counts = counts and groups.dp_rank == 0
    return FisherEstimate(total * counts, variance * counts)


def _half_square(policy: Policy, batch: MicroBatch, uniform_N: Tensor, temperature: float) -> Tensor:
    """`c^2 / 2` of one response and draw."""

    def head_of(current: MicroBatch) -> Callable[..., Tensor]:
        def head(hidden_states: Tensor, **_: object) -> Tensor:
            hidden_NH = policy.select_hidden(hidden_states, current)
            weight = policy.output_weight().detach()
            # A micro-batch that only fills a round of the schedule has no entries.
            numbers = uniform_N if current is batch else uniform_N[:0]
            labels = sample_labels(
                hidden_NH.detach(),
                weight,
                numbers,
                shard=policy.vocab,
                temperature=temperature,
                chunk_size=policy.chunk_size,
            )
            return vocab_parallel_logprobs(
                hidden_NH,
                weight,
                labels,
                shard=policy.vocab,
                temperature=temperature,
                chunk_size=policy.chunk_size,
            )[0]

        return head

    def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
        current = next(iterator)
        output = model(current.tokens_BT, current.positions_BT, None, output_processor=head_of(current))
        return output, lambda logprob_N: as_megatron_loss(logprob_N.sum())

    policy.phase.score = torch.zeros((), dtype=torch.float64, device=policy.device)
    with policy.phase.during("score"):
        policy.run_schedule(step, [batch], forward_only=False)
    groups = policy.groups
    score = sum_over(sum_over(policy.phase.score, groups.mp), groups.cp)
    if policy.shape.num_experts is not None:
        # An expert sees the tokens of several replicas at once; independent responses add up under the square.
        score = sum_over(score, groups.dp)
    return score.square() / 2


@torch.no_grad()
def sample_labels(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    uniform_N: Tensor,
    *,
    shard: VocabShard,
    temperature: float,
    chunk_size: int,
) -> Tensor:
    """Tokens drawn from the policy, int64 `[N]`, equal on all TP ranks: the first whose distribution passes `u`.

    Collectives of each chunk: one all-gather of two numbers a token, one all-reduce of one.
    """
    if hidden_NH.shape[0] == 0:
        return torch.zeros(0, dtype=torch.int64, device=hidden_NH.device)
    parts = [
        _sample_chunk(compute_chunk_logits(hidden, weight_VH, shard, temperature).double(), uniform, shard)
        for hidden, uniform in zip(hidden_NH.split(chunk_size), uniform_N.split(chunk_size), strict=True)
    ]
    return torch.cat(parts)


def _sample_chunk(logits_nV: Tensor, uniform_n: Tensor, shard: VocabShard) -> Tensor:
    num_tokens, num_columns = logits_nV.shape
    parts_2n = logits_nV.new_zeros(2, num_tokens)
    if num_columns:
        parts_2n[0] = logits_nV.amax(1)
        weights_nV = (logits_nV - parts_2n[0, :, None]).exp()
        parts_2n[1] = weights_nV.sum(1)
    else:
        parts_2n[0] = float("-inf")
    size, rank = dist.get_world_size(shard.group), dist.get_rank(shard.group)
    gathered = parts_2n.new_empty(size * 2, num_tokens)
    dist.all_gather_into_tensor(gathered, parts_2n, group=shard.group)
    peak_Pn, mass_Pn = gathered.view(size, 2, num_tokens).unbind(1)
    mass_Pn = (peak_Pn - peak_Pn.amax(0)).exp() * mass_Pn
    end_Pn = mass_Pn.cumsum(0)
    goal_n = uniform_n * end_Pn[-1]
    owner_n = (end_Pn <= goal_n).sum(0).clamp(max=size - 1)
    label_n = torch.zeros(num_tokens, dtype=torch.int64, device=logits_nV.device)
    if num_columns:
        start_n = end_Pn[rank] - mass_Pn[rank]
        # The goal in the units of this rank's own weights.
        local_n = (goal_n - start_n) / (peak_Pn[rank] - peak_Pn.amax(0)).exp()
        column_n = (weights_nV.cumsum(1) <= local_n[:, None]).sum(1).clamp(max=num_columns - 1)
        label_n = torch.where(owner_n == rank, shard.first + column_n, label_n)
    return sum_over(label_n, shard.group)
