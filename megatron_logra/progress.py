"""Owns the progress line of long work (generation, training), which a person watches and a log file must survive.

On a terminal one line is redrawn in place and erased at the end, so that table rows stay the only lasting output:

    step 12  generate  [##########..........]  32/64 responses  1.2k tokens/s  8 s, 8 s left

Anywhere else (a file, a pipe, TERM=dumb) a plain line is written now and then, and nothing for short work.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_BAR_CELLS = 20
_MIN_BAR_CELLS = 8
_CLEAR_LINE = "\r\x1b[2K"


class Progress:
    """A progress line for `total` units of work, as a context manager.

    `update(done)` sets, `advance(n)` adds; `note` is free text such as a rate. Calling them is cheap: the line is
    redrawn at most every `redraw_interval_s` on a terminal, and written at most every `plain_interval_s` elsewhere.
    With `enabled=False` (all ranks but one) nothing is ever written.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        unit: str = "",
        enabled: bool = True,
        stream: TextIO | None = None,
        redraw_interval_s: float = 0.1,
        plain_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self.note = ""
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled
        self._in_place = is_terminal(self._stream)
        self._interval_s = redraw_interval_s if self._in_place else plain_interval_s
        self._clock = clock
        self._start_s = clock()
        # The first plain line waits a whole interval; the first drawn line appears at once.
        self._written_s = -float("inf") if self._in_place else self._start_s
        self._has_written = False

    def __enter__(self) -> Self:
        self._write_if_due()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, done: int, total: int | None = None, note: str | None = None) -> None:
        """Set the amount of work that is done (and, where it has become known, the total)."""
        self.done = done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        self._write_if_due()

    def advance(self, count: int = 1, note: str | None = None) -> None:
        """Add `count` to the work that is done."""
        self.update(self.done + count, note=note)

    def close(self) -> None:
        """Erase the line on a terminal; elsewhere write the last state if the work was long enough to be shown."""
        if self._has_written and self._in_place:
            self._emit(_CLEAR_LINE)
        elif self._has_written:
            self._emit(self.render() + "\n")
        self._has_written = False

    def render(self, columns: int | None = None) -> str:
        """Return the line as it stands; with `columns` it has a bar where one fits, and is cut to that width."""
        elapsed_s = self._clock() - self._start_s
        fraction = min(self.done / self.total, 1.0) if self.total > 0 else 0.0
        amount = f"{self.done}/{self.total}" if self.total > 0 else str(self.done)
        time_left = ""
        if 0.0 < fraction < 1.0:
            time_left = f", {format_duration(elapsed_s * (1.0 - fraction) / fraction)} left"
        parts = [f"{amount} {self.unit}".strip(), self.note, f"{format_duration(elapsed_s)}{time_left}"]
        line = "  ".join(part for part in [self.label, *parts] if part)
        if columns is None:
            return line
        num_cells = min(_BAR_CELLS, columns - len(line) - len("[]  "))
        if self.total > 0 and num_cells >= _MIN_BAR_CELLS:
            line = "  ".join(part for part in [self.label, _bar(fraction, num_cells), *parts] if part)
        return line[:columns]

    def _write_if_due(self) -> None:
        now_s = self._clock()
        if not self._enabled or now_s - self._written_s < self._interval_s:
            return
        self._written_s = now_s
        self._has_written = True
        if self._in_place:
            self._emit(_CLEAR_LINE + self.render(shutil.get_terminal_size().columns - 1))
        else:
            self._emit(self.render() + "\n")

    def _emit(self, text: str) -> None:
        # A closed pipe or terminal must not end a run.
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._enabled = False


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can redraw a line."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False


def format_duration(seconds: float) -> str:
    """Return `8 s`, `3 min 05 s` or `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_count(value: float) -> str:
    """Return three significant digits with a unit prefix: `9.87`, `512`, `12.3k`, `4.56M`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return _significant(value / scale) + suffix
    return _significant(value)


def _significant(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


def _bar(fraction: float, num_cells: int) -> str:
    filled = int(fraction * num_cells)
    return "[" + "#" * filled + "." * (num_cells - filled) + "]"
