"""Keeps the rollout engine at the trainer's policy: by the factors of each update, or by all weights."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.mcore.weights import read_master
from megatron_logra.parallel.scalars import run_on_all_ranks
from megatron_logra.run import Run
from megatron_logra.sync.packet import PacketHeader, PacketRefused

_log = logging.getLogger(__name__)


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
