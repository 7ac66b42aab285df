"""Projections entry by entry, against the definition written out with Python integers."""

from __future__ import annotations

import math
import random

import torch

from megatron_logra.sketch.projection import build_projection, philox4x32, projection_key

MASK = 2**32 - 1


def _philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & MASK,
            (first >> 32) ^ counter[3] ^ key[1],
            first & MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def test_philox_of_many_counters_at_once() -> None:
    generator = random.Random(0)
    extremes = [0, 1, 2**31 - 1, 2**31, MASK]
    counters = [[generator.choice([generator.getrandbits(32), *extremes]) for _ in range(4)] for _ in range(500)]
    key = (generator.getrandbits(32), MASK)
    columns = torch.tensor(counters, dtype=torch.int64).unbind(1)
    words = torch.stack(philox4x32((columns[0], columns[1], columns[2], columns[3]), key), dim=1)
    assert words.tolist() == [_philox(counter, list(key)) for counter in counters]


def test_every_sign_is_the_bit_of_its_row_and_column() -> None:
    rank, first = 200, 151_000
    key = list(projection_key(9, 4, "g"))
    signs = build_projection(9, 4, "g", rank, 152_064, columns=slice(first, first + 6)).signs(torch.float32)
    for column in range(6):
        for row in range(rank):
            word = _philox([first + column, row // 128, 0, 0], key)[row % 128 // 32]
            assert signs[row, column] == (1 if word >> row % 32 & 1 else -1)


def test_every_normal_is_box_muller_on_its_own_stream() -> None:
    rank, first = 10, 77
    key = list(projection_key(9, 4, "g"))
    projection = build_projection(9, 4, "g", rank, 100, columns=slice(first, first + 20), distribution="gaussian")
    normals = projection.unscaled(torch.float64)
    for column in range(20):
        for row in range(rank):
            words = _philox([first + column, row // 4, 1, 0], key)
            radius_word, angle_word = words[row % 4 // 2 * 2 : row % 4 // 2 * 2 + 2]
            radius = math.sqrt(-2 * math.log((radius_word + 0.5) / 2**32))
            angle = 2 * math.pi * angle_word / 2**32
            normal = radius * (math.sin(angle) if row % 2 else math.cos(angle))
            # On the grid of 2^-12, so half a step away from the real number at most.
            assert abs(normals[row, column].item() - normal) <= 2**-13 + 1e-12
    assert torch.equal(normals * 2**12, (normals * 2**12).round())
    assert torch.equal(projection.expand(torch.float64), normals * (1 / math.sqrt(rank)))
