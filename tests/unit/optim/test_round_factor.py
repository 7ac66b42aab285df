"""Factors lie on a grid that leaves a merge nothing to round; split masters at the ends of the number range."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_logra.optim.merge import merge_factor_, round_factor
from megatron_logra.optim.split_master import SplitMaster, join_split, split_fp32
from megatron_logra.sketch.projection import build_projection


@pytest.mark.parametrize("rank", [1, 2, 3, 24, 256, 257, 4096, 65536])
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-7, 1.0, 1e37])
def test_entries_are_few_enough_steps_of_one_power_of_two(rank: int, size: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    direction = torch.randn(3, rank, generator=generator) * torch.logspace(0, -9, rank)
    direction = direction * size
    direction[0, 0] = 1.998 * 2.0 ** math.floor(math.log2(size))  # bf16 rounds it up to the next power of two
    factor = round_factor(direction, 1.0, rank)
    for row in factor.double():
        largest = row.abs().max().item()
        if largest == 0:
            continue
        digits = 24 - math.ceil(math.log2(rank))
        step = 2.0 ** max(math.floor(math.log2(largest)) + 1 - digits, -100)
        steps = row / step
        assert torch.equal(steps, steps.round())
        # The bound on any sum of these entries, with any signs: fp32 holds every integer up to it.
        assert steps.abs().sum() <= 2**24
    bound = direction.abs().double() * 2.0**-8 + direction.abs().amax(1, keepdim=True).double() * rank * 2.0**-23
    assert ((factor.double() - direction.double()).abs() <= bound + 2.0**-101).all()


def test_the_worst_row_is_exact_in_any_order() -> None:
    # All entries of one size and as many significant steps as fit: the sum uses all 24 digits.
    rank = 256
    generator = torch.Generator().manual_seed(5)
    direction = 1.99 - torch.rand(64, rank, generator=generator) * torch.logspace(0, -5, rank) * 1.99
    factor = round_factor(direction, 1.0, rank)
    projection = build_projection(3, 1, "g", rank, 200)
    exact = factor.double() @ projection.signs(torch.float64)
    for permutation in [torch.arange(rank), torch.arange(rank).flip(0), torch.randperm(rank, generator=generator)]:
        total = torch.zeros(64, 200)
        for i in permutation.tolist():
            total += factor[:, i, None].float() * projection.signs(torch.float32)[i]
        assert torch.equal(total.double(), exact)
    merged = torch.zeros(64, 200)
    merge_factor_(merged, factor, projection)
    assert torch.equal(merged.double(), -exact / 16)


def test_a_row_does_not_depend_on_other_rows_and_rounding_again_changes_nothing() -> None:
    direction = torch.randn(8, 48, generator=torch.Generator().manual_seed(2)) * torch.logspace(-8, 2, 8)[:, None]
    factor = round_factor(direction, 0.3, 48)
    assert torch.equal(torch.cat([round_factor(row[None], 0.3, 48) for row in direction]), factor)
    assert torch.equal(round_factor(factor.float(), 1.0, 48), factor)
    assert torch.equal(round_factor(-direction, 0.3, 48), -factor)


def test_non_finite_entries_are_not_hidden() -> None:
    direction = torch.tensor([[1.0, math.nan], [math.inf, 1.0], [1.0, 2.0]])
    factor = round_factor(direction, 1.0, 2)
    assert factor.isfinite().all(dim=1).tolist() == [False, False, True]


def test_a_rank_without_exact_sums_is_refused() -> None:
    with pytest.raises(ValueError, match=r"within 1\.\.65536"):
        round_factor(torch.zeros(1, 65537), 1.0, 65537)


def test_nan_and_the_largest_values_survive_a_split() -> None:
    bits = torch.tensor([0x7FC00000, -1, 0x7F800001, 0x7F7FFFFF, -0x00800001, 0x7F7F8000, 1], dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    high, low = split_fp32(values)
    assert values.isnan().tolist() == [True, True, True, False, False, False, False]
    assert torch.equal(high.isnan(), values.isnan())
    joined = join_split(high, low)
    assert torch.equal(joined.isnan(), values.isnan())
    assert torch.equal(joined[3:].view(torch.int32), values[3:].view(torch.int32))


def test_rows_of_a_split_master_point_into_it() -> None:
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    master = SplitMaster.from_fp32(values)
    master.rows(slice(2, 4)).store_(values[:2] * 3)
    expected = values.clone()
    expected[2:4] = values[:2] * 3
    assert torch.equal(master.join(), expected)
