"""Predicted and actual KL of a proposed update, through the pipeline schedules (DESIGN: predicted-KL step control).

The tangent pass is forward-mode differentiation of the whole network along `W -> W - D A` for all targets at once.
Between pipeline stages the primal and its tangent travel side by side in the batch dimension:

    stage k sends [h | h'] as [S, 2B, H];  stage k + 1 splits it into the dual number (h, h')

On the last stage the logits and their tangents are formed in chunks of tokens and reduced to one number a token,
`1/2 Var_p(dz / temperature)`, over the sharded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_logra.kl.predicted_kl import vocab_parallel_exact_kl, vocab_parallel_predicted_kl
from megatron_logra.mcore.logprobs import compute_chunk_logits
from megatron_logra.mcore.policy import Policy, as_megatron_loss
from megatron_logra.rl.batching import MicroBatch


@torch.no_grad()
def compute_predicted_kl(policy: Policy, batch: MicroBatch, *, temperature: float) -> Tensor:
    """Sum over the chosen positions of the predicted KL in nats, fp64 0-d; 0 before the last pipeline stage.

    The targets must hold the proposed direction in their sketches (after `LograOptimizer.compute_direction_`). Weights,
    optimizer state, random state and the training flag are as before afterwards.
    """
    per_token: list[Tensor] = []

    def head(hidden_states: Tensor, **_: object) -> Tensor:
        primal, tangent = forward_ad.unpack_dual(policy.select_hidden(hidden_states, batch))
        assert tangent is not None, "the last pipeline stage holds at least one target"
        per_token.append(_reduce_tangent(policy, primal, tangent, temperature))
        return per_token[0]

    def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
        next(iterator)
        with torch.no_grad(), forward_ad.dual_level():
            if not model.pre_process:
                _split_stage_input(model)
            output = model(batch.tokens_BT, batch.positions_BT, None, output_processor=head)
            if model.post_process:
                return output, lambda kl_N: as_megatron_loss(kl_N.sum())
            primal, tangent = forward_ad.unpack_dual(output)
            stacked = torch.cat([primal, torch.zeros_like(primal) if tangent is None else tangent], dim=1)
        return stacked, lambda hidden: as_megatron_loss(hidden.sum())

    with policy.phase.during("tangent"), _evaluation(policy.model):
        policy.run_schedule(step, [batch], forward_only=True, copies=2)
    if per_token:
        return per_token[0].double().sum()
    return torch.zeros((), dtype=torch.float64, device=batch.tokens_BT.device)


def compute_actual_kl(policy: Policy, hidden_before: Tensor, hidden_after: Tensor, *, temperature: float) -> Tensor:
    """Sum over positions of the exact `KL(old || new)` in nats from hidden states `[N, H]` of the last stage.

    The output layer is the same before and after, so hidden states are all that must be kept of the old policy.
    """
    weight = policy.output_weight()
    total = torch.zeros((), dtype=torch.float64, device=hidden_before.device)
    chunks = zip(hidden_before.split(policy.chunk_size), hidden_after.split(policy.chunk_size), strict=True)
    for before, after in chunks:
        total += vocab_parallel_exact_kl(
            compute_chunk_logits(before, weight, policy.vocab, 1.0),
            compute_chunk_logits(after, weight, policy.vocab, 1.0),
            temperature=temperature,
            group=policy.groups.tp,
        ).sum()
    return total


def _reduce_tangent(policy: Policy, hidden_NH: Tensor, tangent_NH: Tensor, temperature: float) -> Tensor:
    weight = policy.output_weight()
    parts = [
        vocab_parallel_predicted_kl(
            compute_chunk_logits(hidden, weight, policy.vocab, 1.0),
            compute_chunk_logits(tangent, weight, policy.vocab, 1.0),
            temperature=temperature,
            group=policy.groups.tp,
        )
        for hidden, tangent in zip(hidden_NH.split(policy.chunk_size), tangent_NH.split(policy.chunk_size), strict=True)
    ]
    return torch.cat(parts)


def _split_stage_input(model: GPTModel) -> None:
    received = model.decoder.input_tensor
    received = received[0] if isinstance(received, list) else received
    primal, tangent = received.chunk(2, dim=1)
    # A dual tensor is a view, which Megatron would pass through a function without tangent; the clone is not.
    model.set_input_tensor(forward_ad.make_dual(primal.contiguous(), tangent.contiguous()).clone())


@contextmanager
def _evaluation(model: GPTModel) -> Iterator[None]:
    """Switch recomputation and dropout off, as evaluation mode does, and restore each module's own flag."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
