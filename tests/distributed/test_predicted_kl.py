"""KL over a sharded vocabulary: the value of the whole vocabulary, the same bits on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.kl.predicted_kl import (
    exact_kl,
    predicted_kl,
    vocab_parallel_exact_kl,
    vocab_parallel_predicted_kl,
)
from tests.distributed.ranks import run_ranks

TEMPERATURE = 0.8
# Uneven shards; one rank holds padding only, which is cut to nothing.
BOUNDS = [0, 5, 6, 17, 17]


def _logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(7, 17, generator=generator, dtype=torch.float64) * 5
    # A shard whose probability underflows, and shards whose tangents differ by much more than their spread.
    logits[3, :5] -= 2000
    tangent = torch.randn(7, 17, generator=generator, dtype=torch.float64) * 0.01
    tangent[:, 6:] += 1.0
    return logits, tangent


def _divergences(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    columns = slice(BOUNDS[rank], BOUNDS[rank + 1])
    logits, tangent = (x[:, columns].contiguous() for x in _logits())
    group = dist.group.WORLD
    return (
        vocab_parallel_predicted_kl(logits, tangent, temperature=TEMPERATURE, group=group),
        vocab_parallel_exact_kl(logits, logits + tangent, temperature=TEMPERATURE, group=group),
    )


def test_shards_of_the_vocabulary_agree_with_the_whole() -> None:
    logits, tangent = _logits()
    results = run_ranks(4, _divergences)
    for predicted, exact in results:
        assert torch.equal(predicted, results[0][0]) and torch.equal(exact, results[0][1])
    # Sums of 17 fp64 terms; exp(c) - 1 - c loses two more digits where c is 0.01.
    torch.testing.assert_close(
        results[0][0], predicted_kl(logits, tangent, temperature=TEMPERATURE), rtol=1e-13, atol=0
    )
    whole = exact_kl(logits, logits + tangent, temperature=TEMPERATURE)
    torch.testing.assert_close(results[0][1], whole, rtol=1e-11, atol=0)
