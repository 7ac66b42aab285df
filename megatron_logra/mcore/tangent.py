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
from megatron_logra.mcore.model import StageModel
from megatron_logra.mcore.policy import Policy, as_megatron_loss
from megatron_logra.rl.batching import MicroBatch


@torch.no_grad()
def compute_predicted_kl(policy: Policy, batch: MicroBatch, *, temperature: float) -> Tensor:
    """Sum over the chosen positions of the predicted KL in nats, fp64 0-d; 0 before the last pipeline stage.

    The targets must hold the proposed direction in their sketches (after `LograOptimizer.compute_direction_`). Weights,
    optimizer state, random state and the training flag are as before afterwards.
    """
    per_token: list[Tensor] = []

    def head_of(current: MicroBatch) -> Callable[..., Tensor]:
        def head(hidden_states: Tensor, **_: object) -> Tensor:
            primal, tangent = forward_ad.unpack_dual(policy.select_hidden(hidden_states, current))
            tangent = torch.zeros_like(primal) if tangent is None else tangent
            per_token.append(_reduce_tangent(policy, primal, tangent, temperature))
            return per_token[-1]

        return head

    def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
        current = next(iterator)
        with torch.no_grad(), forward_ad.dual_level():
            if not model.pre_process:
                _split_stage_input(model)
            output = model(current.tokens_BT, current.positions_BT, None, output_processor=head_of(current))
            if model.post_process:
                return output, lambda kl_N: as_megatron_loss(kl_N.sum())
            primal, tangent = forward_ad.unpack_dual(output)
            stacked = torch.cat([primal, torch.zeros_like(primal) if tangent is None else tangent], dim=1)
        return stacked, lambda hidden: as_megatron_loss(hidden.sum())

    with policy.phase.during("tangent"), _evaluation(policy.model):
        policy.run_schedule(step, [batch], forward_only=True, copies=2)
    if per_token:
        return torch.cat(per_token).double().sum()
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
    if hidden_NH.shape[0] == 0:
        return torch.zeros(0, dtype=torch.float64, device=hidden_NH.device)
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


_RECOMPUTE_FLAGS = ("recompute_mlp", "recompute_input_layernorm", "recompute_pre_mlp_layernorm")


@contextmanager
def _evaluation(model: StageModel) -> Iterator[None]:
    """Switch recomputation and dropout off, as evaluation mode does, and restore each module's own flag.

    What ignores the mode and has no forward mode is switched off too: selective recomputation of norms and MLPs, and
    the fused rotary embedding.
    """
    config, modules = model.config, list(model.modules())
    training = [module.training for module in modules]
    recomputing = [(module, flag) for module in modules for flag in _RECOMPUTE_FLAGS if getattr(module, flag, False)]
    fused_rope = config.apply_rope_fusion
    for chunk in model.chunks:
        chunk.eval()
    for module, flag in recomputing:
        setattr(module, flag, False)
    config.apply_rope_fusion = False
    try:
        yield
    finally:
        config.apply_rope_fusion = fused_rope
        for module, flag in recomputing:
            setattr(module, flag, True)
        for module, was_training in zip(modules, training, strict=True):
            module.training = was_training
