"""The sums a LoGRA step makes over ranks, each over an explicit group.

sketch   row-parallel rows over TP (partial sums), then the whole flat buffer over DP
scalars  segment statistics over TP; norms over TP x PP
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.sketch.buffer import SketchBuffer


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `x` over `group` in place and return it; no communication in a group of one."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x


def reduce_sketches_(buffer: SketchBuffer, groups: ParallelGroups) -> None:
    """Make the sketches of all ranks whole: one all-reduce over TP of the partial rows, one over DP of everything.

    Each rank's sketches are already divided by the global number of valid tokens, so both are plain sums. The result
    is bitwise equal on all ranks that hold the same rows.
    """
    if buffer.partial_rows.shape[0]:
        sum_over(buffer.partial_rows, groups.tp)
    sum_over(buffer.flat, groups.dp)
