"""The trainer's half of synchronisation: the factors (or all weights) of a model replica in Hugging Face naming.

Every rank of the replica (TP x PP) ends up with everything, because the embedded engine is a replica of the policy in
each process. A transport to engines elsewhere reads the same stream on one rank. What is moved and when follows from
the parameter tables of all stages, which every rank computes from the configuration; see `sync.gather`.

Shapes: factor `[O, R]` local rows on a rank, all rows of the Hugging Face weight in a packet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.rows import ParameterEntry
from megatron_logra.sync.gather import GatherItem, ShardSizes, factor_item, stream_gathered, weight_item
from megatron_logra.sync.packet import FactorEntry, FactorPacket, PacketHeader

StageTables = Sequence[Sequence[ParameterEntry]]
"""The parameter table of every pipeline stage, in stage order (virtual stages of one rank one after another)."""

ReadLocal = Callable[[ParameterEntry], Tensor]
"""This rank's local tensor of an entry of its own stage."""


class PolicySender:
    """Streams factors and weights of one model replica.

    Args:
        shape: the model.
        tables: parameter table of every stage, by expert-parallel rank (one for a dense model).
        sizes: how a stage's tensors are spread.
        targets: projection groups that are sketched; None for all.
        tp_group, pp_group, expert_group: as in `sync.gather.stream_gathered`.
        bucket_bytes: most bytes in flight in a bucket (`--sync-bucket-mb`).
        device: where the gathered tensors are.
    """

    def __init__(
        self,
        shape: ModelShape,
        tables: Sequence[StageTables],
        *,
        sizes: ShardSizes,
        targets: Collection[str] | None = None,
        tp_group: ProcessGroup | None,
        pp_group: ProcessGroup | None,
        expert_group: ProcessGroup | None = None,
        bucket_bytes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shape = shape
        self._sizes = sizes
        self._targets = targets
        # By stage and parameter of a rank: the entry, or of experts the entry on every expert-parallel rank.
        self._stages = [
            [
                (entries[0],) if entries[0].expert is None else entries
                for entries in zip(*stage_of_ranks, strict=True)
                if entries[0].exported
            ]
            for stage_of_ranks in zip(*tables, strict=True)
        ]
        self._tp_group, self._pp_group, self._expert_group = tp_group, pp_group, expert_group
        self._bucket_bytes = bucket_bytes
        self._device = device

    @property
    def stages(self) -> StageTables:
        """Table of every stage with all experts, without second copies of tied weights."""
        return [[entry for entries in stage for entry in entries] for stage in self._stages]

    @property
    def groups(self) -> dict[str, str]:
        """Projection group of every target, by Hugging Face name."""
        named = target_groups(self.stages)
        return {name: group for name, group in named.items() if self._is_target(group)}

    @property
    def weight_names(self) -> list[str]:
        """Hugging Face names of all weights that `stream_weights` gives."""
        return [name for entries in self.stages for entry in entries for name in entry.hf_names]

    @property
    def widths(self) -> dict[str, int]:
        """Input columns of every projection group."""
        return {group: width for group, width in group_widths(self.stages).items() if self._is_target(group)}

    def _is_target(self, group: str | None) -> bool:
        return group is not None and (self._targets is None or group in self._targets)

    def stream_packets(
        self, header: PacketHeader, read_factor: ReadLocal, *, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[FactorPacket]:
        """Parts of one packet, a bucket each; together they hold every target once. Collective (TP and PP).

        Args:
            header: of the update; `widths` of all groups.
            read_factor: local rows `[O_local, R]` of a target's factor; a row-parallel target's rows are all here
                and equal on every TP rank.
            dtype: bf16, or float32/float64 in references. A cast here must not round: factors come rounded.
        """
        groups = self.groups
        stages = [
            [
                factor_item(entries, self._shape, self._sizes, rank=header.rank)
                for entries in stage
                if self._is_target(entries[0].group)
            ]
            for stage in self._stages
        ]
        for bucket in self._stream(stages, read_factor, dtype):
            factors = [FactorEntry(name, groups[name], factor_OR) for name, factor_OR in bucket]
            yield FactorPacket.from_header(header, factors)

    def gather_packet(
        self, header: PacketHeader, read_factor: ReadLocal, *, dtype: torch.dtype = torch.bfloat16
    ) -> FactorPacket:
        """The whole packet on every rank; see `stream_packets`."""
        parts = self.stream_packets(header, read_factor, dtype=dtype)
        return FactorPacket.from_header(header, (entry for part in parts for entry in part.entries))

    def stream_weights(self, read_weight: ReadLocal, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights in Hugging Face naming, each once, tied ones once, on every rank. Collective (TP and PP).

        For a full synchronisation, an export or a checksum. A name's tensor shares memory with its bucket.

        Args:
            read_weight: this rank's local parameter, in the dtype to export or wider.
            dtype: of the result. float32 keeps a split master whole; float32 to bf16 must be rounded by
                `optim.split_master.round_to_bf16` beforehand, because a cast breaks ties differently.
        """
        stages = [[weight_item(entries, self._shape, self._sizes) for entries in stage] for stage in self._stages]
        for bucket in self._stream(stages, read_weight, dtype):
            yield from bucket

    def _stream(
        self, stages: Sequence[Sequence[GatherItem]], read_local: ReadLocal, dtype: torch.dtype
    ) -> Iterator[list[tuple[str, Tensor]]]:
        return stream_gathered(
            stages,
            read_local,
            dtype=dtype,
            device=self._device,
            tp_group=self._tp_group,
            pp_group=self._pp_group,
            expert_group=self._expert_group,
            bucket_bytes=self._bucket_bytes,
        )


def target_groups(stages: StageTables) -> dict[str, str]:
    """Projection group of every target weight of these tables, by Hugging Face name."""
    return {
        name: entry.group
        for entries in stages
        for entry in entries
        if entry.group is not None
        for name in entry.hf_names
    }


def group_widths(stages: StageTables) -> dict[str, int]:
    """Input columns of every projection group of these tables."""
    return {
        entry.group: entry.num_columns
        for entries in stages
        for entry in entries
        if entry.group is not None and entry.num_columns is not None
    }


def factor_bytes(stages: StageTables, rank: int, names: Collection[str] | None = None, *, itemsize: int = 2) -> int:
    """Bytes of one packet's factors (`sync/factor_bytes`), of the targets in `names` only if these are given."""
    rows = sum(
        hf_shape[0]
        for entries in stages
        for entry in entries
        if entry.group is not None
        for name, hf_shape in entry.hf_shapes.items()
        if names is None or name in names
    )
    return rows * rank * itemsize


def full_bytes(stages: StageTables, *, itemsize: int = 2) -> int:
    """Bytes of all weights, tied ones once (`sync/full_bytes`)."""
    shapes = [
        hf_shape for entries in stages for entry in entries if entry.exported for hf_shape in entry.hf_shapes.values()
    ]
    return itemsize * sum(hf_shape[0] * (hf_shape[1] if len(hf_shape) == 2 else 1) for hf_shape in shapes)
