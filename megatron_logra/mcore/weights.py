"""Reading the policy's weights as any receiver wants them: local tensors, tables of all stages, snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_logra.hf.rows import ParameterEntry
from megatron_logra.hf.table import parameter_table
from megatron_logra.mcore.model import stage_layers
from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.split_master import join_split


def stage_tables(policy: Policy) -> list[list[ParameterEntry]]:
    """Parameter table of every pipeline stage, the same on all ranks; no communication."""
    config, num_stages = policy.model.config, policy.groups.pp_size
    return [
        parameter_table(
            policy.shape,
            layers=[layer for _, layer in stage_layers(config, stage)],
            embedding=stage == 0,
            final=stage == num_stages - 1,
        )
        for stage in range(num_stages)
    ]


def read_served(policy: Policy, entry: ParameterEntry) -> Tensor:
    """Local tensor of an entry as the model computes with it (for a split master its bf16 half)."""
    parameter = policy.model.get_parameter(entry.megatron_name)
    return parameter.detach()


def read_master(policy: Policy, entry: ParameterEntry) -> Tensor:
    """Local tensor of an entry with every bit that is kept of it: fp32, or fp64 for an fp64 model."""
    for target in policy.targets:
        if target.name == entry.megatron_name and target.remainder is not None:
            return join_split(target.weight, target.remainder)
        if target.name == entry.megatron_name and target.master is not None:
            return target.master
    weight = read_served(policy, entry)
    return weight if weight.dtype == torch.float64 else weight.float()


class ReferencePolicy:
    """The target weights at one moment, to compute with them again later: the reference of a KL penalty.

    Keeps a copy of this rank's target shards in the compute dtype (as much memory as the targets themselves).
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights = [target.weight.clone() for target in policy.targets]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the policy compute with the reference weights for the body; its own return afterwards, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for target, kept in zip(self._policy.targets, self._weights, strict=True):
            parameter = self._policy.model.get_parameter(target.name)
            parameter.data, kept.data = kept.data, parameter.data
