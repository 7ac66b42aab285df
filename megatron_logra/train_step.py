"""One update of the policy from scored responses: the LoGRA algorithm, distributed.

    S  += dY^T P          forward and backward over all micro-batches             mcore.policy
    S   = sum over TP, DP x CP (the sketched gradient all-reduce)                 parallel.reductions
    D   = row-wise Adam, scaled to update_ratio |W|                               optim.logra
    KL  = 1/2 Var_p(dz)   of the whole proposed update, on a probe                mcore.tangent
    a   = min(alpha_max, sqrt(budget / KL))                                       kl.controller
    W  <- W - round(a D) A                                                        optim.merge

Weights that are not sketched are frozen, or trained by Megatron's Adam from the same backward pass (`mcore.dense`);
with `--optimizer adam` that is all of them. Every rank runs the same lines; each number that decides something is a
result of a reduction, so all ranks decide alike. The host reads device values once, in the middle (`step_metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.dense import DenseOptimizer
from megatron_logra.mcore.fisher import compute_fisher_kl
from megatron_logra.mcore.policy import Policy, TokenOutputs
from megatron_logra.mcore.tangent import compute_predicted_kl
from megatron_logra.metrics import Timers
from megatron_logra.optim.logra import LograOptimizer
from megatron_logra.parallel.reductions import reduce_sketches_
from megatron_logra.parallel.scalars import raise_on_all_ranks
from megatron_logra.rl.batching import (
    MicroBatch,
    Response,
    build_microbatches,
    compute_padded_length,
    count_valid_tokens,
    select_probe_responses,
    shard_context,
    split_data_parallel,
)
from megatron_logra.rl.losses import grpo_token_loss
from megatron_logra.rl.selection import select_informative
from megatron_logra.sketch.target import SketchTarget
from megatron_logra.step_metrics import (
    choose_alpha,
    complete_prediction,
    measure_kl,
    named_norms,
    read_step,
    watch_peak_memory,
)


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
    """The responses of each data-parallel rank on which the KL of an update is predicted, and how.

    `estimator` is `jvp` (exact) or `fisher` (estimated from `draws` drawn labels a position, seeded by `seed`).
    """

    num_responses: int = 2
    max_tokens: int = 4096
    estimator: str = "jvp"
    draws: int = 8
    seed: int = 0


@dataclass
class UpdateOutcome:
    """What an update did.

    `metrics` are global and equal on all ranks. `batches`, `outputs` and `loss_sums` are this rank's micro-batches and,
    on the last pipeline stage, what the policy before the update said of them (sums over this rank's tokens).
    `probe_batch` is this rank's share of what the KL was predicted and measured on.
    """

    metrics: dict[str, float]
    batches: list[MicroBatch]
    outputs: list[TokenOutputs]
    probe_batch: MicroBatch
    loss_sums: dict[str, Tensor] = field(default_factory=dict)


def train_step(
    policy: Policy,
    optimizer: LograOptimizer | None,
    controller: KLController | None,
    responses: Sequence[Response],
    advantages: Sequence[float],
    *,
    settings: UpdateSettings,
    probe: ProbeSettings,
    on_sketch: Callable[[LograOptimizer], None] = lambda optimizer: None,
    on_factor: Callable[[SketchTarget, Tensor], None] = lambda target, factor: None,
    observe_mismatch: bool = True,
    predict: bool = True,
    measure: bool = False,
    timers: Timers | None = None,
    dense: DenseOptimizer | None = None,
) -> UpdateOutcome:
    """One update from `responses` of all ranks (the same list on every rank) and their advantages.

    Args:
        optimizer: of the sketched weights; None when there are none.
        controller: scales the update to its KL budget; None takes it as proposed (alpha 1).
        on_sketch: sees the reduced sketches, before the direction takes their place.
        on_factor: receives each target with its factor `U` after it was merged, for the rollout engines.
        observe_mismatch: let the controller see generation against trainer log-probabilities; only true for the first
            update of a batch of rollouts, since later ones train another policy than the one that sampled.
        predict: predict the KL on the probe; otherwise use the last ratio of predicted KL to squared norm of the update
            again, once there is one.
        measure: evaluate the probe again after the update and report the actual KL.
        dense: of all other weights; None when they are frozen.

    Raises (on all ranks, with no weight changed):
        FloatingPointError: a norm or the predicted KL is not finite; names the sketches or replicas that are not.
        ForwardModeError: a layer has no forward mode; on ranks without such a layer a RuntimeError that names one.
        ValueError: no response is valid, or the numbers do not divide.
    """
    timed = timers or (lambda name: nullcontext())
    num_tokens = count_valid_tokens(responses)
    if num_tokens == 0:
        raise ValueError(f"none of the {len(responses)} responses of this update is valid: every reward failed")
    batches = _build_training_batches(policy, responses, advantages, settings)
    probe_responses = _choose_probe(policy, responses, probe)
    probe_batch = _build_probe(policy, probe_responses)

    loss_sums: dict[str, Tensor] = {}
    if dense is not None:
        dense.zero_grad_()
    outputs = policy.accumulate(
        batches, partial(_token_loss, settings, num_tokens, loss_sums), temperature=settings.temperature
    )
    grad_norm = None if dense is None else dense.reduce_gradients_()
    values: dict[str, Tensor] = {} if grad_norm is None else {"actor/grad_norm": grad_norm}
    predicted = variance = None
    if optimizer is not None:
        reduce_sketches_(optimizer.buffer, policy.groups)
        on_sketch(optimizer)
        values |= named_norms(optimizer.compute_direction_())
    with timed("kl_probe"):
        if optimizer is not None and (predict or optimizer.kl_per_square_norm is None):
            with watch_peak_memory("memory/kl_probe_peak_extra_bytes", values, policy):
                predicted, variance = _predict_kl(
                    policy, probe_responses, probe_batch, probe, optimizer.num_updates, settings
                )
        metrics = read_step(policy, optimizer, values, predicted, variance, probe_batch, batches, outputs)
    hidden_before = policy.compute_hidden(probe_batch) if measure else None

    if optimizer is not None:
        metrics |= complete_prediction(optimizer, metrics)
        alpha = choose_alpha(controller, optimizer.num_updates, metrics, observe_mismatch)
        for target, factor in optimizer.merge_(alpha):
            on_factor(target, factor)
        optimizer.finish_update()
    if dense is not None:
        dense.update_()

    if measure:
        metrics |= measure_kl(policy, probe_batch, hidden_before, settings.temperature, metrics)
    return UpdateOutcome(metrics, batches, outputs, probe_batch, loss_sums)


def _build_training_batches(
    policy: Policy, responses: Sequence[Response], advantages: Sequence[float], settings: UpdateSettings
) -> list[MicroBatch]:
    """This rank's micro-batches of the responses that have a gradient."""
    trained: Sequence[int] = range(len(responses))
    if settings.skip_zero_advantage and settings.kl_beta == 0:
        multiple = policy.groups.dp_size * settings.micro_batch_size
        trained = select_informative(responses, advantages, multiple=multiple)
    return build_own_batches(
        policy,
        [responses[index] for index in trained],
        [advantages[index] for index in trained],
        micro_batch_size=settings.micro_batch_size,
    )[1]


def build_own_batches(
    policy: Policy,
    responses: Sequence[Response],
    advantages: Sequence[float],
    *,
    micro_batch_size: int | None = None,
    same_length: bool = False,
) -> tuple[list[int], list[MicroBatch]]:
    """This data-parallel rank's share: indices into `responses`, and micro-batches of them on the device.

    A context-parallel rank gets its part of every sequence. `micro_batch_size` None puts the whole share into one
    micro-batch; `same_length` pads alike on all data-parallel ranks.
    """
    groups = policy.groups
    own = split_data_parallel(responses, groups.dp_rank, groups.dp_size)
    multiple = policy.length_multiple * groups.cp_size
    batches = build_microbatches(
        [responses[index] for index in own],
        [advantages[index] for index in own],
        micro_batch_size=micro_batch_size or len(own),
        pad_multiple=multiple,
        length=compute_padded_length(responses, pad_multiple=multiple) if same_length else None,
        dtype=torch.float64 if policy.model.config.params_dtype == torch.float64 else torch.float32,
    )
    parts = [shard_context(batch, groups.cp_rank, groups.cp_size) for batch in batches]
    return own, [part.to(policy.device) for part in parts]


def _choose_probe(policy: Policy, responses: Sequence[Response], probe: ProbeSettings) -> list[Response]:
    """The first `num_responses * dp` responses that have a generated token, cut to the probe's tokens.

    Where there are fewer, others fill up the number; since the batch has a valid token, the probe has one.
    """
    size = policy.groups.dp_size
    spoken_first = sorted(responses, key=lambda response: not response.response_ids)
    first = spoken_first[: probe.num_responses * size]
    return select_probe_responses(first, num_responses=len(first), max_tokens=probe.max_tokens * size)


def check_forward_mode(policy: Policy) -> None:
    """Make sure that the tangent pass goes through every layer, with one token of each replica. Collective.

    Raises `ForwardModeError` on the ranks whose layers have no forward mode, a `RuntimeError` on the others.
    """
    token = Response([0], [0], [0.0], reward=0.0, finished=True, sample_index=0, group=0)
    _, (batch,) = build_own_batches(policy, [token] * policy.groups.dp_size, [0.0] * policy.groups.dp_size)
    compute_predicted_kl(policy, batch, temperature=1.0)
    raise_on_all_ranks(policy.phase.failure, policy.groups.world, policy.device)


def _predict_kl(
    policy: Policy,
    chosen: Sequence[Response],
    batch: MicroBatch,
    probe: ProbeSettings,
    update: int,
    settings: UpdateSettings,
) -> tuple[Tensor, Tensor | None]:
    """Sum of the predicted KL over this rank's share `batch` of the chosen responses; its variance, if estimated.

    The numbers that the Fisher form draws for a response depend on its place in the probe only.
    """
    if probe.estimator == "jvp":
        return compute_predicted_kl(policy, batch, temperature=settings.temperature), None
    own, batches = build_own_batches(policy, chosen, [0.0] * len(chosen), micro_batch_size=1)
    uniforms = []
    for index in own:
        generator = torch.Generator().manual_seed((probe.seed * 1_000_003 + update) * 1_000_003 + index)
        size = (probe.draws, len(chosen[index].response_ids))
        uniforms.append(torch.rand(size, generator=generator, dtype=torch.float64))
    estimate = compute_fisher_kl(policy, batches, uniforms, temperature=settings.temperature)
    return estimate.total, estimate.variance


def _build_probe(policy: Policy, chosen: Sequence[Response]) -> MicroBatch:
    """This rank's share of the probe as one micro-batch."""
    # Ranks that share experts bring equally many tokens to the tangent pass (mcore.moe).
    same_length = policy.shape.num_experts is not None
    _, (batch,) = build_own_batches(policy, chosen, [0.0] * len(chosen), same_length=same_length)
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
