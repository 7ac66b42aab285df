"""The sketches of all targets of a rank, as views of one flat fp32 buffer `[rows, R]`.

One buffer means one zero, one scale and one collective per process group and step. Rows of column-parallel targets
come first, rows of row-parallel targets last, so that the part which is a partial sum over TP is one contiguous slice:

    [ column-parallel rows | row-parallel rows ]        over DP: everything;  over TP: the second part only

Each row belongs to a segment, the rows that come from one Hugging Face matrix. Statistics are per segment, so that
they do not depend on how Megatron fuses matrices or which rank holds which rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_logra.sketch.target import SketchTarget


@dataclass(frozen=True)
class SegmentRows:
    """Consecutive local rows of a target that come from one Hugging Face matrix with `global_rows` rows in all."""

    name: str
    rows: slice
    global_rows: int


class SketchBuffer:
    """Flat sketch storage and the segment of each of its rows.

    Attributes:
        flat: fp32 (fp64 for fp64 weights) `[rows, R]`.
        num_column_rows: rows that belong to column-parallel targets; the rest are partial sums over TP.
        segment_names: Hugging Face name of each segment, `S` of them.
        row_segment: int64 `[rows]`, segment of each row.
        segment_rows: int64 `[S]`, rows of each segment over all tensor-parallel ranks.
        segment_is_sharded: bool `[S]`, True where TP ranks hold different rows of the segment.
    """

    def __init__(
        self,
        targets: Sequence[SketchTarget],
        segments: Mapping[str, Sequence[SegmentRows]],
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Lay out `targets` (bound to their views here); `segments` gives the row runs of each target by its name."""
        ordered = [t for t in targets if t.sharding == "column"] + [t for t in targets if t.sharding == "row"]
        num_rows = sum(target.num_rows for target in ordered)
        self.targets = tuple(ordered)
        self.num_column_rows = sum(t.num_rows for t in ordered if t.sharding == "column")
        self.flat = torch.zeros(num_rows, rank, dtype=dtype, device=device)
        numbers: dict[str, int] = {}
        global_rows: list[int] = []
        sharded: list[bool] = []
        row_segment = torch.empty(num_rows, dtype=torch.int64)
        start = 0
        for target in ordered:
            target.rows = slice(start, start + target.num_rows)
            target.sketch = self.flat[target.rows]
            for run in segments[target.name]:
                if run.name not in numbers:
                    numbers[run.name] = len(numbers)
                    global_rows.append(run.global_rows)
                    sharded.append(target.sharding == "column")
                row_segment[start + run.rows.start : start + run.rows.stop] = numbers[run.name]
            start += target.num_rows
        self.segment_names = tuple(numbers)
        self.row_segment = row_segment.to(device)
        self.segment_rows = torch.tensor(global_rows, dtype=torch.int64, device=device)
        self.segment_is_sharded = torch.tensor(sharded, dtype=torch.bool, device=device)

    @property
    def rank(self) -> int:
        """Sketch rank `R`."""
        return self.flat.shape[1]

    @property
    def partial_rows(self) -> Tensor:
        """View of the rows that are partial sums over TP."""
        return self.flat[self.num_column_rows :]

    def zero_(self) -> None:
        """Forget all sketches."""
        self.flat.zero_()

    def compute_mean_squares(self) -> Tensor:
        """Mean over `R` of the squares of each row, fp64 `[rows]`, without a temporary of the buffer's size."""
        return torch.linalg.vector_norm(self.flat, dim=1, dtype=torch.float64).square_().div_(self.rank)
