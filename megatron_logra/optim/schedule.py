"""Learning rate by update: linear warm-up, then constant, linear or cosine decay to a floor, as in Megatron-LM.

warm-up   lr (u + 1) / warmup                                   u < warmup, u counts updates from 0
decay     min + (lr - min) f((u - warmup) / (decay - warmup))   f = 1, 1 - x, (1 + cos(pi x)) / 2; min beyond
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """The flags `--lr`, `--min-lr`, `--lr-warmup-iters`, `--lr-decay-iters`, `--lr-decay-style`; counts are updates."""

    lr: float
    min_lr: float = 0.0
    warmup: int = 0
    decay: int = 1
    style: DecayStyle = "constant"

    def __call__(self, update: int) -> float:
        """Learning rate of update number `update`, from 0."""
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        if self.style == "constant":
            return self.lr
        progress = min(1.0, (update - self.warmup) / max(1, self.decay - self.warmup))
        share = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr + (self.lr - self.min_lr) * share
