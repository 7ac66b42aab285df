"""Hyper-parameters of the dense optimizer, which `mcore.dense` runs with Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_logra.optim.schedule import LearningRateSchedule


@dataclass(frozen=True)
class DenseSettings:
    """Adam's settings; `distributed` divides its state among the ranks that hold the same weights.

    `clip_grad` is the largest norm of the gradient over the whole model, 0 for no clipping.
    """

    schedule: LearningRateSchedule
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad: float = 0.0
    distributed: bool = False
