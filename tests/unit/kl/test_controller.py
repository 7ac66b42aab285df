"""The budget schedule at its ends, and the controller as a run uses it."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron_logra.kl.calibration import CalibrationWatch
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


def test_budgets_may_fall_on_a_line_or_stay() -> None:
    def budgets(schedule: str) -> list[float]:
        settings = {"budget": 4.0, "budget_final": 1.0, "schedule_steps": 7, "schedule": schedule}
        return [scheduled_budget(update, **settings) for update in (0, 1, 3, 6, 9)]  # type: ignore[arg-type]

    assert budgets("linear") == pytest.approx([4.0, 3.5, 2.5, 1.0, 1.0])
    assert budgets("constant") == [4.0] * 5
    assert KLController(budget=4.0, schedule="constant").effective_budget(100) == 4.0


def test_advice_comes_once_after_several_measurements_outside() -> None:
    watch = CalibrationWatch()
    quiet = [watch.observe(ratio) for ratio in (1.0, 3.0, 0.1, 0.9, 2.5, 2.5)]
    assert quiet == [None] * 6
    advice = watch.observe(2.5)
    assert advice is not None and "--kl-budget" in advice and "last 2.5" in advice
    assert watch.observe(2.5) is None
    assert [watch.observe(ratio) for ratio in (1.0, float("nan"), float("nan"))] == [None] * 3
    assert watch.observe(float("nan")) is not None
