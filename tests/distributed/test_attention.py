"""Core attention in blocks of queries against the formula over whole `[T, T]` matrices (fp64): windows and soft-capping."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

import megatron_logra.mcore.attention as attention
from megatron_logra.mcore.attention import CausalAttention
from tests.distributed.ranks import run_ranks

LENGTH, BLOCK, HEADS, GROUPS, WIDTH, SCALE = 23, 5, 4, 2, 8, 0.3
VARIANTS = [(None, None), (4, None), (7, None), (40, None), (None, 1.5), (4, 1.5)]


def _core(window: int | None, softcap: float | None, layer_number: int = 1) -> CausalAttention:
    config: Any = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=WIDTH,
        context_parallel_size=1,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=[1, 0],
        attention_softcap=softcap,
    )
    return CausalAttention(config, layer_number, AttnMaskType.causal, "self", softmax_scale=SCALE)


def _reference(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, first: int) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
    scores = torch.einsum("bnqd,bnkd->bnqk", q, k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    for row in range(q.shape[2]):
        for column in range(k.shape[2]):
            distance = first + row - column
            if distance < 0 or (window is not None and distance >= window):
                scores[:, :, row, column] = float("-inf")
    return torch.einsum("bnqk,bnkd->bnqd", scores.softmax(-1), v)


def _inputs(first: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(first)
    shapes = [(2, HEADS, LENGTH, WIDTH), (2, GROUPS, first + LENGTH, WIDTH), (2, GROUPS, first + LENGTH, WIDTH)]
    return [3 * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def _gradients(function: Any, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    return output.detach(), list(torch.autograd.grad((output * weight).sum(), leaves))


def _compare(rank: int, world_size: int, first: int) -> None:
    attention.QUERY_BLOCK = BLOCK
    inputs = _inputs(first)
    directions = [torch.randn_like(x) for x in inputs]
    # fp64 sums of at most a few dozen terms of order 1.
    close = {"rtol": 1e-11, "atol": 1e-11}
    for window, softcap in VARIANTS:
        core = _core(window, softcap)
        attend, reference = (
            partial(core._attend, first=first),
            partial(_reference, window=window, softcap=softcap, first=first),
        )
        torch.testing.assert_close(_gradients(attend, inputs), _gradients(reference, inputs), **close)
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, direction) for x, direction in zip(inputs, directions, strict=True)]
            found = tuple(forward_ad.unpack_dual(core._attend_unfused(*duals, first)))
        torch.testing.assert_close(found, torch.func.jvp(reference, tuple(inputs), tuple(directions)), **close)


@pytest.mark.parametrize("first", [0, 6])
def test_output_gradients_and_tangents(first: int) -> None:
    run_ranks(1, _compare, first)


def _key_counts(rank: int, world_size: int, softcap: float | None) -> dict[int, list[int]]:
    """By layer, the keys that each softmax was over (the fused kernel's are seen by its mask)."""
    attention.QUERY_BLOCK = BLOCK
    counts: dict[int, list[int]] = {}
    for layer in (1, 2):
        core = _core(4, softcap, layer)
        blocks = core._attend_in_blocks
        seen = counts.setdefault(layer, [])

        def watched(q: Tensor, k: Tensor, v: Tensor, first: int, attend: Any) -> Tensor:
            def counting(q: Tensor, k: Tensor, v: Tensor, *firsts: int) -> Tensor:
                seen.append(k.shape[2])  # noqa: B023
                return attend(q, k, v, *firsts)

            return blocks(q, k, v, first, counting)  # noqa: B023

        core._attend_in_blocks = watched  # type: ignore[method-assign]
        core._attend(*_inputs(0), 0)
    return counts


def test_a_window_bounds_the_keys_of_a_block_in_its_layers_only() -> None:
    (fused,), (capped,) = run_ranks(1, _key_counts, None), run_ranks(1, _key_counts, 1.5)
    # 3 positions before a block of 5; the last block has 3 queries.
    windowed = [5, 8, 8, 8, 6]
    assert fused == {1: windowed, 2: []}
    assert capped == {1: windowed, 2: [5, 10, 15, 20, 23]}
