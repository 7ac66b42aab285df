"""Reading the policy's weights as any receiver wants them: local tensors, tables of all stages, snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.hf.rows import ParameterEntry
from megatron_logra.hf.table import expert_range, parameter_table
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.transformer_config import stage_layers
from megatron_logra.optim.split_master import join_split
from megatron_logra.parallel.collectives import gather_rows_
from megatron_logra.sketch.target import SketchTarget


def stage_tables(policy: Policy) -> list[list[list[ParameterEntry]]]:
    """Parameter tables by expert-parallel rank and pipeline stage, the same on all ranks; no communication."""
    groups, shape = policy.groups, policy.shape
    return [
        [
            parameter_table(
                shape,
                layers=[layer for _, layer in stage_layers(policy.model.config, stage)],
                embedding=stage == 0,
                final=stage == groups.pp_size - 1,
                experts=expert_range(shape, ep_rank, groups.ep_size),
            )
            for stage in range(groups.pp_size)
        ]
        for ep_rank in range(groups.ep_size)
    ]


def read_served(policy: Policy, entry: ParameterEntry) -> Tensor:
    """Local tensor of an entry as the model computes with it (for a split master its bf16 half)."""
    parameter = policy.model.get_parameter(entry.megatron_name)
    return parameter.detach()


def read_master(policy: Policy, entry: ParameterEntry) -> Tensor:
    """Local tensor of an entry with every bit that is kept of it: fp32, or fp64 for an fp64 model.

    Collective over the ranks that hold the same weights when these divide the masters among themselves.
    """
    weight = read_served(policy, entry)
    target = policy.target_by_name.get(entry.megatron_name)
    if target is None or (target.remainder is None and target.master is None):
        return weight if weight.dtype == torch.float64 else weight.float()
    replicas = policy.groups.of_layers(expert=target.is_expert).replicas
    if target.remainder is not None:
        return join_split(weight, _whole_rows(target.remainder, target, replicas))
    assert target.master is not None
    return _whole_rows(target.master, target, replicas)


def _whole_rows(owned: Tensor, target: SketchTarget, replicas: ProcessGroup) -> Tensor:
    if owned.shape == target.weight.shape:
        return owned
    whole = owned.new_empty(target.weight.shape)
    whole[target.owned] = owned
    gather_rows_(whole, replicas)
    return whole


class ReferencePolicy:
    """The trained weights at one moment, to compute with them again later: the reference of a KL penalty.

    Keeps a copy of what this rank holds of them in the compute dtype (as much memory as these weights themselves).
    """

    def __init__(self, policy: Policy) -> None:
        self._trained = [
            weight
            for name, weight in policy.model.named_parameters()
            if weight.requires_grad or name in policy.target_by_name
        ]
        self._kept = [weight.detach().clone() for weight in self._trained]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the policy compute with the reference weights for the body; its own return afterwards, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter, kept in zip(self._trained, self._kept, strict=True):
            parameter.data, kept.data = kept.data, parameter.data
