"""Rounding of an update factor and its merge into a weight, `W <- W - U A`, with the same bits everywhere.

Trainer and rollout engines merge the same factor on different devices, in different shards and GEMM blockings, and
must hold the same weights afterwards. So a factor is rounded such that the matrix product has no rounding at all:

    L      = ceil(log2 R)                       2^e <= max |row of U| < 2^(e+1)
    step   = 2^(e + 1 - 24 + L)                 every entry of the row is k * step with |k| < 2^(24 - L)

Any partial sum of R entries with signs +-1 is then an integer below 2^24 times `step`, hence exact in fp32, whatever
the order; also with TF32 inputs or tensor-core accumulators, which keep 24 bits. What follows the exact product is
one fp32 multiplication by 1/sqrt(R) and one fp32 subtraction, each an elementwise operation of its own (a fused
multiply-add would round differently). Gaussian projections hold 16-bit fixed-point entries, so the same product is
exact in fp64 (at most 24 + 15 bits) and is rounded to fp32 once.

With weight decay one more elementwise fp32 multiplication comes before the subtraction.

Shapes: O rows of the weight or of a slice of it, I columns held here, R rank.
"""

import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_logra.optim.split_master import SplitMaster
from megatron_logra.sketch.projection import MAX_RANK, Projection

_FLOAT32_DIGITS = 24
_BFLOAT16_DIGITS = 8
_SMALLEST_STEP_EXPONENT = -100  # sums and their 1/sqrt(R) multiples stay clear of subnormals, which a device may flush
_BLOCK_ROWS = 2048
_LEAST_BLOCKS = 16  # so that no temporary comes near the size of a weight, however small that is
_BLOCK_COLUMNS = 2048


