"""Owns `metrics.jsonl` and `samples.jsonl`: one strict JSON object a line, and their state when a run is resumed.

    {"step": 12, "wall_time_s": 1764568800.123, "train/reward": 0.4375, "logra/alpha": 1.08, ...}

`wall_time_s` is Unix time. A non-finite value is written as null, since JSON has no NaN, and warned about.
Metrics logged for the last step once more (a final evaluation) join its row. Opening after a resume from step k drops
the rows of later steps, which the resumed run makes again, and a last line that was half written when the run died.
Opening for a new run moves older files aside.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_logra.loggers.base import SampleRecord

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlLogger:
    """Writes `metrics.jsonl` and, once there are samples, `samples.jsonl` in `run_dir`.

    `resume_step` is the step of the checkpoint that was loaded, None for a new run. Raises `OSError` where the
    directory cannot be written to; a later failure (a full disk) is only warned about.
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._samples_path = run_dir / SAMPLES_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        self._last_row: dict[str, Any] = {"step": -1}
        path = run_dir / METRICS_FILE
        if resume_step is None:
            _move_aside(path)
            _move_aside(self._samples_path)
        else:
            rows = drop_rows_after(path, resume_step)
            drop_rows_after(self._samples_path, resume_step)
            self._last_row = rows[-1] if rows else {"step": resume_step}
        self._file = open(path, "ab")  # noqa: SIM115
        self._last_offset = self._file.tell() - (
            len(_to_line(self._last_row)) if "wall_time_s" in self._last_row else 0
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row and flush it. Raises `ValueError` for a step before the last one."""
        if step < self._last_row["step"]:
            raise ValueError(f"step {step} cannot be logged after step {self._last_row['step']}: log steps in order")
        values = {name: float(value) for name, value in metrics.items()}
        not_finite = sorted(name for name, value in values.items() if not math.isfinite(value))
        if not_finite:
            shown = ", ".join(f"{name} = {values[name]}" for name in not_finite)
            _log.warning("step %d: not finite, written as null: %s", step, shown)
        row: dict[str, Any] = {"step": step, "wall_time_s": round(self._clock(), 3)}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            if step == self._last_row["step"]:
                row = self._last_row | row
                self._file.truncate(self._last_offset)
            else:
                self._last_offset = self._file.seek(0, os.SEEK_END)
            self._last_row = row
            self._file.write(_to_line(row))
            self._file.flush()
        except OSError as error:
            _log.warning("step %d could not be written to %s: %s", step, self._file.name, error)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Write one row a response."""
        lines = []
        for sample in samples:
            reward = sample.reward if math.isfinite(sample.reward) else None
            texts = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer}
            lines.append(_to_line({"step": step, "reward": reward, **texts}))
        try:
            with open(self._samples_path, "ab") as file:
                file.write(b"".join(lines))
        except OSError as error:
            _log.warning("samples of step %d could not be written to %s: %s", step, self._samples_path, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `metrics.jsonl`, leaving out lines that are no JSON object with a step.

    A last line without its end is what a killed run leaves behind and is left out silently; any other is warned about.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
        elif line.strip() and number < len(lines):
            _log.warning("%s, line %d: not a JSON object with an integer step, left out", path, number)


def drop_rows_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Rewrite a file of rows, atomically, without those of steps after `step`; return the rows that stay."""
    if not path.exists():
        return []
    rows = [row for row in read_rows(path) if row["step"] <= step]
    kept = b"".join(_to_line(row) for row in rows)
    if kept != path.read_bytes():
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(kept)
        os.replace(temporary, path)
    return rows


def _to_line(row: Mapping[str, Any]) -> bytes:
    # Lone surrogates cannot be encoded; a reader shows them as question marks.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _move_aside(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(older)
    _log.warning("%s belongs to an older run and was moved to %s; continue a run with --load", path, older.name)
