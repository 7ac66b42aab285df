"""How a run begins, and when and what it saves: from --load or anew, checkpoints, exports, the best so far, the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_logra.arguments import resolved_yaml
from megatron_logra.checkpoint.export import HF_FOLDER, export_policy
from megatron_logra.checkpoint.folders import list_iterations, read_pointer
from megatron_logra.checkpoint.training import CheckpointWriter, Trained, load_checkpoint
from megatron_logra.config import Config
from megatron_logra.loggers.build import build_loggers
from megatron_logra.parallel.scalars import run_on_all_ranks
from megatron_logra.run import BestMetric, Run, SetUpError
from megatron_logra.signals import ExitSignal
from megatron_logra.synchronise import synchronise_full

_log = logging.getLogger(__name__)


def start(run: Run) -> None:
    """Continue from --load if there is something, open the loggers, and write down what this run is. Collective."""
    config, folder = run.config, run.config.checkpoint
    state: dict[str, Any] = {}
    if folder.load is not None:
        if config.starts_or_continues and not _holds_checkpoints(run, Path(folder.load)):
            _log.info("%s holds no checkpoint yet: starting from --hf-checkpoint", folder.load)
        else:
            state = load_state(run, Path(folder.load))
    if config.training.exit_signal_handler:
        run.exit_signal = ExitSignal()
    run_on_all_ranks(lambda: open_loggers(run, state), run.groups.world, run.device)
    if folder.save is not None:
        run.writer = CheckpointWriter(
            Path(folder.save), in_background=folder.async_save, retain_interval=folder.save_retain_interval
        )


def load_state(run: Run, folder: Path) -> dict[str, Any]:
    """Take over a checkpoint, rollout engine included, and return its state; `SetUpError` on all ranks otherwise."""
    try:
        state = load_checkpoint(folder, _trained(run), run.device, fall_back=run.config.checkpoint.fallback)
        run.inputs.stream.load_state_dict(state["data"])
    except (ValueError, RuntimeError) as error:
        raise SetUpError(str(error)) from error
    run.step = int(state["step"])
    run.controller.load_state_dict(state["controller"])
    run.calibration.num_outside = int(state["num_outside_calibration"])
    if state["best"] is not None:
        run.best = BestMetric(**state["best"])
    if run.optimizer is not None:
        run.optimizer.kl_per_square_norm = state["kl_per_square_norm"]
    synchronise_full(run)
    _log.info("continuing %s after iteration %d", folder, run.step)
    return state


def open_loggers(run: Run, state: Mapping[str, Any]) -> None:
    """Open the destinations of metrics on rank 0, continuing those of a loaded checkpoint."""
    config = run.config
    folder = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    run.loggers = build_loggers(
        config.logging,
        run_dir=folder,
        rank=run.groups.rank,
        last_step=config.training.train_iters,
        resume_step=run.step if state else None,
        wandb_run_id=state.get("wandb_run_id"),
        run_config=config.flat(),
    )
    if folder is not None and run.is_first_rank:
        (folder / "config.yaml").write_text(resolved_yaml(config), encoding="utf-8")


def save(run: Run, *, is_best: bool = False) -> None:
    """Checkpoint under --save, if that is given; with --async-save it is whole some time later. Collective."""
    if run.writer is None:
        return
    state: dict[str, Any] = {
        "step": run.step,
        "num_updates": run.version,
        "data": run.inputs.stream.state_dict(),
        "controller": run.controller.state_dict(),
        "num_outside_calibration": run.calibration.num_outside,
        "kl_per_square_norm": None if run.optimizer is None else run.optimizer.kl_per_square_norm,
        "best": None if run.best is None else vars(run.best),
        "wandb_run_id": run.loggers.wandb_run_id,
    }
    with run.timers("save"):
        run.writer.finish()
        run.writer.save(run.step, _trained(run), state, is_best=is_best)


def export(run: Run) -> None:
    """The policy as a Hugging Face folder under --save, if that is given. Collective."""
    config = run.config
    if run.writer is None or config.checkpoint.save is None:
        return
    with run.timers("export"):
        export_policy(
            Path(config.checkpoint.save) / HF_FOLDER,
            Path(config.model.hf_checkpoint),
            run.policy,
            run.sender,
            run.device,
            write_later=run.writer.run if config.checkpoint.async_save else None,
        )


def finish_saving(run: Run) -> None:
    """Wait until everything is on disk. Raises on all ranks what went wrong in the background."""
    if run.writer is not None:
        run.writer.finish()


def note_evaluation(run: Run, metrics: Mapping[str, float]) -> bool:
    """Whether an evaluation is the best so far by --save-best-metric; the first one of a run only sets the mark.

    Raises ValueError when there is no such metric.
    """
    name = run.config.checkpoint.save_best_metric
    if name is None:
        return False
    if name not in metrics:
        raise ValueError(
            f"save_best_metric {name!r} is not a metric of the evaluation: give one of {', '.join(sorted(metrics))}"
        )
    if run.best is not None and metrics[name] <= run.best.value:
        return False
    is_first, run.best = run.best is None, BestMetric(name=name, value=metrics[name], step=run.step)
    return not is_first


def is_asked_to_end(run: Run) -> bool:
    """Whether a signal asked any rank to end, with --exit-signal-handler. Collective then."""
    return run.exit_signal is not None and run.exit_signal.received(run.groups.world, run.device)


def is_due(run: Run, interval: int | None) -> bool:
    """Whether this iteration ends an interval."""
    return interval is not None and run.step % interval == 0


def is_last(run: Run) -> bool:
    """Whether training ends with this iteration."""
    return run.step == run.config.training.train_iters


def export_interval(config: Config) -> int | None:
    """Iterations between exports: the setting, or with every checkpoint."""
    given = config.checkpoint.export_interval
    return config.checkpoint.save_interval if given is None else given


def _trained(run: Run) -> Trained:
    return Trained(run.policy, run.optimizer, run.dense)


def _holds_checkpoints(run: Run, folder: Path) -> bool:
    """What rank 0 sees decides for all: another rank may look while a folder appears."""

    def look() -> bool:
        return bool(list_iterations(folder)) or read_pointer(folder) is not None

    found: list[bool] = [run_on_all_ranks(look, run.groups.world, run.device)]
    dist.broadcast_object_list(found, src=0, group=run.groups.world, device=run.device)
    return found[0]
