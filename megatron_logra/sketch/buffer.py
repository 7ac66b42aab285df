"""The sketches of all targets of a rank, as views of one flat fp32 buffer `[rows, R]`.

One buffer means one zero, one scale and one collective per process group and step. Dense and expert targets are shared
by different groups of ranks, so each kind is one contiguous part. Within a part, rows of column-parallel targets come
first and rows of row-parallel targets, which are partial sums over the ranks that share a layer, last:

    dense part  [ column rows | row rows ]   expert part  [ column rows | row rows ]

Each row belongs to a segment, the rows that come from one Hugging Face matrix. Statistics are per segment, so that
they do not depend on how Megatron fuses matrices or which rank holds which rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_logra.sketch.target import SketchTarget

PartName = Literal["dense", "expert"]


@dataclass(frozen=True)
class SegmentRows:
    """Consecutive local rows of a target that come from one Hugging Face matrix with `global_rows` rows in all."""

    name: str
    rows: slice
    global_rows: int


@dataclass(frozen=True)
class BufferPart:
    """The targets that the same ranks share, with their rows, those rows that are partial sums, and their segments."""

    name: PartName
    targets: tuple[SketchTarget, ...]
    rows: slice
    partial_rows: slice
    segments: slice


class SketchBuffer:
    """Flat sketch storage and the segment of each of its rows.

    Attributes:
        flat: fp32 (fp64 for fp64 weights) `[rows, R]`.
        targets: all targets in the order of their rows.
        parts: the dense part and the one of routed experts, those that the model has; a rank may hold nothing of one.
        segment_names: Hugging Face name of each segment, `S` of them.
        row_segment: int64 `[rows]`, segment of each row.
        segment_rows: int64 `[S]`, rows of each segment over all ranks that share the layer.
        segment_is_sharded: bool `[S]`, True where those ranks hold different rows of the segment.
    """

    def __init__(
        self,
        targets: Sequence[SketchTarget],
        segments: Mapping[str, Sequence[SegmentRows]],
        *,
        parts: Sequence[PartName] = ("dense",),
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Lay out `targets` (bound to their views here).

        Args:
            segments: row runs of each target by its name.
            parts: those of the whole model, the same on all ranks, which communicate about each.
        """
        ordered = sorted(targets, key=lambda target: (target.is_expert, target.sharding == "row"))
        num_rows = sum(target.num_rows for target in ordered)
        self.targets = tuple(ordered)
        self.flat = torch.zeros(num_rows, rank, dtype=dtype, device=device)
        numbers: dict[str, int] = {}
        global_rows: list[int] = []
        sharded: list[bool] = []
        row_segment = torch.empty(num_rows, dtype=torch.int64)
        laid_out: list[BufferPart] = []
        start = 0
        for name in parts:
            held = tuple(target for target in ordered if target.is_expert == (name == "expert"))
            first_row, first_segment, first_partial = start, len(numbers), None
            for target in held:
                if target.sharding == "row" and first_partial is None:
                    first_partial = start
                target.rows = slice(start, start + target.num_rows)
                target.sketch = self.flat[target.rows]
                for run in segments[target.name]:
                    if run.name not in numbers:
                        numbers[run.name] = len(numbers)
                        global_rows.append(run.global_rows)
                        sharded.append(target.sharding == "column")
                    row_segment[start + run.rows.start : start + run.rows.stop] = numbers[run.name]
                start += target.num_rows
            partial = slice(start if first_partial is None else first_partial, start)
            segment_range = slice(first_segment, len(numbers))
            laid_out.append(BufferPart(name, held, slice(first_row, start), partial, segment_range))
        self.parts = tuple(laid_out)
        self.segment_names = tuple(numbers)
        self.row_segment = row_segment.to(device)
        self.segment_rows = torch.tensor(global_rows, dtype=torch.int64, device=device)
        self.segment_is_sharded = torch.tensor(sharded, dtype=torch.bool, device=device)

    @property
    def rank(self) -> int:
        """Sketch rank `R`."""
        return self.flat.shape[1]

    def zero_(self) -> None:
        """Forget all sketches."""
        self.flat.zero_()

    def compute_mean_squares(self) -> Tensor:
        """Mean over `R` of the squares of each row, fp64 `[rows]`, without a temporary of the buffer's size."""
        return torch.linalg.vector_norm(self.flat, dim=1, dtype=torch.float64).square_().div_(self.rank)
