"""Row-wise Adam over many interleaved segments, against a slow loop over single rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_logra.optim.row_adam import compute_row_scale_, row_adam_direction

BETA2, EPSILON = 0.9, 1e-3
# Rows of three segments as a fused weight interleaves them (query, key, value of two groups).
ROW_SEGMENT = [0, 0, 1, 2, 0, 0, 1, 2]


def _reference(sketches: list[Tensor], rule: str) -> list[list[list[float]]]:
    """Directions of one segment over several steps, in plain Python."""
    moments = [0.0] * sketches[0].shape[0]
    directions = []
    for step, sketch in enumerate(sketches, start=1):
        rows = sketch.tolist()
        for i, row in enumerate(rows):
            moments[i] = BETA2 * moments[i] + (1 - BETA2) * sum(x * x for x in row) / len(row)
        roots = [math.sqrt(moment / (1 - BETA2**step)) for moment in moments]
        floor = EPSILON * sum(roots) / len(roots) if rule == "paper" else EPSILON
        result = [[x / (root + floor) if x else 0.0 for x in row] for row, root in zip(rows, roots, strict=True)]
        if rule == "paper":
            before = math.sqrt(sum(x * x for row in rows for x in row))
            after = math.sqrt(sum(x * x for row in result for x in row))
            result = [[x * before / after if after else 0.0 for x in row] for row in result]
        directions.append(result)
    return directions


@pytest.mark.parametrize("rule", ["paper", "lr"])
def test_segments_of_one_buffer_do_not_mix(rule: str) -> None:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.tensor([1.0, 10.0, 1e-3, 5.0, 0.0, 2.0, 1e-9, 1e4], dtype=torch.float64)
    sketches = [torch.randn(8, 6, generator=generator, dtype=torch.float64) * sizes[:, None] for _ in range(3)]
    row_segment = torch.tensor(ROW_SEGMENT)
    moment2 = torch.zeros(8, dtype=torch.float64)
    num_reductions = 0

    def count(sums_KS: Tensor) -> Tensor:
        nonlocal num_reductions
        num_reductions += 1
        return sums_KS

    for step, sketch in enumerate(sketches, start=1):
        scale = compute_row_scale_(
            sketch.square().mean(1),
            moment2,
            row_segment_O=row_segment,
            segment_rows_S=row_segment.bincount(),
            reduce_segments=count,
            step=step,
            beta2=BETA2,
            epsilon=EPSILON,
            rule=rule,
        )
        for segment in range(3):
            rows = row_segment == segment
            expected = torch.tensor(_reference([s[rows] for s in sketches], rule)[step - 1], dtype=torch.float64)
            # A dozen fp64 operations an entry.
            torch.testing.assert_close(sketch[rows] * scale[rows, None], expected, rtol=1e-13, atol=1e-300)
    assert num_reductions == (2 * len(sketches) if rule == "paper" else 0)


def test_rule_paper_keeps_the_norm_and_a_dead_segment_stays_at_zero() -> None:
    sketch = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    moment2 = torch.zeros(5)
    for step in (1, 2, 3):
        direction = row_adam_direction(sketch, moment2, step=step, beta2=BETA2, epsilon=EPSILON, rule="paper")
        # fp32 rounding of 20 products, each 2^-24 relative.
        assert direction.norm().item() == pytest.approx(sketch.norm().item(), rel=1e-6)
    dead = row_adam_direction(torch.zeros(5, 4), torch.zeros(5), step=1, rule="paper")
    assert torch.equal(dead, torch.zeros(5, 4))


def test_rule_sgd_is_the_sketch_itself() -> None:
    sketch, moment2 = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(5)
    assert torch.equal(row_adam_direction(sketch, moment2, step=1, rule="sgd"), sketch)
    assert torch.equal(moment2, torch.zeros(5))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'adam'; choose one of paper, lr, sgd"):
        row_adam_direction(torch.zeros(1, 1), torch.zeros(1), step=1, rule="adam")
    with pytest.raises(ValueError, match="from 1, got 0"):
        row_adam_direction(torch.zeros(1, 1), torch.zeros(1), step=0)
