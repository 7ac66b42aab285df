"""Watches whether predicted KLs come true, and says what to do when they do not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CalibrationWatch:
    """Counts consecutive measurements whose ratio of actual to predicted KL leaves `[low, high]`.

    The prediction is of second order in the update, so it holds for small updates and exact arithmetic only.
    """

    low: float = 0.5
    high: float = 2.0
    patience: int = 3
    num_outside: int = 0

    def observe(self, ratio: float) -> str | None:
        """Take in a measurement; the advice, once `patience` of them in a row were outside, else None."""
        self.num_outside = 0 if self.low <= ratio <= self.high else self.num_outside + 1
        if self.num_outside != self.patience:
            return None
        return (
            f"the actual KL of the last {self.patience} measured updates was below {self.low} or above {self.high} "
            f"times its prediction (last {ratio:.3g}): steps may be too large for a second-order prediction (lower "
            "--kl-budget), too small for the arithmetic (raise --kl-budget, or measure without --bf16), or the rollout "
            "engine may not sample at --rollout-temperature"
        )
