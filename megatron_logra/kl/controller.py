"""Decides how far an update may go: a KL budget, its schedule, and the correction for generation mismatch.

    alpha   = min(alpha_max, sqrt(budget / KL_pred))            the KL grows with the square of the step
    budget  = cosine or linear from `budget` to `budget_final` over the first `schedule_steps` updates, or constant
    ema     = (1 - w) ema + w max(0, mean(generation logprob - trainer logprob))
    allowed = max(floor * budget, budget - ema)

Everything is in nats per token. All ranks must pass equal numbers and then hold equal state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BudgetSchedule = Literal["cosine", "linear", "constant"]


def step_scale(predicted_kl: float, *, budget: float, alpha_max: float = 3.0) -> float:
    """Factor `alpha` for the proposed update; 1 when nothing at all is predicted to change.

    Raises:
        FloatingPointError: the prediction is negative or not finite; the update must not be applied.
        ValueError: a budget or alpha_max that is not above 0.
    """
    if not (budget > 0 and alpha_max > 0):
        raise ValueError(f"budget {budget} and alpha_max {alpha_max} must both be above 0")
    if not math.isfinite(predicted_kl) or predicted_kl < 0:
        raise FloatingPointError(
            f"the predicted KL of the update is {predicted_kl}, which no update has; nothing was applied. Look for "
            "non-finite logits or rewards, or lower --logra-update-ratio"
        )
    if predicted_kl == 0:
        return 1.0
    return min(alpha_max, math.sqrt(budget / predicted_kl))


def scheduled_budget(
    update: int, *, budget: float, budget_final: float, schedule_steps: int, schedule: BudgetSchedule = "cosine"
) -> float:
    """Budget of update number `update` (from 0), falling as half a cosine or a line and constant afterwards.

    With `constant` it is `budget` throughout.
    """
    if update < 0 or schedule_steps < 1:
        raise ValueError(f"update {update} must be at least 0 and schedule_steps {schedule_steps} at least 1")
    progress = min(1.0, update / max(1, schedule_steps - 1))
    if schedule == "constant":
        return budget
    if schedule == "linear":
        return budget + (budget_final - budget) * progress
    return budget_final + (budget - budget_final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass
class KLController:
    """Budget, schedule and mismatch average of one run; `mismatch_ema` is its only state.

    Attributes are the flags of the same names without the prefix `kl_`.
    """

    budget: float = 2e-4
    budget_final: float = 2e-5
    schedule_steps: int = 300
    schedule: BudgetSchedule = "cosine"
    alpha_max: float = 3.0
    mismatch_weight: float = 0.3
    budget_floor: float = 0.5
    mismatch_ema: float = 0.0

    def observe_mismatch(self, mismatch: float) -> None:
        """Take in the mean of generation minus trainer log-probability over finished responses of a step."""
        if not math.isfinite(mismatch):
            raise FloatingPointError(f"the generation mismatch is {mismatch}; a log-probability is not finite")
        self.mismatch_ema += self.mismatch_weight * (max(0.0, mismatch) - self.mismatch_ema)

    def effective_budget(self, update: int) -> float:
        """Scheduled budget of update number `update` (from 0) less the mismatch, not below its floor."""
        scheduled = scheduled_budget(
            update,
            budget=self.budget,
            budget_final=self.budget_final,
            schedule_steps=self.schedule_steps,
            schedule=self.schedule,
        )
        return max(self.budget_floor * scheduled, scheduled - self.mismatch_ema)

    def step_scale(self, predicted_kl: float, update: int) -> float:
        """`alpha` of update number `update` (from 0); errors as in `step_scale`."""
        return step_scale(predicted_kl, budget=self.effective_budget(update), alpha_max=self.alpha_max)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"mismatch_ema": self.mismatch_ema}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.mismatch_ema = float(state["mismatch_ema"])
