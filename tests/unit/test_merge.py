"""A merge has the same bits whatever the shard, the block size and the master, and the right value (exact rationals)."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from megatron_logra.optim.merge import merge_factor_, merge_factor_split_, round_factor
from megatron_logra.optim.split_master import SplitMaster, join_split, round_to_bf16, split_fp32
from megatron_logra.sketch.projection import build_projection

RANK, ROWS, WIDTH = 24, 40, 70


def _case(distribution: str = "rademacher") -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(ROWS, WIDTH, generator=generator) * 0.02
    # Rows of very different size, entries over many powers of two, and a row of zeros.
    direction = torch.randn(ROWS, RANK, generator=generator) * torch.logspace(-6, 3, ROWS)[:, None]
    direction *= torch.logspace(-4, 0, RANK)[None]
    direction[3] = 0
    return weight, direction, {"rank": RANK, "width": WIDTH, "distribution": distribution}


def _projection(columns: slice = slice(None), distribution: str = "rademacher"):  # type: ignore[no-untyped-def]
    return build_projection(42, 5, "group", RANK, WIDTH, columns=columns, distribution=distribution)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_shards_and_blocks_do_not_change_a_bit(distribution: str) -> None:
    weight, direction, _ = _case()
    factor = round_factor(direction, 0.37, RANK)
    whole = weight.clone()
    merge_factor_(whole, factor, _projection(distribution=distribution))
    assert not torch.equal(whole, weight)
    blocks = weight.clone()
    merge_factor_(blocks, factor, _projection(distribution=distribution), block_rows=7, block_columns=11)
    assert torch.equal(blocks, whole)
    rows, columns = slice(8, 27), slice(13, 55)
    shard = weight[rows, columns].clone()
    merge_factor_(shard, factor[rows], _projection(columns, distribution))
    assert torch.equal(shard, whole[rows, columns])


def test_the_merge_is_the_exact_product_rounded_twice() -> None:
    weight, direction, _ = _case()
    factor = round_factor(direction, 1.0, RANK)
    signs = _projection().signs(torch.float64)
    merged = weight.clone()
    merge_factor_(merged, factor, _projection())
    scale = torch.tensor(RANK**-0.5, dtype=torch.float32)
    for row in (0, 3, 11, ROWS - 1):
        for column in (0, 17, WIDTH - 1):
            exact = sum(
                (Fraction(float(u)) * int(s) for u, s in zip(factor[row], signs[:, column], strict=True)), Fraction()
            )
            product = torch.tensor(float(exact), dtype=torch.float32)
            assert Fraction(product.item()) == exact, "the sum is representable, so no order can round it"
            assert merged[row, column] == weight[row, column] - product * scale


def test_a_factor_is_bf16_close_to_the_direction() -> None:
    _, direction, _ = _case()
    factor = round_factor(direction, 2.0, RANK)
    assert factor.dtype == torch.bfloat16
    # bf16 keeps 8 digits, so rounding errs by 2^-8 relative at most; the grid adds half a step of 2^(1 - 24 + 5) of the row's largest entry.
    bound = (2 * direction).abs() * 2.0**-8 + (2 * direction).abs().amax(1, keepdim=True) * 2.0**-18
    assert ((factor.float() - 2 * direction).abs() <= bound).all()


def test_a_split_master_moves_exactly_as_fp32_and_plain_bf16_does_not() -> None:
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(ROWS, WIDTH, generator=generator) * 0.02
    split = SplitMaster.from_fp32(master)
    plain = master.to(torch.bfloat16)
    for update in range(200):
        direction = torch.randn(ROWS, RANK, generator=generator) * 2e-6
        factor = round_factor(direction, 1.0, RANK)
        projection = build_projection(0, update, "group", RANK, WIDTH)
        merge_factor_(master, factor, projection)
        merge_factor_split_(split.weight, split.remainder, factor, projection)
        moved = plain.float()
        merge_factor_(moved, factor, projection)
        plain = moved.to(torch.bfloat16)
    assert torch.equal(split.join(), master)
    assert torch.equal(split.weight, round_to_bf16(master))
    assert (plain != split.weight).float().mean() > 0.05


def test_split_and_join_are_exact_for_every_kind_of_value() -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.cat([values[~values.isnan()], torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.00390625])])
    high, low = split_fp32(values)
    assert torch.equal(join_split(high, low).view(torch.int32), values.view(torch.int32))
    finite = values.abs() < 3e38
    nearest = values.to(torch.bfloat16)
    tie = low == -(2**15)
    assert torch.equal(high[finite & ~tie], nearest[finite & ~tie])


def test_a_bare_bf16_weight_is_refused() -> None:
    weight, direction, _ = _case()
    with pytest.raises(ValueError, match="float32 master"):
        merge_factor_(weight.to(torch.bfloat16), round_factor(direction, 1.0, RANK), _projection())
