"""An fp32 master weight kept as the bf16 weight the model computes with plus a 16-bit remainder: 4 bytes in all.

    fp32_bits = (bf16_bits << 16) + remainder,    remainder in [-32768, 32767]

The pair is exactly the fp32 value. Its bf16 half is the value rounded to nearest; a tie goes away from zero, because
the remainder +32768 that rounding it towards zero would need is no int16. NaN keeps being NaN but loses its payload;
a finite value beyond the largest bf16 rounds to infinity in the bf16 half and still joins back exactly.
Shapes: any; the two halves have the shape of the weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BFLOAT16_NAN = 0x7FC0


def split_fp32(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into (bfloat16 half, int16 remainder), exactly. Raises ValueError for another dtype."""
    if weight.dtype != torch.float32:
        raise ValueError(f"a split master holds float32 values, got {weight.dtype}")
    bits = weight.contiguous().view(torch.int32)
    is_nan = torch.isnan(weight)
    high = (bits >> 16) + (bits >> 15 & 1)
    low = (bits & 0xFFFF ^ 0x8000) - 0x8000
    high = torch.where(is_nan, _BFLOAT16_NAN, high).to(torch.int16)
    remainder = torch.where(is_nan, 0, low).to(torch.int16)
    return high.view(torch.bfloat16), remainder


def join_split(weight_bf16: Tensor, remainder: Tensor) -> Tensor:
    """The float32 values of a split pair, exactly."""
    high = weight_bf16.contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder).view(torch.float32)


def round_to_bf16(weight: Tensor) -> Tensor:
    """The bf16 half of float32 values: the one rounding used by trainer, export and rollout engine."""
    return split_fp32(weight)[0]


@dataclass(frozen=True, eq=False)
class SplitMaster:
    """A weight and its remainder, as views that row slices keep pointing into."""

    weight: Tensor  # bfloat16
    remainder: Tensor  # int16, same shape

    def __post_init__(self) -> None:
        if self.weight.dtype != torch.bfloat16 or self.remainder.dtype != torch.int16:
            raise ValueError(
                f"a split master is a bfloat16 weight and an int16 remainder, got {self.weight.dtype} "
                f"and {self.remainder.dtype}"
            )
        if self.weight.shape != self.remainder.shape:
            raise ValueError(
                f"the weight {tuple(self.weight.shape)} and its remainder {tuple(self.remainder.shape)} "
                "must have one shape"
            )

    @classmethod
    def from_fp32(cls, weight: Tensor) -> "SplitMaster":
        return cls(*split_fp32(weight))

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def rows(self, rows: slice) -> "SplitMaster":
        """The same storage, rows `rows` only."""
        return SplitMaster(self.weight[rows], self.remainder[rows])

    def join(self) -> Tensor:
        """The float32 values."""
        return join_split(self.weight, self.remainder)

    def store_(self, weight: Tensor) -> None:
        """Overwrite the pair with float32 values."""
        high, low = split_fp32(weight)
        self.weight.copy_(high)
        self.remainder.copy_(low)
