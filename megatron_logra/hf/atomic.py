"""Puts a finished folder in the place of another so that a reader finds the old one or the new one, whole.

Where the system can exchange two names in one step (Linux `renameat2`), that is used. Elsewhere the old
folder is moved aside first; an interruption between the two moves is repaired by `restore_interrupted` before
the next write.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def replace_folder(new: Path, target: Path) -> None:
    """Move folder `new` to `target` (same file system), replacing what is there; the old folder is deleted."""
    if not target.exists():
        new.rename(target)
    elif _exchange_names(new, target):
        shutil.rmtree(new)
    else:
        backup = _backup_of(target)
        target.rename(backup)
        new.rename(target)
        shutil.rmtree(backup)
    sync_folder(target.parent)


def restore_interrupted(target: Path) -> None:
    """Undo a replacement that stopped between its two moves: bring the old folder back, or delete its rest."""
    backup = _backup_of(target)
    if not backup.exists():
        return
    if target.exists():
        shutil.rmtree(backup)
    else:
        backup.rename(target)


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries (names) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _backup_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _exchange_names(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the C library or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result: int = renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    return result == 0
