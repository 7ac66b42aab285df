"""One update of the policy from scored responses: the LoGRA algorithm, distributed.

    S  += dY^T P          forward and backward over all micro-batches             mcore.policy
    S   = sum over TP, DP (the sketched gradient all-reduce)                      parallel.reductions
    D   = row-wise Adam, scaled to update_ratio |W|                               optim.logra
    KL  = 1/2 Var_p(dz)   of the whole proposed update, on a probe                mcore.tangent
    a   = min(alpha_max, sqrt(budget / KL))                                       kl.controller
    W  <- W - round(a D) A                                                        optim.merge

Every rank runs the same lines; each number that decides something is a result of a reduction, so all ranks decide
alike. The host reads device values once, in the middle (`parallel.scalars.read_scalars`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.policy import Policy, TokenOutputs
from megatron_logra.mcore.tangent import compute_actual_kl, compute_predicted_kl
from megatron_logra.metrics import Timers
from megatron_logra.optim.logra import LograOptimizer, UpdateNorms
from megatron_logra.parallel.reductions import reduce_sketches_, sum_over
from megatron_logra.parallel.scalars import read_scalars, require_finite
from megatron_logra.rl.batching import (
    MicroBatch,
    Response,
    build_microbatches,
    count_valid_tokens,
    select_probe_responses,
    split_data_parallel,
)
from megatron_logra.rl.losses import grpo_token_loss
from megatron_logra.rl.selection import select_informative
from megatron_logra.sketch.target import SketchTarget


@dataclass(frozen=True)
class UpdateSettings:
    """How responses become a loss; `temperature` is the sampling temperature, which divides the logits.

    `skip_zero_advantage` leaves out responses that have no gradient (see `rl.selection`), unless the KL to a reference
    (`kl_beta`) gives them one.
    """

    micro_batch_size: int = 1
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0
    skip_zero_advantage: bool = True


@dataclass(frozen=True)
class ProbeSettings:
    """The responses of each data-parallel rank on which the KL of an update is predicted."""

    num_responses: int = 2
    max_tokens: int = 4096


@dataclass
class UpdateOutcome:
    """What an update did.

    `metrics` are global and equal on all ranks. `batches`, `outputs` and `loss_sums` are this rank's micro-batches and,
    on the last pipeline stage, what the policy before the update said of them (sums over this rank's tokens).
    """

    metrics: dict[str, float]
    batches: list[MicroBatch]
    outputs: list[TokenOutputs]
    loss_sums: dict[str, Tensor] = field(default_factory=dict)


def train_step(
    policy: Policy,
    optimizer: LograOptimizer,
    controller: KLController | None,
    responses: Sequence[Response],
    advantages: Sequence[float],
    *,
    settings: UpdateSettings,
    probe: ProbeSettings,
    on_factor: Callable[[SketchTarget, Tensor], None] = lambda target, factor: None,
    observe_mismatch: bool = True,
    measure: bool = False,
    timers: Timers | None = None,
) -> UpdateOutcome:
    """One update from `responses` of all ranks (the same list on every rank) and their advantages.

    Args:
        controller: scales the update to its KL budget; None takes it as proposed (alpha 1).
        on_factor: receives each target with its factor `U` after it was merged, for the rollout engines.
        observe_mismatch: let the controller see generation against trainer log-probabilities; only true for the first
            update of a batch of rollouts, since later ones train another policy than the one that sampled.
        measure: evaluate the probe again after the update and report the actual KL.

    Raises:
        FloatingPointError: on all ranks, with nothing applied, when a norm or the predicted KL is not finite.
        ValueError: no response is valid, or the numbers do not divide.
    """
    timed = timers or (lambda name: nullcontext())
    num_tokens = count_valid_tokens(responses)
    if num_tokens == 0:
        raise ValueError(f"none of the {len(responses)} responses of this update is valid: every reward failed")
    trained: Sequence[int] = range(len(responses))
    if settings.skip_zero_advantage and settings.kl_beta == 0:
        multiple = policy.groups.dp_size * settings.micro_batch_size
        trained = select_informative(responses, advantages, multiple=multiple)
    _, batches = build_own_batches(
        policy,
        [responses[index] for index in trained],
        [advantages[index] for index in trained],
        micro_batch_size=settings.micro_batch_size,
    )
    probe_batch = _build_probe(policy, responses, probe)

    loss_sums: dict[str, Tensor] = {}
    outputs = policy.accumulate_sketches(
        batches, partial(_token_loss, settings, num_tokens, loss_sums), temperature=settings.temperature
    )
    reduce_sketches_(optimizer.buffer, policy.groups)
    norms = optimizer.compute_direction_()
    with timed("kl_probe"):
        predicted = compute_predicted_kl(policy, probe_batch, temperature=settings.temperature)
        metrics = _read_step(policy, norms, predicted, probe_batch, batches, outputs)
    hidden_before = policy.compute_hidden(probe_batch) if measure else None

    alpha = _choose_alpha(controller, optimizer.num_updates, metrics, observe_mismatch)
    for target, factor in optimizer.merge_(alpha):
        on_factor(target, factor)
    optimizer.finish_update()

    if measure:
        metrics |= _measure(policy, probe_batch, hidden_before, settings.temperature, metrics)
    return UpdateOutcome(metrics, batches, outputs, loss_sums)


def build_own_batches(
    policy: Policy, responses: Sequence[Response], advantages: Sequence[float], *, micro_batch_size: int | None = None
) -> tuple[list[int], list[MicroBatch]]:
    """This data-parallel rank's share: indices into `responses`, and micro-batches of them on the device.

    `micro_batch_size` None puts the whole share into one micro-batch.
    """
    groups, config = policy.groups, policy.model.config
    own = split_data_parallel(responses, groups.dp_rank, groups.dp_size)
    batches = build_microbatches(
        [responses[index] for index in own],
        [advantages[index] for index in own],
        micro_batch_size=micro_batch_size or len(own),
        pad_multiple=groups.tp_size if config.sequence_parallel else 1,
        dtype=torch.float64 if config.params_dtype == torch.float64 else torch.float32,
    )
    return own, [batch.to(policy.targets[0].weight.device) for batch in batches]


def _build_probe(policy: Policy, responses: Sequence[Response], probe: ProbeSettings) -> MicroBatch:
    """This rank's share of the first `num_responses * dp` responses of the batch, cut to the probe's tokens."""
    size = policy.groups.dp_size
    first = responses[: min(probe.num_responses * size, len(responses))]
    chosen = select_probe_responses(first, num_responses=len(first), max_tokens=probe.max_tokens * size)
    _, (batch,) = build_own_batches(policy, chosen, [0.0] * len(chosen))
    return batch


def _token_loss(
    settings: UpdateSettings, num_tokens: int, sums: dict[str, Tensor], logprob_N: Tensor, batch: MicroBatch
) -> Tensor:
    """Loss of a micro-batch, divided by the valid tokens of all ranks; statistics are added to `sums`."""
    old_N = logprob_N.detach() if batch.old_logprob_N is None else batch.old_logprob_N
    loss_N, statistics = grpo_token_loss(
        logprob_N,
        old_N,
        batch.advantage_N,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        reference_logprobs_T=batch.reference_logprob_N,
        kl_beta=settings.kl_beta,
    )
    for name, value in statistics.items():
        sums[name] = sums[name] + value if name in sums else value
    return loss_N.sum() / num_tokens


def _read_step(
    policy: Policy,
    norms: UpdateNorms,
    predicted: Tensor,
    probe_batch: MicroBatch,
    batches: Sequence[MicroBatch],
    outputs: Sequence[TokenOutputs],
) -> dict[str, float]:
    """Global means and norms on the host, equal on all ranks; raises on all ranks when one is not finite."""
    groups = policy.groups
    local = torch.zeros(4, dtype=torch.float64, device=predicted.device)
    if groups.is_last_stage and groups.tp_rank == 0:
        finished = [batch.finished_B[batch.sequence_N] for batch in batches]
        gaps = [
            (batch.generation_logprob_N - output.logprob_N).double() * mask
            for batch, output, mask in zip(batches, outputs, finished, strict=True)
        ]
        local = torch.stack(
            [
                predicted,
                torch.full_like(predicted, probe_batch.num_entries),
                torch.stack([gap.sum() for gap in gaps]).sum(),
                torch.stack([mask.sum() for mask in finished]).sum().double(),
            ]
        )
    kl_sum, kl_tokens, gap_sum, gap_tokens, sketch, weight, update = read_scalars(
        *sum_over(local, groups.world).unbind(), norms.sketch, norms.weight, norms.update
    )
    metrics = {
        "logra/predicted_kl": kl_sum / kl_tokens,
        "logra/mismatch": gap_sum / gap_tokens if gap_tokens else 0.0,
        "logra/sketch_norm": sketch,
        "logra/weight_norm": weight,
        "logra/update_norm": update,
    }
    require_finite(metrics)
    return metrics


def _choose_alpha(
    controller: KLController | None, update: int, metrics: dict[str, float], observe_mismatch: bool
) -> float:
    """Factor of the proposed update; what led to it is added to `metrics`."""
    predicted = metrics["logra/predicted_kl"]
    alpha = 1.0
    if controller is not None:
        if observe_mismatch:
            controller.observe_mismatch(metrics["logra/mismatch"])
        alpha = controller.step_scale(predicted, update)
        metrics["logra/effective_budget"] = controller.effective_budget(update)
        metrics["logra/mismatch_ema"] = controller.mismatch_ema
    metrics["logra/alpha"] = alpha
    metrics["logra/scaled_predicted_kl"] = alpha * alpha * predicted
    metrics["logra/update_ratio"] = alpha * metrics["logra/update_norm"] / metrics["logra/weight_norm"]
    return alpha


def _measure(
    policy: Policy,
    probe_batch: MicroBatch,
    hidden_before: Tensor | None,
    temperature: float,
    metrics: dict[str, float],
) -> dict[str, float]:
    """Exact KL of the update just made, over the probe, and its ratio to the scaled prediction."""
    groups = policy.groups
    hidden_after = policy.compute_hidden(probe_batch)
    local = torch.zeros(2, dtype=torch.float64, device=probe_batch.tokens_BT.device)
    if hidden_before is not None and hidden_after is not None:
        total = compute_actual_kl(policy, hidden_before, hidden_after, temperature=temperature)
        if groups.tp_rank == 0:
            local = torch.stack([total, torch.full_like(total, probe_batch.num_entries)])
    kl_sum, kl_tokens = read_scalars(*sum_over(local, groups.world).unbind())
    scaled = metrics["logra/scaled_predicted_kl"]
    actual = kl_sum / kl_tokens
    return {"logra/actual_kl": actual} | ({"logra/actual_over_predicted_kl": actual / scaled} if scaled > 0 else {})
