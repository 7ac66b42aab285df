"""Turns what an iteration produced into the global metrics of that iteration, and a few responses to look at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_logra.loggers.base import SampleRecord
from megatron_logra.metrics import (
    Sums,
    compute_agreement_sums,
    compute_rollout_sums,
    compute_throughput,
)
from megatron_logra.rollout.collect import Rollouts
from megatron_logra.run import Run
from megatron_logra.sync.sender import factor_bytes, full_bytes
from megatron_logra.train_step import UpdateOutcome


def summarise(run: Run, rollouts: Rollouts, outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
    """Metrics of an iteration, equal on all ranks; the last update speaks for the step control. Collective."""
    responses = rollouts.responses
    metrics = compute_rollout_sums(
        rewards=[response.reward for response in responses],
        prompt_lengths=[len(response.prompt_ids) for response in responses],
        response_lengths=[len(response.response_ids) for response in responses],
        finished=[response.finished for response in responses],
        valid=[response.valid for response in responses],
        group=[response.group for response in responses],
    ).to_metrics()
    sums = Sums()
    for number, outcome in enumerate(outcomes):
        _add_update_sums(run, sums, outcome, is_first=number == 0)
    metrics |= _reduce(run, sums).to_metrics() | outcomes[-1].metrics
    if "actor/grad_norm" not in metrics:
        metrics["actor/grad_norm"] = metrics["logra/sketch_norm"]
    tables = run.sender.stages
    if run.config.synchronisation != "full" and run.optimizer is not None:
        metrics["sync/factor_bytes"] = float(factor_bytes(tables, run.optimizer.settings.rank, run.sender.groups))
    metrics["sync/full_bytes"] = float(full_bytes(tables, itemsize=2 if run.config.training.bf16 else 4))
    return metrics | compute_throughput(
        metrics["perf/total_num_tokens"],
        step_s=run.timers.elapsed_s("step"),
        num_ranks=run.groups.size,
    )


def log_samples(run: Run, rollouts: Rollouts) -> None:
    """Hand the first responses of rank 0's share to the loggers, at every --log-interval."""
    number = min(run.config.logging.log_samples, len(rollouts.texts))
    if number == 0 or (run.step + 1) % run.config.logging.log_interval:
        return
    records = []
    for offset in range(number):
        response = rollouts.responses[rollouts.first + offset]
        sample = run.inputs.train.samples[response.sample_index]
        prompt = sample.messages[-1]["content"]
        records.append(SampleRecord(prompt, rollouts.texts[offset], response.reward, sample.answer))
    run.loggers.log_samples(run.step + 1, records)


def _add_update_sums(run: Run, sums: Sums, outcome: UpdateOutcome, *, is_first: bool) -> None:
    """Token means of an update. Ranks that share tokens must count them once, but all must add the same names."""
    counts = run.groups.is_last_stage and run.groups.tp_rank == 0
    outputs = outcome.outputs if counts else []
    batches = outcome.batches if counts else []
    empty = torch.zeros(0, dtype=torch.float64)
    entropy_N = torch.cat([output.entropy_N for output in outputs]) if outputs else empty
    num_tokens = torch.tensor(float(entropy_N.numel()), dtype=torch.float64)
    sums.add_mean_("actor/entropy", entropy_N)
    names = {"pg_loss": "actor/pg_loss", "pg_clipfrac": "actor/pg_clipfrac", "ppo_kl": "actor/ppo_kl"}
    if run.reference is not None:
        names["kl_loss"] = "actor/kl_loss"
    for key, name in names.items():
        total = outcome.loss_sums[key].double().cpu() if counts else torch.zeros((), dtype=torch.float64)
        sums.add_mean_(name, (total / num_tokens.clamp(min=1)).reshape(1), num_tokens.reshape(1))
    if is_first:
        generation_N = torch.cat([batch.generation_logprob_N for batch in batches]) if outputs else empty
        train_N = torch.cat([output.logprob_N for output in outputs]) if outputs else empty
        finished_N = torch.cat([batch.finished_B[batch.sequence_N] for batch in batches]) if outputs else empty
        sums.merge_(compute_agreement_sums(generation_N, train_N, finished_N))


def _reduce(run: Run, sums: Sums) -> Sums:
    vector = sums.to_vector(run.device)
    dist.all_reduce(vector[: sums.num_summed], group=run.groups.world)
    dist.all_reduce(vector[sums.num_summed :], op=dist.ReduceOp.MAX, group=run.groups.world)
    return sums.from_vector(vector)
