"""Runs a function on several gloo ranks of this machine, by fork after import.

Protocol: the parent forks one process a rank, so that nothing is imported again (0.1-0.3 s a test, where a
spawned interpreter costs 6-30 s) and `fn` may be a closure. Each child joins a gloo group over the loopback
interface, calls `fn(rank, world_size, *args)`, meets the others at a barrier and leaves its result in a file.
The parent returns the results in rank order. The first rank that raises or dies ends the run: the others are
killed and the failure is raised with the rank and its traceback. When the time is up, every rank that still
runs is asked for its stack before it is killed, so a deadlock shows where each rank stood.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

CHILD_SEED = 1234
# A rank that fails breaks its peers' connections: the time given to the one that failed first to be seen too.
GRACE_S = 0.2


class RankError(RuntimeError):
    """A rank raised, died or ran out of time; `rank` is the first one that did (`None`: the time was up)."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` on `world_size` forked gloo ranks and returns what they return.

    Args:
        world_size: number of ranks; 1 is forked too, which keeps Megatron's global state out of the parent.
        fn: any callable, closures included. Torch runs on one thread, and Python's, and torch's generators
            start from the same fixed seed on every rank.
        args: passed as they are (shared copy-on-write, never pickled).
        timeout_s: seconds for everything; also the timeout of every collective.

    Returns:
        The results by rank. They travel by pickle: tensors must be on the CPU and detached.

    Raises:
        RankError: a rank raised (its exception is the cause if it can be pickled), died, or the time was up.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("run_ranks forks, which CUDA does not survive, and CUDA is initialised in this process")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder_name:
        folder = Path(folder_name)
        processes = _fork_ranks(world_size, fn, args, folder, timeout_s)
        try:
            _wait_for_ranks(processes, folder, timeout_s)
            return [_read_outcome(folder, rank)["result"] for rank in range(world_size)]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _fork_ranks(
    world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], folder: Path, timeout_s: float
) -> list[BaseProcess]:
    context = multiprocessing.get_context("fork")
    sys.stdout.flush()
    sys.stderr.flush()
    processes: list[BaseProcess] = []
    with warnings.catch_warnings():
        # Python warns that a fork of a threaded process may deadlock; the children use none of those threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        for rank in range(world_size):
            process = context.Process(
                target=_run_rank,
                args=(rank, world_size, fn, args, folder, timeout_s, os.getpid()),
                daemon=True,
            )
            process.start()
            processes.append(process)
    return processes


def _run_rank(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    folder: Path,
    timeout_s: float,
    parent_pid: int,
) -> None:
    """What a child does: set up, call, write the outcome. Never returns an exception to multiprocessing."""
    _die_with_parent(parent_pid)
    with (folder / f"stack{rank}").open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            OMP_NUM_THREADS="1",
        )
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        torch.manual_seed(CHILD_SEED)
        random.seed(CHILD_SEED)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            result = fn(rank, world_size, *args)
            if dist.is_initialized():
                # Nobody leaves while another rank may still be reading from its sockets.
                dist.barrier()
            outcome = pickle.dumps({"result": result})
            succeeded = True
        except BaseException as error:
            outcome = _pickle_failure(error)
            succeeded = False
        partial = folder / f"outcome{rank}.partial"
        partial.write_bytes(outcome)
        partial.rename(folder / f"outcome{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
        # Destructors of process groups and of inherited objects have no business in a forked child.
        os._exit(0 if succeeded else 1)


def _die_with_parent(parent_pid: int) -> None:
    """Asks Linux to kill this process when its parent dies: a killed test run leaves nothing behind."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


def _pickle_failure(error: BaseException) -> bytes:
    failure = {"traceback": "".join(traceback.format_exception(error)), "time_s": time.monotonic()}
    try:
        encoded = pickle.dumps({**failure, "error": error})
        pickle.loads(encoded)  # some exceptions can be written but not read again
    except Exception:
        encoded = pickle.dumps({**failure, "error": None})
    return encoded


def _read_outcome(folder: Path, rank: int) -> dict[str, Any]:
    """The outcome a rank left, or an empty dictionary."""
    path = folder / f"outcome{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else {}


def _wait_for_ranks(processes: list[BaseProcess], folder: Path, timeout_s: float) -> None:
    """Returns once every rank left a result; raises `RankError` at a failure or when the time is up."""
    deadline_s = time.monotonic() + timeout_s
    running = dict(enumerate(processes))
    while running:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise _timeout_error(running, folder, timeout_s)
        sentinels = {process.sentinel: process for process in running.values()}
        for sentinel in multiprocessing.connection.wait(list(sentinels), remaining_s):
            sentinels[sentinel].join(GRACE_S)  # the sentinel closes a moment before the exit code is there
        if any(process.exitcode not in (0, None) for process in running.values()):
            time.sleep(GRACE_S)
            _raise_first_failure(processes, folder)
        running = {rank: process for rank, process in running.items() if process.exitcode is None}


def _raise_first_failure(processes: list[BaseProcess], folder: Path) -> NoReturn:
    """Raises for a rank that died without a word, else for the earliest exception."""
    num_ranks = len(processes)
    outcomes = {rank: _read_outcome(folder, rank) for rank in range(num_ranks)}
    for rank, process in enumerate(processes):
        if process.exitcode is not None and not outcomes[rank]:
            raise RankError(f"rank {rank} of {num_ranks} died with exit code {process.exitcode}", rank)
    failures = {rank: outcome for rank, outcome in outcomes.items() if "traceback" in outcome}
    first = min(failures, key=lambda rank: failures[rank]["time_s"])
    message = f"rank {first} of {num_ranks} raised:\n{failures[first]['traceback']}"
    raise RankError(message, first) from failures[first]["error"]


def _timeout_error(running: dict[int, BaseProcess], folder: Path, timeout_s: float) -> RankError:
    """Collects the Python stack of every rank still running."""
    for process in running.values():
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # the handlers write asynchronously
    stacks = [f"rank {rank}:\n{(folder / f'stack{rank}').read_text()}" for rank in running]
    ranks = ", ".join(str(rank) for rank in running)
    message = f"ranks {ranks} did not finish within {timeout_s} s; their stacks:\n" + "\n".join(stacks)
    return RankError(message, None)
