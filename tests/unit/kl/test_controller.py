"""The budget schedule at its ends, and the controller as a run uses it."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron_logra.kl.controller import KLController, scheduled_budget, step_scale


def test_the_schedule_falls_and_its_two_halves_mirror_each_other() -> None:
    budgets = [scheduled_budget(t, budget=3.0, budget_final=1.0, schedule_steps=51) for t in range(60)]
    assert budgets[0] == 3.0 and budgets[25] == pytest.approx(2.0) and budgets[50:] == [1.0] * 10
    assert all(a > b for a, b in itertools.pairwise(budgets[:51]))
    for t in range(51):
        assert budgets[t] + budgets[50 - t] == pytest.approx(4.0, rel=1e-15)


def test_a_scaled_step_spends_exactly_the_budget() -> None:
    controller = KLController(budget=1e-3, budget_final=1e-4, schedule_steps=10)
    controller.observe_mismatch(2e-4)
    for update in (0, 3, 20):
        alpha = controller.step_scale(0.5, update)
        # Quadratic: alpha^2 times the prediction.
        assert alpha**2 * 0.5 == pytest.approx(controller.effective_budget(update), rel=1e-14)
    assert controller.step_scale(1e-9, 0) == controller.alpha_max


@pytest.mark.parametrize("mismatch", [math.nan, math.inf])
def test_a_mismatch_that_is_no_number_is_an_error(mismatch: float) -> None:
    controller = KLController()
    with pytest.raises(FloatingPointError, match="mismatch"):
        controller.observe_mismatch(mismatch)
    assert controller.mismatch_ema == 0.0


def test_a_budget_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"budget 0\.0"):
        step_scale(1e-3, budget=0.0)
