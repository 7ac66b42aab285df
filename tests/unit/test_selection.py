"""Responses without a gradient may be left out; nothing else may."""

from __future__ import annotations

import pytest

from megatron_logra.rl.batching import Response
from megatron_logra.rl.selection import select_informative


def _response(valid: bool = True) -> Response:
    return Response([1], [2], [-1.0], reward=0.0, finished=True, sample_index=0, group=0, valid=valid)


def test_every_response_with_a_gradient_is_kept_and_the_count_fits() -> None:
    responses = [_response() for _ in range(12)]
    advantages = [0.0, 1.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]
    assert select_informative(responses, advantages, multiple=1) == [1, 4, 9]
    chosen = select_informative(responses, advantages, multiple=4)
    assert len(chosen) == 4 and {1, 4, 9} <= set(chosen) and chosen == sorted(chosen)


def test_every_rank_keeps_a_micro_batch_when_nothing_tells_anything() -> None:
    assert len(select_informative([_response()] * 8, [0.0] * 8, multiple=4)) == 4


def test_valid_responses_fill_up_before_failed_ones() -> None:
    responses = [_response(valid=False), _response(), _response(), _response(valid=False)]
    assert select_informative(responses, [0.0, 0.0, 1.0, 0.0], multiple=2) == [1, 2]


def test_a_count_that_cannot_be_cut_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"6 % 4 = 2"):
        select_informative([_response()] * 6, [0.0] * 6, multiple=4)
