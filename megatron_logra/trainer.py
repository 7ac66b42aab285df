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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.arguments import resolved_yaml
from megatron_logra.checkpoint import HF_FOLDER, export_policy, load_checkpoint, save_checkpoint
from megatron_logra.config import Config
from megatron_logra.loggers.build import build_loggers
from megatron_logra.mcore.build import check_replicas
from megatron_logra.mcore.weights import read_master
from megatron_logra.metrics import compute_accuracy_metrics, format_accuracy
from megatron_logra.parallel.reductions import sum_over
from megatron_logra.parallel.scalars import run_on_all_ranks
from megatron_logra.parallel.traffic import TrafficCounter
from megatron_logra.progress import Progress
from megatron_logra.rl.advantages import response_advantages
from megatron_logra.rl.batching import Response, attach_logprobs
from megatron_logra.rollout.collect import Rollouts, collect_rollouts
from megatron_logra.rollout.engine import GenerateProgress, SamplingParams
from megatron_logra.rollout.evaluate import evaluate_policy
from megatron_logra.run import Run, SetUpError, build_run
from megatron_logra.summary import log_samples, summarise
from megatron_logra.sync.packet import PacketHeader, PacketRefused
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
        report(run, first)
        while run.step < config.training.train_iters:
            metrics = train_iteration(run)
            run.step += 1
            if is_due(run, config.evaluation.eval_interval) or is_last(run):
                last = evaluate(run)
                metrics |= last
            report(run, metrics)
            leaving = is_due(run, config.training.exit_interval) or is_last(run)
            if is_due(run, config.checkpoint.save_interval) or leaving:
                save(run)
            if leaving:
                break
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


def synchronise(run: Run, factors: dict[str, Tensor]) -> None:
    """Bring the rollout engine to the trainer's version by factors, or by all weights."""
    if run.config.synchronisation == "full" or run.optimizer is None:
        synchronise_full(run)
        return
    settings, made = run.optimizer.settings, run.optimizer.last_update
    header = PacketHeader(
        base_seed=settings.seed,
        update=made.projection_update,
        keep=made.keep,
        rank=settings.rank,
        distribution=settings.distribution,
        widths=run.sender.widths,
        version_before=run.version - 1,
        version_after=run.version,
    )
    packet = run.sender.gather_packet(header, lambda entry: factors[entry.megatron_name])
    if run.config.synchronisation == "factors":
        run_on_all_ranks(lambda: run.engine.apply_factors(packet), run.groups.world, run.device)
        return
    refusal: PacketRefused | None = None
    try:
        run.engine.apply_factors(packet)
    except PacketRefused as error:
        refusal = error
    refused = torch.tensor([refusal is not None], dtype=torch.int64, device=run.device)
    dist.all_reduce(refused, group=run.groups.world)
    if int(refused.item()):
        _log.warning("%d engines refused a factor packet (%s); sending all weights", int(refused.item()), refusal)
        synchronise_full(run)


def synchronise_full(run: Run) -> None:
    """Send every weight, with every bit that the trainer keeps, to the rollout engine."""
    stream = run.sender.stream_weights(lambda entry: read_master(run.policy, entry), dtype=torch.float32)
    run.engine.load_full(stream, run.version)


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


def start(run: Run) -> None:
    """Continue from --load if given, open the loggers, and write down what this run is."""
    config = run.config
    state = {} if config.checkpoint.load is None else load_state(run, Path(config.checkpoint.load))
    run_on_all_ranks(lambda: open_loggers(run, state), run.groups.world, run.device)


def load_state(run: Run, folder: Path) -> dict[str, Any]:
    """Take over a checkpoint, rollout engine included, and return its state; `SetUpError` on all ranks otherwise."""
    try:
        state = load_checkpoint(folder, run.policy, run.optimizer, run.dense, run.device)
        run.inputs.stream.load_state_dict(state["data"])
    except (ValueError, RuntimeError) as error:
        raise SetUpError(str(error)) from error
    run.step = int(state["step"])
    run.controller.load_state_dict(state["controller"])
    if run.optimizer is not None:
        run.optimizer.kl_per_square_norm = state["kl_per_square_norm"]
    synchronise_full(run)
    return state


def open_loggers(run: Run, state: Mapping[str, Any]) -> None:
    """Open the destinations of metrics on rank 0, continuing those of a loaded checkpoint."""
    config = run.config
    folder = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    run.loggers = build_loggers(
        config.logging,
        run_dir=folder,
        rank=run.groups.rank,
        last_step=config.training.train_iters,
        resume_step=run.step if state else None,
        wandb_run_id=state.get("wandb_run_id"),
        run_config=config.flat(),
    )
    if folder is not None and run.is_first_rank:
        (folder / "config.yaml").write_text(resolved_yaml(config), encoding="utf-8")


def save(run: Run) -> None:
    """Checkpoint and Hugging Face folder under --save, if that is given."""
    config = run.config
    if config.checkpoint.save is None:
        return
    folder = Path(config.checkpoint.save)
    state: dict[str, Any] = {
        "step": run.step,
        "num_updates": run.version,
        "data": run.inputs.stream.state_dict(),
        "controller": run.controller.state_dict(),
        "kl_per_square_norm": None if run.optimizer is None else run.optimizer.kl_per_square_norm,
        "wandb_run_id": run.loggers.wandb_run_id,
    }
    with run.timers("save"):
        save_checkpoint(folder, run.step, run.policy, run.optimizer, run.dense, state, run.device)
        source = Path(config.model.hf_checkpoint)
        export_policy(folder / HF_FOLDER, source, run.policy, run.sender, run.device)


def report(run: Run, metrics: dict[str, float]) -> None:
    """Log the metrics of a finished iteration (or of the start)."""
    if metrics:
        run.loggers.log(run.step, metrics | run.timers.collect())


def is_due(run: Run, interval: int | None) -> bool:
    """Whether this iteration ends an interval."""
    return interval is not None and run.step % interval == 0


def is_last(run: Run) -> bool:
    """Whether training ends with this iteration."""
    return run.step == run.config.training.train_iters


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
