"""The process groups of one training world, as one explicit value.

A rank belongs to one group of each kind; a group of size one costs no communication.

    tp     ranks that share every layer of one pipeline stage (tensor parallel)
    pp     ranks that hold the stages of one model replica (pipeline parallel)
    dp     ranks that hold the same weights and see other samples (data parallel)
    mp     tp x pp: one whole model replica
    world  everybody who trains
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of this rank; never read from module state by the code that uses them."""

    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    mp: ProcessGroup
    world: ProcessGroup

    @property
    def tp_rank(self) -> int:
        """Index of this rank among the shards of a layer."""
        return dist.get_rank(self.tp)

    @property
    def tp_size(self) -> int:
        """Number of shards of a layer."""
        return dist.get_world_size(self.tp)

    @property
    def pp_rank(self) -> int:
        """Index of this rank's pipeline stage."""
        return dist.get_rank(self.pp)

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return dist.get_world_size(self.pp)

    @property
    def dp_rank(self) -> int:
        """Index of this rank's model replica."""
        return dist.get_rank(self.dp)

    @property
    def dp_size(self) -> int:
        """Number of model replicas."""
        return dist.get_world_size(self.dp)

    @property
    def rank(self) -> int:
        """Rank in the training world."""
        return dist.get_rank(self.world)

    @property
    def size(self) -> int:
        """Number of ranks in the training world."""
        return dist.get_world_size(self.world)

    @property
    def is_first_stage(self) -> bool:
        """True where the embedding lives."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the final norm and the output layer live."""
        return self.pp_rank == self.pp_size - 1
