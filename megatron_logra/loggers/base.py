"""Owns the protocol that every destination of metrics follows, and the group that feeds them all.

`log(step, metrics)` is called once a step, with step 0 for what is measured before training, in increasing order of
steps. A destination that fails after start-up warns and goes quiet: recording a run never ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class SampleRecord:
    """One response, for a person to read."""

    prompt: str
    response: str
    reward: float
    answer: str = ""


class MetricsLogger(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Record a few responses of one step."""

    def close(self) -> None:
        """Flush and release everything. Further calls are not allowed."""


class LoggerGroup:
    """Feeds several loggers; without any (all ranks but the first) every method does nothing."""

    def __init__(self, loggers: Sequence[MetricsLogger] = (), *, wandb_run_id: str | None = None) -> None:
        self.loggers = tuple(loggers)
        self.wandb_run_id = wandb_run_id
        """Identity of the Weights & Biases run, for the checkpoint; None where there is no such run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step everywhere."""
        for logger in self.loggers:
            logger.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Record a few responses of one step everywhere."""
        for logger in self.loggers:
            logger.log_samples(step, samples)

    def close(self) -> None:
        """Close every logger."""
        for logger in self.loggers:
            logger.close()
