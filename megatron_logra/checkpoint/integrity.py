"""Checks that the files of a checkpoint are those that were written: one SHA-256 a file, in Megatron's own format.

    integrity.json   {"algorithm": "sha256", "files": {name: digest}}

The ranks share the work: each hashes what it wrote, and when loading every file is read by one rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

MANIFEST_FILE = "integrity.json"
_ALGORITHM = "sha256"


def hash_files(files: Iterable[Path]) -> dict[str, str]:
    """Digest of each file by its name."""
    digests = {}
    for file in files:
        with file.open("rb") as stream:
            digests[file.name] = hashlib.file_digest(stream, _ALGORITHM).hexdigest()
    return digests


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the list of what belongs to a checkpoint."""
    text = json.dumps({"algorithm": _ALGORITHM, "files": dict(sorted(digests.items()))}, indent=1)
    (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def verify_share(folder: Path, rank: int, size: int) -> None:
    """Check one of `size` shares of the files in `folder`, share `rank`; every share checks the list itself.

    Raises:
        ValueError: no list, or a file that is missing, cut off or changed; all such files are named.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        algorithm, expected = manifest["algorithm"], manifest["files"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {folder} is incomplete: {MANIFEST_FILE} cannot be read: {error!r}") from error
    if algorithm != _ALGORITHM:
        raise ValueError(f"{path} uses {algorithm!r}; only {_ALGORITHM} is known")
    problems = []
    for name in sorted(expected)[rank::size]:
        try:
            (found,) = hash_files([folder / name]).values()
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if found != expected[name]:
            problems.append(f"{name} is not what was written (its {_ALGORITHM} differs)")
    if problems:
        raise ValueError(f"checkpoint {folder} is damaged: {'; '.join(problems)}")
