"""Projections: every way to expand one gives the same matrix; Gaussian ones have the moments they must have."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_logra.sketch.projection import build_projection, make_projection


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 31, 32, 64, 130])
def test_signs_are_the_same_in_every_dtype(dtype: torch.dtype, rank: int) -> None:
    projection = build_projection(1, 2, "g", rank, 50, columns=slice(7, 41))
    expected = make_projection(1, 2, "g", rank, 50, dtype=torch.float64)[:, 7:41].sign()
    assert torch.equal(projection.signs(dtype).double(), expected)
    assert torch.equal(projection.expand(torch.float64), expected * (1 / math.sqrt(rank)))
    assert torch.equal(projection.signs(dtype, slice(3, 9)).double(), expected[:, 3:9])
    assert torch.allclose(projection.gram(), expected @ expected.T / rank, atol=1e-12)


def test_names_updates_and_seeds_give_independent_projections() -> None:
    matrices = [
        make_projection(*key, 64, 256, dtype=torch.float64)
        for key in [(0, 0, "a"), (0, 0, "b"), (0, 1, "a"), (1, 0, "a")]
    ]
    for i, first in enumerate(matrices):
        for second in matrices[:i]:
            # The product of two independent signs has mean 0 and variance 1: 16,384 of them, six standard deviations.
            assert abs((first.sign() * second.sign()).mean()) < 6 / math.sqrt(first.numel())


def test_gaussian_entries_have_mean_0_and_variance_1_over_rank() -> None:
    rank, width = 64, 4096
    entries = make_projection(3, 0, "g", rank, width, distribution="gaussian", dtype=torch.float64) * math.sqrt(rank)
    number = entries.numel()
    # Six standard errors of the mean, of the variance (sqrt(2 / n)) and of the fourth moment (sqrt(96 / n)).
    assert abs(entries.mean()) < 6 / math.sqrt(number)
    assert abs(entries.square().mean() - 1) < 6 * math.sqrt(2 / number)
    assert abs(entries.pow(4).mean() - 3) < 6 * math.sqrt(96 / number)
    part = make_projection(
        3, 0, "g", rank, width, columns=slice(100, 300), distribution="gaussian", dtype=torch.float64
    )
    assert torch.equal(part * math.sqrt(rank), entries[:, 100:300])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="rank must be in 1..65536, got 0"):
        build_projection(0, 0, "g", 0, 8)
    with pytest.raises(ValueError, match="'uniform'; choose one of rademacher, gaussian"):
        build_projection(0, 0, "g", 4, 8, distribution="uniform")
    with pytest.raises(ValueError, match="within width 8"):
        build_projection(0, 0, "g", 4, 8, columns=slice(4, 9))
