"""The learning-rate schedule against hand-made values."""

from __future__ import annotations

import math

import pytest

from megatron_logra.optim.schedule import LearningRateSchedule


def test_warm_up_rises_to_the_rate_and_never_starts_at_zero() -> None:
    schedule = LearningRateSchedule(lr=8.0, warmup=4)
    assert [schedule(update) for update in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [10.0, 10.0, 10.0, 10.0, 10.0]),
        ("linear", [10.0, 8.0, 6.0, 2.0, 2.0]),
        ("cosine", [10.0, 2 + 4 * (1 + math.cos(math.pi / 4)), 6.0, 2.0, 2.0]),
    ],
)
def test_decay_ends_at_the_floor(style: str, expected: list[float]) -> None:
    schedule = LearningRateSchedule(lr=10.0, min_lr=2.0, warmup=2, decay=10, style=style)  # type: ignore[arg-type]
    assert [schedule(update) for update in (2, 4, 6, 10, 1000)] == pytest.approx(expected)
