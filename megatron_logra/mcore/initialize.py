"""Starting and ending the training world: backend, Megatron's parallel state, our explicit groups, seeds."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_logra.mcore.cpu import device_for_rank, install_cpu_support
from megatron_logra.parallel.attempt import fresh_store
from megatron_logra.parallel.groups import ParallelGroups


def initialize_distributed(*, backend: str | None, timeout_minutes: int) -> torch.device:
    """Join the world that `torchrun` describes and return this rank's device.

    Without `torchrun` (no `RANK` in the environment) the world has one rank.

    Args:
        backend: `nccl`, `gloo`, or None for NCCL with CUDA and gloo without.
        timeout_minutes: how long a collective may wait for a rank before the run is ended.
    """
    install_cpu_support()
    device = device_for_rank(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        timeout = timedelta(minutes=timeout_minutes)
        if "RANK" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            store = fresh_store(store, rank, world_size, timeout=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    return device


def initialize_model_parallel(
    *,
    seed: int,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    create_gloo_process_groups: bool = True,
) -> ParallelGroups:
    """Build Megatron's parallel state over the initialised world and return its groups as one value.

    Args:
        virtual_pipeline_model_parallel_size: model chunks of a pipeline rank (interleaved schedule); None for one.
        expert_tensor_parallel_size: shards of an expert; None as many as of a dense layer.
        seed: seeds Megatron's random trackers (no target layer draws from them; dropout would).
        create_gloo_process_groups: Megatron's own flag; False only for the fake backend.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        create_gloo_process_groups=create_gloo_process_groups,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    world = dist.group.WORLD
    assert world is not None
    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        mp=parallel_state.get_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        edp=parallel_state.get_expert_data_parallel_group(),
        etp_ep=parallel_state.get_expert_tensor_and_model_parallel_group(),
        emp=parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        world=world,
    )


def shutdown_model_parallel() -> None:
    """Take Megatron's parallel state down; the world stays, for another layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def shutdown_distributed() -> None:
    """Leave the world; safe to call twice and after a failure."""
    shutdown_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
