"""What an update reads from the device and decides by: norms, predicted and actual KL, mismatch, and the step's scale.

All values are global and equal on all ranks. The host reads device values here and nowhere else in an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.policy import Policy, TokenOutputs
from megatron_logra.mcore.tangent import compute_actual_kl
from megatron_logra.optim.logra import LograOptimizer, UpdateNorms
from megatron_logra.parallel.guards import find_nonfinite
from megatron_logra.parallel.reductions import max_over, sum_over
from megatron_logra.parallel.scalars import raise_on_all_ranks, read_scalars, require_finite
from megatron_logra.rl.batching import MicroBatch

_NAMES_SHOWN = 8


@contextmanager
def watch_peak_memory(name: str, values: dict[str, Tensor], policy: Policy) -> Iterator[None]:
    """Add to `values`, as `name`, the most memory that the body needed beyond what was in use before it, in bytes.

    The largest of all ranks. On CUDA it is what torch hands out, and the peak of its allocator starts anew; on a
    CPU under Linux it is the process's resident memory; elsewhere nothing is added. Collective: one all-reduce MAX of a
    number over the world.
    """
    device = policy.device
    before_bytes = _restart_peak(device)
    yield
    if before_bytes is None:
        return
    extra_bytes = torch.tensor(float(_peak_bytes(device) - before_bytes), dtype=torch.float64, device=device)
    values[name] = max_over(extra_bytes, policy.groups.world)


def _restart_peak(device: torch.device) -> int | None:
    """Let the peak of memory in use start from now; bytes in use, None where nobody counts them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _resident_bytes("VmRSS")
    except OSError:
        return None


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_bytes("VmHWM")


