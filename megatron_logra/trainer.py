"""The training loop: sample, score, update, synchronise the rollout engine, report, save.

    for each iteration:
        rollouts   = engine.generate(prompts)                    every rank a share
        advantages = group-normalised rewards
        for each update: W <- W - round(alpha D) A               train_step
                         engine merges the same factors          sync

Every rank runs the same lines; what can fail on one rank alone ends all of them together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from megatron_logra.config import Config
from megatron_logra.mcore.build import check_replicas
from megatron_logra.metrics import compute_accuracy_metrics, format_accuracy
from megatron_logra.parallel.reductions import sum_over
from megatron_logra.parallel.traffic import TrafficCounter
from megatron_logra.progress import Progress
from megatron_logra.rl.advantages import response_advantages
from megatron_logra.rl.batching import Response, attach_logprobs
from megatron_logra.rollout.collect import Rollouts, collect_rollouts
from megatron_logra.rollout.engine import GenerateProgress, SamplingParams
from megatron_logra.rollout.evaluate import evaluate_policy
from megatron_logra.run import Run, build_run
from megatron_logra.saving import (
    export,
    export_interval,
    finish_saving,
    is_asked_to_end,
    is_due,
    is_last,
    note_evaluation,
    save,
    start,
)
from megatron_logra.summary import log_samples, summarise
from megatron_logra.synchronise import synchronise
from megatron_logra.train_step import (
    ProbeSettings,
    UpdateOutcome,
    UpdateSettings,
    build_own_batches,
    train_step,
)

_log = logging.getLogger(__name__)

Kind = Literal["old_logprobs", "reference_logprobs"]


def train(config: Config) -> None:
    """Train as configured, from the start or from --load. Collective over all ranks."""
    run = build_run(config)
    start(run)
    try:
        first = last = evaluate(run)
        note_evaluation(run, first)
        report(run, first)
        while run.step < config.training.train_iters:
            metrics = train_iteration(run)
            run.step += 1
            is_best = False
            if is_due(run, config.evaluation.eval_interval) or is_last(run):
                last = evaluate(run)
                is_best = note_evaluation(run, last)
                metrics |= last
            report(run, metrics)
            leaving = is_due(run, config.training.exit_interval) or is_last(run) or is_asked_to_end(run)
            if is_due(run, config.checkpoint.save_interval) or is_best or leaving:
                save(run, is_best=is_best)
            if is_due(run, export_interval(config)) or leaving:
                export(run)
            if leaving:
                break
        finish_saving(run)
        if first and run.is_first_rank:
            _log.info("held-out accuracy before: %s", format_accuracy(first))
            _log.info("held-out accuracy after:  %s", format_accuracy(last))
    finally:
        run.loggers.close()


def train_iteration(run: Run) -> dict[str, float]:
    """One batch of rollouts and the updates it is used for; returns global metrics, equal on all ranks.

    Bytes of communication (`comm/*`, at every --log-comm-interval) are those of the first rank.
    """
    interval = run.config.logging.log_comm_interval
    if interval is None or (run.step + 1) % interval:
        return _train_iteration(run)
    with TrafficCounter(run.groups.labels()) as counter:
        metrics = _train_iteration(run)
    return metrics | counter.metrics()


def _train_iteration(run: Run) -> dict[str, float]:
    config, timers = run.config, run.timers
    with timers("step"):
        with timers("gen"):
            rollouts = sample(run)
        responses = attach_old_values(run, rollouts.responses)
        advantages = response_advantages(responses).tolist()
        outcomes: list[UpdateOutcome] = []
        for indices in [*update_batches(config)] * config.grpo.grpo_iterations:
            batch = [responses[index] for index in indices]
            with timers("update_actor"):
                outcome, factors = update(run, batch, [advantages[index] for index in indices], is_first=not outcomes)
            with timers("update_weights"):
                synchronise(run, factors)
            outcomes.append(outcome)
        metrics = summarise(run, rollouts, outcomes)
    log_samples(run, rollouts)
    return metrics


def sample(run: Run) -> Rollouts:
    """Responses to the next prompts, scored, equal on all ranks."""
    config = run.config
    samples = run.inputs.stream.next_batch()
    params = SamplingParams(
        temperature=config.rollout.rollout_temperature,
        top_p=config.rollout.rollout_top_p,
        top_k=config.rollout.rollout_top_k,
        max_new_tokens=config.rollout.rollout_max_new_tokens,
        stop_token_ids=run.inputs.stop_token_ids,
        stop=config.rollout.rollout_stop,
        seed=config.training.seed * 1_000_003 + run.step,
    )
    with Progress("generate", config.responses_per_step, unit="responses", enabled=run.is_first_rank) as line:
        rollouts = collect_rollouts(
            run.engine,
            samples,
            [run.inputs.train.prompts[sample.index] for sample in samples],
            run.inputs.reward,
            params,
            group_size=config.grpo.grpo_group_size,
            group=run.groups.world,
            device=run.device,
            progress=_show_progress(line, run.groups.size),
        )
    for failure in rollouts.failures:
        _log.warning("%s", failure)
    return rollouts


def attach_old_values(run: Run, responses: list[Response]) -> list[Response]:
    """Add the trainer's own log-probabilities and those of the reference, where the loss will need them.

    With one update a batch the old policy is the one whose forward pass makes the update, so no extra pass is needed.
    """
    if run.config.updates_per_step > 1:
        responses = _attach(run, responses, "old_logprobs")
    if run.reference is not None:
        with run.reference.active():
            responses = _attach(run, responses, "reference_logprobs")
    return responses


def update_batches(config: Config) -> Iterator[list[int]]:
    """Indices of the responses of each update of one pass: the batch in slices."""
    size = config.global_batch_size
    for first in range(0, config.responses_per_step, size):
        yield list(range(first, first + size))


def update(
    run: Run, responses: list[Response], advantages: list[float], *, is_first: bool
) -> tuple[UpdateOutcome, dict[str, Tensor]]:
    """One update of the policy; returns it with this rank's factors by Megatron parameter name."""
    config = run.config
    factors: dict[str, Tensor] = {}
    interval = config.kl.kl_measure_interval
    outcome = train_step(
        run.policy,
        run.optimizer,
        run.controller if config.is_kl_controlled else None,
        responses,
        advantages,
        settings=UpdateSettings(
            micro_batch_size=config.training.micro_batch_size,
            temperature=config.rollout.rollout_temperature,
            clip_low=config.grpo.grpo_clamp_eps_lower,
            clip_high=config.grpo.grpo_clamp_eps_upper,
            kl_beta=config.grpo.grpo_kl_beta,
            skip_zero_advantage=config.grpo.grpo_skip_zero_advantage,
        ),
        probe=ProbeSettings(
            num_responses=config.kl.kl_probe_responses,
            max_tokens=config.kl.kl_probe_max_tokens,
            estimator="fisher" if config.kl.kl_estimator == "fisher" else "jvp",
            draws=config.kl.kl_fisher_draws,
            seed=config.training.seed,
        ),
        on_factor=lambda target, factor: factors.update({target.name: factor}),
        observe_mismatch=is_first,
        predict=run.version % config.kl.kl_probe_interval == 0,
        measure=interval is not None and (run.version + 1) % interval == 0,
        timers=run.timers,
        dense=run.dense,
    )
    ratio = outcome.metrics.get("logra/actual_over_predicted_kl")
    advice = None if ratio is None else run.calibration.observe(ratio)
    if advice is not None:
        _log.warning("%s", advice)
    check = config.optimizer.logra_check_interval
    if check is not None and run.version % check == 0:
        check_replicas(run.policy)
    return outcome, factors


