"""The process groups of one training world, as one explicit value.

A rank belongs to one group of each kind; a group of size one costs no communication. The ranks of a pipeline stage are
laid out twice, once for the dense layers and once for the experts of mixture-of-experts layers:

    stage  =  tp x cp x dp     dense layers        stage  =  etp x ep x edp    routed experts

    tp     ranks that share every dense layer of one pipeline stage (tensor parallel)
    pp     ranks that hold the stages of one model replica (pipeline parallel)
    cp     ranks that hold the same dense weights and see other parts of the same sequences (context parallel)
    dp     ranks that hold the same dense weights and see other sequences (data parallel)
    dp_cp  all ranks that hold the same dense weights
    mp     tp x pp: one replica of the dense layers
    etp    ranks that share every expert they hold (expert tensor parallel)
    ep     ranks that hold different experts of a layer (expert parallel)
    edp    ranks that hold the same shards of the same experts
    etp_ep etp x ep: all experts of a layer once
    emp    etp x ep x pp: one replica of all experts
    world  everybody who trains
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LayerGroups:
    """The ranks of one kind of layer: those that share a layer, those that hold replicas of it, and one whole model."""

    layer: ProcessGroup
    replicas: ProcessGroup
    model: ProcessGroup


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of this rank; never read from module state by the code that uses them."""

    tp: ProcessGroup
    pp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    mp: ProcessGroup
    etp: ProcessGroup
    ep: ProcessGroup
    edp: ProcessGroup
    etp_ep: ProcessGroup
    emp: ProcessGroup
    world: ProcessGroup

    def of_layers(self, *, expert: bool) -> LayerGroups:
        """Groups of routed experts, or of all other layers."""
        if expert:
            return LayerGroups(layer=self.etp, replicas=self.edp, model=self.emp)
        return LayerGroups(layer=self.tp, replicas=self.dp_cp, model=self.mp)

    def labels(self) -> list[tuple[ProcessGroup, str]]:
        """Each group with its name."""
        return [(getattr(self, field.name), field.name) for field in fields(self)]

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
    def cp_rank(self) -> int:
        """Index of this rank's part of a sequence."""
        return dist.get_rank(self.cp)

    @property
    def cp_size(self) -> int:
        """Number of parts a sequence is split into."""
        return dist.get_world_size(self.cp)

    @property
    def dp_rank(self) -> int:
        """Index of this rank's share of the responses."""
        return dist.get_rank(self.dp)

    @property
    def dp_size(self) -> int:
        """Number of shares of the responses."""
        return dist.get_world_size(self.dp)

    @property
    def etp_rank(self) -> int:
        """Index of this rank among the shards of an expert."""
        return dist.get_rank(self.etp)

    @property
    def etp_size(self) -> int:
        """Number of shards of an expert."""
        return dist.get_world_size(self.etp)

    @property
    def ep_rank(self) -> int:
        """Index of this rank among the holders of different experts."""
        return dist.get_rank(self.ep)

    @property
    def ep_size(self) -> int:
        """Number of ranks over which the experts of a layer are spread."""
        return dist.get_world_size(self.ep)

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
        """True on the ranks that hold the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the ranks that hold the final norm and the output layer."""
        return self.pp_rank == self.pp_size - 1
