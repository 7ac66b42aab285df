"""Predicted and actual KL of a proposed update, through the pipeline schedules (DESIGN: predicted-KL step control).

The tangent pass is forward-mode differentiation of the whole network along `W -> W - D A` for all targets at once.
Between pipeline stages the primal and its tangent travel side by side in the batch dimension:

    stage k sends [h | h'] as [S, 2B, H];  stage k + 1 splits it into the dual number (h, h')

The output of the embedding enters with a tangent of 0, so that every later tensor must carry one: where it is missing,
an operation dropped the derivative. On the last stage the logits and their tangents are formed in chunks of tokens and
reduced to one number a token, `1/2 Var_p(dz / temperature)`, over the sharded vocabulary.

A stage that cannot carry the tangent on (an operation without forward mode, a tangent that was dropped) would leave the
other stages waiting for its output. It sends NaN instead, which makes the predicted KL of all ranks NaN, and keeps the
reason in `policy.phase.failure` for whoever reads that number (`step_metrics.read_step`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_logra.kl.predicted_kl import vocab_parallel_exact_kl, vocab_parallel_predicted_kl
from megatron_logra.mcore.linear import LostTangentError, split_dual
from megatron_logra.mcore.logprobs import compute_chunk_logits, compute_chunk_tangent
from megatron_logra.mcore.model import StageModel
from megatron_logra.mcore.policy import Policy, as_megatron_loss
from megatron_logra.rl.batching import MicroBatch


class ForwardModeError(RuntimeError):
    """The tangent pass cannot go through a layer, so no KL can be predicted with it."""


@torch.no_grad()
def compute_predicted_kl(policy: Policy, batch: MicroBatch, *, temperature: float) -> Tensor:
    """Sum over the chosen positions of the predicted KL in nats, fp64 0-d; 0 before the last pipeline stage.

    The policy is the full softmax of `logits / temperature` over the real tokens of the vocabulary, whatever top-k and
    top-p the probe was sampled with. The targets must hold the proposed direction in their sketches (after
    `LograOptimizer.compute_direction_`). Weights, sketches, optimizer state, random state and the training flags are as
    before afterwards. NaN, with the reason in `policy.phase.failure` of the rank concerned, when a layer has no forward
    mode. Memory beyond a layer's activations and tangents: logits and tangents of `policy.chunk_size` tokens.
    """
    per_token: list[Tensor] = []
    policy.phase.failure = None

    def head_of(current: MicroBatch) -> Callable[..., Tensor]:
        def head(hidden_states: Tensor, **_: object) -> Tensor:
            primal, tangent = split_dual(policy.select_hidden(hidden_states, current), "the output of the model")
            return _reduce_tangent(policy, primal, tangent, temperature)

        return head

    def run(current: MicroBatch, model: GPTModel) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            if not model.pre_process:
                _split_stage_input(model)
            output = model(current.tokens_BT, current.positions_BT, None, output_processor=head_of(current))
            return output if model.post_process else torch.cat(split_dual(output, "its output"), dim=1)

    def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
        current = next(iterator)
        try:
            output = run(current, model)
        except (LostTangentError, NotImplementedError) as error:  # what torch raises where forward mode is missing
            policy.phase.failure = _describe_failure(policy, error)
            output = _stand_in(policy, current, model)
        if model.post_process:
            per_token.append(output)
        return output, lambda result: as_megatron_loss(result.sum())

    with policy.phase.during("tangent"), _evaluation(policy.model), ExitStack() as hooks:
        for chunk in policy.model.chunks:
            if chunk.pre_process:
                hooks.callback(chunk.embedding.register_forward_hook(_start_tangent).remove)
        policy.run_schedule(step, [batch], forward_only=True, copies=2)
    if per_token:
        return torch.cat(per_token).double().sum()
    return torch.zeros((), dtype=torch.float64, device=batch.tokens_BT.device)


def compute_actual_kl(
    policy: Policy, hidden_before: Tensor, hidden_after: Tensor, *, temperature: float, other: Policy | None = None
) -> Tensor:
    """Sum over positions of the exact `KL(old || new)` in nats from hidden states `[N, H]` of the last stage.

    The output layer is the same before and after, so hidden states are all that must be kept of the old policy. With
    `other`, a policy in the same layout, `hidden_after` and its output layer are those of that policy.
    """
    weight, after_weight = policy.output_weight(), (other or policy).output_weight()
    total = torch.zeros((), dtype=torch.float64, device=hidden_before.device)
    chunks = zip(hidden_before.split(policy.chunk_size), hidden_after.split(policy.chunk_size), strict=True)
    for before, after in chunks:
        total += vocab_parallel_exact_kl(
            compute_chunk_logits(before, weight, policy.vocab, 1.0),
            compute_chunk_logits(after, after_weight, policy.vocab, 1.0),
            temperature=temperature,
            group=policy.groups.tp,
        ).sum()
    return total


def _reduce_tangent(policy: Policy, hidden_NH: Tensor, tangent_NH: Tensor, temperature: float) -> Tensor:
    weight = policy.output_weight()
    if hidden_NH.shape[0] == 0:
        return torch.zeros(0, dtype=torch.float64, device=hidden_NH.device)
    parts = []
    for hidden, tangent in zip(hidden_NH.split(policy.chunk_size), tangent_NH.split(policy.chunk_size), strict=True):
        logits = compute_chunk_logits(hidden, weight, policy.vocab, 1.0)
        change = compute_chunk_tangent(logits, tangent, weight, policy.vocab)
        parts.append(vocab_parallel_predicted_kl(logits, change, temperature=temperature, group=policy.groups.tp))
    return torch.cat(parts)


def _stand_in(policy: Policy, batch: MicroBatch, model: GPTModel) -> Tensor:
    """NaN in the place of the output of a stage that failed, so that the stages that wait for it can go on."""
    config, device = policy.model.config, batch.tokens_BT.device
    if model.post_process:
        return torch.full((1,), float("nan"), dtype=torch.float64, device=device)
    rows, length = batch.tokens_BT.shape
    shards = policy.groups.tp_size if config.sequence_parallel else 1
    shape = (length // shards, 2 * rows, config.hidden_size)
    return torch.full(shape, float("nan"), dtype=config.params_dtype, device=device)


def _describe_failure(policy: Policy, error: Exception) -> ForwardModeError:
    """Say in which stage, layer and module the pass ended, from the modules whose forward was running."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = [owner for owner in owners if isinstance(owner, nn.Module)]
    place = f"pipeline stage {policy.groups.pp_rank}"
    for module in running:
        if isinstance(module, TransformerLayer):
            place += f", layer {module.layer_number - 1}"
    if running:
        place += f", {type(running[-1]).__name__}"
    failure = ForwardModeError(
        f"the KL of the update cannot be predicted, nothing was applied: the forward-mode derivative ends in {place} "
        f"({error}). Give the operation a forward mode (jvp), or predict with --kl-estimator fisher, which needs none"
    )
    failure.__cause__ = error
    return failure


def _split_stage_input(model: GPTModel) -> None:
    received = model.decoder.input_tensor
    received = received[0] if isinstance(received, list) else received
    primal, tangent = received.chunk(2, dim=1)
    # A dual tensor is a view, which Megatron would pass through a function without tangent; the clone is not.
    model.set_input_tensor(forward_ad.make_dual(primal.contiguous(), tangent.contiguous()).clone())


def _start_tangent(_module: object, _inputs: object, output: Tensor) -> Tensor:
    return forward_ad.make_dual(output, torch.zeros_like(output)).clone()


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
