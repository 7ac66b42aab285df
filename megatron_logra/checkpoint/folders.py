"""The folder of a run's checkpoints: which there are, which is the newest, which may go.

    SAVE/iter_0000010/                        a checkpoint; it appears by a rename, so it is whole
    SAVE/.iter_0000010.partial/               one that is being written, or was when the run was killed
    SAVE/latest_checkpointed_iteration.txt    the newest one; moves when everything of it is on disk
    SAVE/best_checkpointed_iteration.txt      the one with the best metric, if a metric is watched

All functions are for one rank; nothing here communicates.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_logra.hf.atomic import replace_folder, restore_interrupted, sync_folder

LATEST_FILE = "latest_checkpointed_iteration.txt"
BEST_FILE = "best_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")


def checkpoint_folder(folder: Path, iteration: int) -> Path:
    """Where checkpoint `iteration` stands."""
    return folder / f"iter_{iteration:07d}"


def list_iterations(folder: Path) -> list[int]:
    """Iterations of all checkpoints, ascending."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def read_pointer(folder: Path, name: str = LATEST_FILE) -> int | None:
    """The iteration that a pointer names; None when there is no pointer. Raises ValueError when it is not a number."""
    path = folder / name
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        raise ValueError(f"{path} holds {text!r}, which is not the number of an iteration")
    return int(text)


def write_pointer(folder: Path, iteration: int, name: str = LATEST_FILE) -> None:
    """Let a pointer name `iteration`; a reader finds the old number or the new one."""
    temporary = folder / f".{name}.tmp"
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(f"{iteration}\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, folder / name)
    sync_folder(folder)


def open_partial(folder: Path, iteration: int) -> Path:
    """An empty folder to write checkpoint `iteration` in; what interrupted runs left half written is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".iter_*.partial"):
        shutil.rmtree(left)
    partial = folder / f".iter_{iteration:07d}.partial"
    partial.mkdir()
    return partial


def publish(partial: Path, folder: Path, iteration: int) -> None:
    """Give a finished checkpoint its name and let the pointer name it, in this order."""
    for file in partial.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(partial)
    target = checkpoint_folder(folder, iteration)
    restore_interrupted(target)
    replace_folder(partial, target)
    write_pointer(folder, iteration)


def candidates(folder: Path) -> list[int]:
    """Iterations to try loading, the best first: the one that the pointer names, then older ones, then newer ones.

    A newer one than the pointer's is whole but was not announced any more before the run was killed.
    """
    latest, found = read_pointer(folder), list_iterations(folder)
    if latest is None:
        return found[::-1]
    older = [iteration for iteration in found if iteration < latest]
    newer = [iteration for iteration in found if iteration > latest]
    return [latest, *older[::-1], *newer[::-1]]


def select_obsolete(existing: Sequence[int], *, retain_interval: int | None, best: int | None) -> list[int]:
    """Iterations of checkpoints that may be deleted.

    With an interval those stay whose number is a multiple of it, and always the newest two (one to fall back to) and
    the best. Without an interval all stay.
    """
    if retain_interval is None:
        return []
    newest = sorted(existing)[-2:]
    return [
        iteration
        for iteration in existing
        if iteration % retain_interval and iteration not in newest and iteration != best
    ]


def delete(folder: Path, iterations: Sequence[int]) -> None:
    """Delete checkpoints; each loses its name first, so that none is ever seen half deleted."""
    for iteration in iterations:
        doomed = folder / f".iter_{iteration:07d}.partial"
        checkpoint_folder(folder, iteration).rename(doomed)
        shutil.rmtree(doomed)
