"""Saves what a run needs to continue on any layout, also in the background, and finds the newest whole checkpoint.

    SAVE/iter_0000010/          weights, masters, moments as `torch_dist` (`checkpoint.state`), see `checkpoint.folders`
    SAVE/iter_0000010/state.json   counters, KL controller, position in the data, what the checkpoint fits

Randomness is no state: every random number of a run follows from its seeds and the number of the step or update.
A checkpoint is written beside its place and renamed when it is whole and its files are hashed; whatever is interrupted,
the previous one stays. Background work runs on one thread, in order, over a process group of its own.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_logra.checkpoint.folders import (
    BEST_FILE,
    LATEST_FILE,
    candidates,
    checkpoint_folder,
    delete,
    list_iterations,
    open_partial,
    publish,
    read_pointer,
    select_obsolete,
    write_pointer,
)
from megatron_logra.checkpoint.integrity import hash_files, verify_share, write_manifest
from megatron_logra.checkpoint.state import collect_state
from megatron_logra.checkpoint.torch_dist import Block, load_blocks, save_blocks, write_format
from megatron_logra.hf.stored import module_states
from megatron_logra.mcore.dense import DenseOptimizer
from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.logra import LograOptimizer
from megatron_logra.parallel.scalars import raise_on_all_ranks, run_on_all_ranks
from megatron_logra.sketch.target import SketchTarget

STATE_FILE = "state.json"
_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The parts of a run whose tensors a checkpoint holds."""

    policy: Policy
    optimizer: LograOptimizer | None
    dense: DenseOptimizer | None

    def fits(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued, by flag or in words; the layout is not among it."""
        logra, masters = self.optimizer, {_master_of(target) for target in self.policy.targets}
        return {
            "layers": self.policy.shape.num_layers,
            "precision": str(self.policy.model.config.params_dtype).removeprefix("torch."),
            "--logra-rank": None if logra is None else logra.settings.rank,
            "--logra-master": None if not masters else masters.pop(),
            "dense training": self.dense is not None,
        }


class CheckpointWriter:
    """Writes checkpoints of one run. Building one is collective over all ranks, and so is every method.

    Args:
        folder: where checkpoints go, on a file system that all ranks share.
        in_background: return as soon as the tensors are copied to the host, and write while training goes on.
        retain_interval: see `folders.select_obsolete`.
    """

    def __init__(self, folder: Path, *, in_background: bool = False, retain_interval: int | None = None) -> None:
        self.folder = folder
        group = dist.new_group(backend="gloo")
        assert group is not None
        self._group: ProcessGroup = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._in_background = in_background
        self._retain_interval = retain_interval
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, iteration: int, trained: Trained, state: Mapping[str, Any], *, is_best: bool = False) -> None:
        """Write checkpoint `iteration`; `state` is JSON data, that of rank 0 counts.

        Raises:
            RuntimeError, OSError: on all ranks, when a rank cannot write; earlier checkpoints are untouched. In the
                background the error comes with the next call of `finish`.
        """
        blocks = [
            _copy_to_host(held.block) if self._in_background else held.block
            for held in collect_state(trained.policy, trained.optimizer, trained.dense)
            if held.is_written
        ]
        record = {"fits": trained.fits(), **state}
        modules = module_states(trained.policy.shape)
        self.run(lambda: self._write(iteration, blocks, record, modules, is_best))

    def run(self, job: Callable[[], None]) -> None:
        """Do a piece of work that writes: now, or in the background after what was given before."""
        if not self._in_background:
            job()
            return
        previous = self._thread

        def work() -> None:
            if previous is not None:
                previous.join()
            try:
                job()
            except Exception as error:  # raised on all ranks by `finish`
                self._error = self._error or error

        # A daemon: a rank that dies in training must not wait for a collective of its background work.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for background work; raises on all ranks what went wrong on any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        raise_on_all_ranks(error, self._group, _CPU)

    def _write(
        self,
        iteration: int,
        blocks: list[Block],
        record: Mapping[str, Any],
        modules: Mapping[str, tuple[int, ...]],
        is_best: bool,
    ) -> None:
        is_first = self._rank == 0
        partial = self.folder / f".iter_{iteration:07d}.partial"
        self._on_all_ranks(lambda: open_partial(self.folder, iteration) if is_first else None)
        common = {"iteration": iteration, "checkpoint_version": 3.0}
        save_blocks(partial, blocks, common=common, module_states=modules, group=self._group)
        digests = self._on_all_ranks(lambda: hash_files(partial.glob(f"__{self._rank}_*.distcp")))
        gathered: list[dict[str, str]] = [{} for _ in range(self._size)]
        dist.all_gather_object(gathered, digests, group=self._group)

        def complete() -> None:
            if not is_first:
                return
            (partial / STATE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            write_format(partial)
            others = [file for file in partial.iterdir() if file.suffix != ".distcp"]
            write_manifest(partial, hash_files(others) | {k: v for part in gathered for k, v in part.items()})
            publish(partial, self.folder, iteration)
            if is_best:
                write_pointer(self.folder, iteration, BEST_FILE)
            best = read_pointer(self.folder, BEST_FILE)
            existing = list_iterations(self.folder)
            delete(self.folder, select_obsolete(existing, retain_interval=self._retain_interval, best=best))

        self._on_all_ranks(complete)

    def _on_all_ranks[Result](self, action: Callable[[], Result]) -> Result:
        return run_on_all_ranks(action, self._group, _CPU)


def load_checkpoint(folder: Path, trained: Trained, device: torch.device, *, fall_back: bool = True) -> dict[str, Any]:
    """Put the newest whole checkpoint of `folder` into a run and return its `state`. Collective over all ranks.

    A damaged checkpoint is reported and the one before it is taken, unless `fall_back` is false.

    Raises:
        ValueError: there is no whole checkpoint, or it was made with settings that this run does not have; nothing was
            changed.
    """
    groups = trained.policy.groups
    world = groups.world
    found: list[list[int]] = [run_on_all_ranks(lambda: candidates(folder), world, device)]
    dist.broadcast_object_list(found, src=0, group=world, device=device)  # one view of a folder that may be changing
    iterations = found[0]
    if not iterations:
        raise ValueError(f"load {str(folder)!r} holds no checkpoint: it has no {LATEST_FILE} and no iter_* folder")
    for number, iteration in enumerate(iterations):
        place = checkpoint_folder(folder, iteration)
        try:
            state = _open_on_all_ranks(place, world)
            break
        except ValueError as error:
            if not fall_back:
                raise ValueError(f"{error}; not falling back to an older checkpoint (--no-fallback)") from error
            if number == len(iterations) - 1:
                raise ValueError(f"{error}; {folder} holds no older checkpoint that is whole") from error
            _log.warning("%s; trying checkpoint %d", error, iterations[number + 1])
    if state["fits"] != (own := trained.fits()):
        differences = [
            f"{name} {state['fits'].get(name)} in the checkpoint and {own.get(name)} in this run"
            for name in sorted({*own, *state["fits"]})
            if state["fits"].get(name) != own.get(name)
        ]
        raise ValueError(
            f"checkpoint {place} cannot be continued with these settings: {'; '.join(differences)}; give the settings "
            "it was saved with (the parallel sizes and the number of ranks may differ)"
        )
    held = list(collect_state(trained.policy, trained.optimizer, trained.dense))
    padded = frozenset(part.block.key for part in held if part.is_padded)
    run_on_all_ranks(lambda: load_blocks(place, [part.block for part in held], padded=padded), world, device)
    if trained.optimizer is not None:
        trained.optimizer.num_updates = int(state["num_updates"])
        trained.optimizer.draw_projections()
    if trained.dense is not None:
        trained.dense.resume_at(int(state["num_updates"]))
    return state


def _open_on_all_ranks(place: Path, world: ProcessGroup) -> dict[str, Any]:
    """The state of a checkpoint that is whole; ValueError on all ranks, with what any of them found wrong."""
    state, problem = {}, ""
    try:
        state = _open(place, dist.get_rank(world), dist.get_world_size(world))
    except (ValueError, OSError) as error:
        problem = str(error)
    problems = [problem] * dist.get_world_size(world)
    dist.all_gather_object(problems, problem, group=world)
    if any(problems):
        raise ValueError("; ".join(sorted({problem for problem in problems if problem})))
    return state


def _open(place: Path, rank: int, size: int) -> dict[str, Any]:
    """The state of a checkpoint whose files were found whole (this rank's share of them)."""
    if not place.is_dir():
        raise ValueError(f"checkpoint {place} does not exist")
    verify_share(place, rank, size)
    path = place / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state["fits"], dict):
            raise TypeError("`fits` is not a table")
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the state of a training run: {error!r}") from error
    return dict(state)


def _copy_to_host(block: Block) -> Block:
    tensor = block.tensor()
    return replace(block, data=tensor.to("cpu", copy=True))


def _master_of(target: SketchTarget) -> str:
    if target.remainder is not None:
        return "split"
    return "fp32" if target.master is not None else "weights"