def round_factor(direction_OR: Tensor, alpha: float, rank: int, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The factor `U_OR = alpha * D`, rounded once to the bf16 numbers on its row's grid (see the module's text).

    An entry of at least 2^7 steps is rounded to bf16, whose spacing there is at least one step; a smaller one to a
    whole number of steps, which has at most 8 bits. The result depends on nothing but its own row.
    `dtype` float32 or float64 gives `alpha * D` without the grid, for references. Non-finite entries stay so.
    Raises ValueError when `rank` is not the number of columns or exceeds 65536.
    """
    if direction_OR.shape[-1] != rank or not 1 <= rank <= MAX_RANK:
        raise ValueError(
            f"a direction of shape {tuple(direction_OR.shape)} needs rank {direction_OR.shape[-1]} "
            f"within 1..{MAX_RANK}, got rank {rank}"
        )
    if dtype != torch.bfloat16:
        return direction_OR.to(dtype) * alpha
    scaled_OR = direction_OR.to(torch.float32) * alpha
    rounded_OR = scaled_OR.to(torch.bfloat16).to(torch.float32)
    row_bits_O1 = rounded_OR.abs().amax(dim=1, keepdim=True).view(torch.int32)
    exponent_O1 = (row_bits_O1 >> 23) - 127 + 1 - _FLOAT32_DIGITS + (rank - 1).bit_length()
    exponent_O1 = exponent_O1.clamp_(min=_SMALLEST_STEP_EXPONENT)
    step_O1 = _power_of_two(exponent_O1)
    on_grid_OR = torch.round(scaled_OR * _power_of_two(-exponent_O1)).mul_(step_O1)
    has_bf16_spacing = scaled_OR.abs() >= step_O1 * 2.0 ** (_BFLOAT16_DIGITS - 1)
    return torch.where(has_bf16_spacing, rounded_OR, on_grid_OR).to(torch.bfloat16)


@torch.no_grad()
def merge_factor_(
    weight_OI: Tensor,
    factor_OR: Tensor,
    projection: Projection,
    *,
    keep: float = 1.0,
    block_rows: int | None = None,
    block_columns: int = _BLOCK_COLUMNS,
) -> None:
    """`W <- keep W - U A` in place, for a float32 master (or float64, in references); local, no communication.

    `keep` below 1 is weight decay; it is rounded to float32 first.
    `weight_OI` may be any view (a row slice of a fused weight); its columns are the ones `projection` holds.
    The largest temporary is one block, at most a sixteenth of the weight. A float32 weight with a factor of
    `round_factor` gets the same bits for any device, block size and sharding. With a float64 weight or factor
    everything is computed in float64.
    Raises ValueError when shapes do not fit or the weight is a bare bfloat16 one.
    """
    if weight_OI.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a {weight_OI.dtype} weight cannot take small updates; use a float32 master or merge_factor_split_"
        )

    def subtract(rows: slice, columns: slice, update: Tensor) -> None:
        block = weight_OI[rows, columns]
        _decay_(block, keep).sub_(update)

    _for_each_block(weight_OI, factor_OR, projection, block_rows, block_columns, subtract)


@torch.no_grad()
def merge_factor_split_(
    weight_OI: Tensor,
    remainder_OI: Tensor,
    factor_OR: Tensor,
    projection: Projection,
    *,
    keep: float = 1.0,
    block_rows: int | None = None,
    block_columns: int = _BLOCK_COLUMNS,
) -> None:
    """`merge_factor_` for a bfloat16 weight and its int16 remainder: same fp32 arithmetic, same bits."""
    master = SplitMaster(weight_OI, remainder_OI)

    def subtract(rows: slice, columns: slice, update: Tensor) -> None:
        block = SplitMaster(master.weight[rows, columns], master.remainder[rows, columns])
        block.store_(_decay_(block.join(), keep).sub_(update))

    _for_each_block(weight_OI, factor_OR, projection, block_rows, block_columns, subtract)


def rows_of_block(num_rows: int) -> int:
    """Rows that are worked on at once in a weight of `num_rows` rows."""
    return min(_BLOCK_ROWS, -(-num_rows // _LEAST_BLOCKS))


def _for_each_block(
    weight_OI: Tensor,
    factor_OR: Tensor,
    projection: Projection,
    block_rows: int | None,
    block_columns: int,
    subtract: Callable[[slice, slice, Tensor], None],
) -> None:
    """Hand every block of `U A` to `subtract`, in the weight's arithmetic dtype."""
    num_rows, num_columns = weight_OI.shape
    block_rows = block_rows or rows_of_block(num_rows)
    if factor_OR.shape != (num_rows, projection.rank) or num_columns != projection.num_columns:
        raise ValueError(
            f"cannot merge a factor {tuple(factor_OR.shape)} with {projection.name} (rank {projection.rank}, "
            f"{projection.num_columns} columns) into a weight {tuple(weight_OI.shape)}: the factor needs shape "
            f"({num_rows}, {projection.rank}) and the projection {num_columns} columns"
        )
    in_float64 = torch.float64 in (weight_OI.dtype, factor_OR.dtype)
    result_dtype = torch.float64 if in_float64 else torch.float32
    product_dtype = torch.float32 if projection.distribution == "rademacher" and not in_float64 else torch.float64
    scale = projection.scale if in_float64 else _round_to_float32(projection.scale)
    for column in range(0, num_columns, block_columns):
        columns = slice(column, min(column + block_columns, num_columns))
        tile_RC = projection.unscaled(product_dtype, columns)
        for row in range(0, num_rows, block_rows):
            rows = slice(row, min(row + block_rows, num_rows))
            product = (factor_OR[rows].to(product_dtype) @ tile_RC).to(result_dtype)
            subtract(rows, columns, product.mul_(scale))


def _decay_(block: Tensor, keep: float) -> Tensor:
    """`block` times `keep` in place: an operation of its own, so that no device fuses it with the subtraction."""
    if keep == 1.0:
        return block
    return block.mul_(keep if block.dtype == torch.float64 else _round_to_float32(keep))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32 from its bits, for int32 exponents in -126..127; library exp2 may be an ulp off."""
    return ((exponent + 127) << 23).view(torch.float32)


def _round_to_float32(value: float) -> float:
    rounded = float(struct.unpack("<f", struct.pack("<f", value))[0])
    assert math.isfinite(rounded)
    return rounded
