"""The sums a LoGRA step makes over ranks, each over an explicit group.

sketch   row-parallel rows over TP (partial sums), then all rows over DP x CP; of experts over expert TP, expert DP
scalars  segment statistics over TP; norms over one replica of the model
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.parallel.traffic import purpose
from megatron_logra.sketch.buffer import SketchBuffer


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `x` over `group` in place and return it; no communication in a group of one."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x


def max_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Take the elementwise maximum of `x` over `group` in place and return it; no communication in a group of one."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def reduce_sketches_(buffer: SketchBuffer, groups: ParallelGroups) -> None:
    """Make the sketches of all ranks whole: of each part one all-reduce of the partial rows, then one of all rows.

    Partial rows are summed over the ranks that share a layer (TP, or expert TP), then everything over the ranks that
    hold the same weights (DP x CP, or expert DP). Each rank's sketches are already divided by the global number of
    valid tokens, so both are plain sums. The result is bitwise equal on all ranks that hold the same rows.
    """
    for part in buffer.parts:
        shared = groups.of_layers(expert=part.name == "expert")
        # Ranks that communicate here hold the same targets, so that all of them or none have rows.
        for rows, group in ((part.partial_rows, shared.layer), (part.rows, shared.replicas)):
            if rows.start < rows.stop:
                with purpose("sketch"):
                    sum_over(buffer.flat[rows], group)
