"""Owns the choice of loggers for a run: which destinations there are on which rank, from the logging settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_logra.loggers.base import LoggerGroup, MetricsLogger
from megatron_logra.loggers.console import ConsoleLogger
from megatron_logra.loggers.jsonl import JsonlLogger
from megatron_logra.loggers.tensorboard import TensorBoardLogger
from megatron_logra.loggers.wandb_run import WandbLogger


class LoggingSettings(Protocol):
    """The part of the configuration that is about logging; an empty `wandb_project` switches wandb off."""

    @property
    def log_interval(self) -> int: ...

    @property
    def wandb_project(self) -> str: ...

    @property
    def wandb_exp_name(self) -> str: ...

    @property
    def wandb_save_dir(self) -> str | None: ...

    @property
    def tensorboard_dir(self) -> str | None: ...


def build_loggers(
    settings: LoggingSettings,
    *,
    run_dir: Path | None,
    rank: int,
    last_step: int | None = None,
    resume_step: int | None = None,
    wandb_run_id: str | None = None,
    run_config: Mapping[str, Any] | None = None,
) -> LoggerGroup:
    """Open every destination on rank 0; other ranks get a group that does nothing.

    Without `run_dir` nothing is written to files but what `tensorboard_dir` and wandb ask for. `last_step` is the step
    that training ends with. `resume_step` and `wandb_run_id` come from the checkpoint that was loaded. Raises `OSError`
    where `run_dir` cannot be written to; TensorBoard and wandb only warn.
    """
    if rank != 0:
        return LoggerGroup()
    loggers: list[MetricsLogger] = []
    if run_dir is not None:
        loggers.append(JsonlLogger(run_dir, resume_step=resume_step))
    loggers.append(ConsoleLogger(log_interval=settings.log_interval, last_step=last_step))
    if settings.tensorboard_dir:
        loggers.append(TensorBoardLogger(Path(settings.tensorboard_dir), resume_step=resume_step))
    run_id = None
    if settings.wandb_project:
        wandb_logger = WandbLogger(
            project=settings.wandb_project,
            name=settings.wandb_exp_name or (run_dir.name if run_dir else ""),
            folder=Path(settings.wandb_save_dir or run_dir or "wandb"),
            run_config=run_config or {},
            run_id=wandb_run_id,
        )
        loggers.append(wandb_logger)
        run_id = wandb_logger.run_id
    return LoggerGroup(loggers, wandb_run_id=run_id)