def _resident_bytes(kind: str) -> int:
    """A line of Linux's account of this process, which counts in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def named_norms(norms: UpdateNorms) -> dict[str, Tensor]:
    """The norms of a proposed update by the names of their metrics."""
    named = {
        "logra/sketch_norm": norms.sketch,
        "logra/weight_norm": norms.weight,
        "logra/update_norm": norms.update,
    }
    return named if norms.gradient is None else named | {"logra/grad_norm": norms.gradient}


def read_step(
    policy: Policy,
    optimizer: LograOptimizer | None,
    values: Mapping[str, Tensor],
    predicted: Tensor | None,
    variance: Tensor | None,
    probe_batch: MicroBatch,
    batches: Sequence[MicroBatch],
    outputs: Sequence[TokenOutputs],
) -> dict[str, float]:
    """Metrics of an update before it is applied.

    Args:
        values: global 0-d tensors by metric name.
        predicted: this rank's sum of the predicted KL over its probe entries; None when it was not predicted.
        variance: of that sum, if it is an estimate.

    Raises:
        ForwardModeError: a layer has no forward mode; on ranks without such a layer a RuntimeError that names one.
        FloatingPointError: on all ranks when a value is not finite.
    """
    groups = policy.groups
    local = torch.zeros(5, dtype=torch.float64, device=policy.device)
    if groups.is_last_stage and groups.tp_rank == 0:
        finished = [batch.finished_B[batch.sequence_N] for batch in batches]
        gaps = [
            (batch.generation_logprob_N - output.logprob_N).double() * mask
            for batch, output, mask in zip(batches, outputs, finished, strict=True)
        ]
        local = torch.stack(
            [
                local[0] if predicted is None else predicted,
                torch.full_like(local[0], probe_batch.num_entries),
                torch.stack([gap.sum() for gap in gaps]).sum(),
                torch.stack([mask.sum() for mask in finished]).sum().double(),
                local[0] if variance is None else variance,
            ]
        )
    kl_sum, kl_tokens, gap_sum, gap_tokens, variance_sum, *read = read_scalars(
        *sum_over(local, groups.world).unbind(), *values.values()
    )
    metrics = {} if predicted is None else {"logra/predicted_kl": kl_sum / kl_tokens}
    if variance is not None:
        metrics["logra/predicted_kl_std_error"] = math.sqrt(variance_sum) / kl_tokens
    metrics |= {"logra/mismatch": gap_sum / gap_tokens if gap_tokens else 0.0}
    metrics |= dict(zip(values, read, strict=True))
    if not math.isfinite(metrics.get("logra/predicted_kl", 0.0)):
        raise_on_all_ranks(policy.phase.failure, groups.world, policy.device)
    require_finite(metrics, where=lambda: _describe_nonfinite(policy, optimizer, predicted))
    return metrics


def _describe_nonfinite(policy: Policy, optimizer: LograOptimizer | None, predicted: Tensor | None) -> str:
    """Where values that are not finite come from, equal on all ranks. Collective; called when something is not."""
    names = [] if optimizer is None else _nonfinite_groups(policy, optimizer)
    if names:
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return f"The sketches of {', '.join(names[:_NAMES_SHOWN])}{more} are not finite."
    if predicted is None:
        return ""
    groups = policy.groups
    is_bad = torch.zeros(groups.dp_size, dtype=torch.bool, device=policy.device)
    is_bad[groups.dp_rank] = ~predicted.isfinite()
    replicas = find_nonfinite([str(replica) for replica in range(groups.dp_size)], is_bad, groups.world)
    if not replicas:
        return ""
    return (
        "The logits of the probe, or their derivative along the update, are not finite on data-parallel rank "
        f"{', '.join(replicas)}."
    )


def _nonfinite_groups(policy: Policy, optimizer: LograOptimizer) -> list[str]:
    """Projection groups whose sketch is not finite on any rank."""
    is_bad = torch.zeros(len(policy.target_groups), dtype=torch.bool, device=policy.device)
    place = {group: index for index, group in enumerate(policy.target_groups)}
    for target in optimizer.buffer.targets:
        is_bad[place[target.group]] |= ~optimizer.row_is_finite[target.rows].all()
    return find_nonfinite(policy.target_groups, is_bad, policy.groups.world)


def complete_prediction(optimizer: LograOptimizer, metrics: Mapping[str, float]) -> dict[str, float]:
    """The predicted KL of an update, from the probe or, between probes, from its norm; and which of the two it is."""
    square = metrics["logra/update_norm"] ** 2
    if "logra/predicted_kl" not in metrics:
        assert optimizer.kl_per_square_norm is not None
        return {"logra/predicted_kl": optimizer.kl_per_square_norm * square, "logra/kl_probed": 0.0}
    optimizer.kl_per_square_norm = metrics["logra/predicted_kl"] / square if square > 0 else None
    return {"logra/kl_probed": 1.0}


def choose_alpha(
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


def measure_kl(
    policy: Policy,
    probe_batch: MicroBatch,
    hidden_before: Tensor | None,
    temperature: float,
    metrics: dict[str, float],
) -> dict[str, float]:
    """Exact KL of the update just made, over the probe, and its ratio to the scaled prediction."""
    hidden_after = policy.compute_hidden(probe_batch)
    total = None
    if hidden_before is not None and hidden_after is not None:
        total = compute_actual_kl(policy, hidden_before, hidden_after, temperature=temperature)
    actual = mean_over_probe(policy, probe_batch, total)
    scaled = metrics.get("logra/scaled_predicted_kl", 0.0)
    return {"logra/actual_kl": actual} | ({"logra/actual_over_predicted_kl": actual / scaled} if scaled > 0 else {})


def mean_over_probe(policy: Policy, probe_batch: MicroBatch, total: Tensor | None) -> float:
    """Mean over the probe positions of all ranks; `total` is the sum over this rank's, read on the last stage only.

    Collective over the world.
    """
    local = torch.zeros(2, dtype=torch.float64, device=policy.device)
    if total is not None and policy.groups.is_last_stage and policy.groups.tp_rank == 0:
        local = torch.stack([total, torch.full_like(total, probe_batch.num_entries)])
    value, count = read_scalars(*sum_over(local, policy.groups.world).unbind())
    return value / count