def evaluate(run: Run) -> dict[str, float]:
    """Greedy accuracy on the held-out questions, with its 95 % interval; nothing without such questions."""
    questions, config = run.inputs.evaluation, run.config
    if questions is None:
        return {}
    with (
        run.timers("eval"),
        Progress("evaluate", len(questions.samples), unit="questions", enabled=run.is_first_rank) as line,
    ):
        num_correct, mean_reward, _ = evaluate_policy(
            run.engine,
            questions.samples,
            questions.prompts,
            run.inputs.reward,
            max_new_tokens=config.rollout.rollout_max_new_tokens,
            stop_token_ids=run.inputs.stop_token_ids,
            stop=config.rollout.rollout_stop,
            group=run.groups.world,
            device=run.device,
            progress=_show_progress(line, run.groups.size),
        )
    return compute_accuracy_metrics(num_correct, len(questions.samples)) | {"val/reward": mean_reward}


def report(run: Run, metrics: dict[str, float]) -> None:
    """Log the metrics of a finished iteration (or of the start)."""
    if metrics:
        run.loggers.log(run.step, metrics | run.timers.collect())


def _attach(run: Run, responses: list[Response], kind: Kind) -> list[Response]:
    """Write log-probabilities under the current weights into all responses, equal on all replicas. Collective.

    The last pipeline stage computes them and is the only one to read them; elsewhere they are zeros, so that
    micro-batches have the same fields on all ranks. Every replica gets every response's values, because the update
    shares the responses out anew once those without a gradient are left out.
    """
    longest = max(len(response.response_ids) for response in responses)
    table = torch.zeros(len(responses), longest, dtype=torch.float64)
    for indices in update_batches(run.config):
        chosen = [responses[index] for index in indices]
        own, batches = build_own_batches(
            run.policy, chosen, [0.0] * len(chosen), micro_batch_size=run.config.training.micro_batch_size
        )
        outputs = run.policy.compute_logprobs(batches, temperature=run.config.rollout.rollout_temperature)
        if outputs:
            values = [output.logprob_N for output in outputs]
            filled = attach_logprobs([chosen[index] for index in own], batches, values, kind=kind)
            for index, response in zip(own, filled, strict=True):
                numbers = torch.tensor(getattr(response, kind), dtype=torch.float64)
                table[indices[index], : len(numbers)] = numbers
    rows = sum_over(table.to(run.device), run.groups.dp_cp).tolist()
    attached = []
    for response, row in zip(responses, rows, strict=True):
        numbers = row[: len(response.response_ids)]
        if kind == "old_logprobs":
            attached.append(replace(response, old_logprobs=numbers))
        else:
            attached.append(replace(response, reference_logprobs=numbers))
    return attached


def _show_progress(line: Progress, num_ranks: int) -> Callable[[GenerateProgress], None]:
    """Scale the first rank's progress to all ranks, whose shares are alike."""

    def show(progress: GenerateProgress) -> None:
        done = min(line.total, progress.num_finished * num_ranks)
        line.update(done, note=f"{progress.num_tokens * num_ranks} tokens")

    return show
