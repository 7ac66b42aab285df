"""Owns the table that a person watches: one aligned row a step on standard output, at most 79 columns wide.

     step  reward   accuracy %  KL pred  alpha  length  gen s  train s  tok/s/rank
        0       -   8.0 (4-15)        -      -       -      -        -           -
        1   0.125            -  1.9e-04   1.02    11.2   6.10     8.20         102

accuracy %: greedy held-out accuracy with its 95 % interval; KL pred: predicted KL of the whole proposed update, in nats
a token, before it is scaled by alpha; length: mean response length in tokens; tok/s/rank: prompt and response tokens a
second and rank. A value that a step does not have, or that is not finite, is a dash.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from megatron_logra.loggers.base import SampleRecord
from megatron_logra.progress import format_count, is_terminal

_ROWS_PER_HEADER = 25
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_TEXT_WIDTH = 100


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    metric: str
    form: Callable[[float], str]


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


_COLUMNS = (
    _Column("reward", 6, "train/reward", _fixed(3)),
    _Column("accuracy %", 12, "val/accuracy", _fixed(1)),
    _Column("KL pred", 7, "logra/predicted_kl", lambda value: f"{value:.1e}"),
    _Column("alpha", 5, "logra/alpha", format_count),
    _Column("length", 6, "response_length/mean", format_count),
    _Column("gen s", 5, "timing_s/gen", format_count),
    _Column("train s", 7, "timing_s/update_actor", format_count),
    _Column("tok/s/rank", 10, "perf/throughput", format_count),
)
_STEP_WIDTH = 5


class ConsoleLogger:
    """Prints a row for every `log_interval`-th step, the last step and every step with held-out accuracy.

    The header is repeated every 25 rows. Bold type is used on a terminal only, and never with `NO_COLOR` set.
    """

    def __init__(self, *, log_interval: int = 1, last_step: int | None = None, stream: TextIO | None = None) -> None:
        self._log_interval = log_interval
        self._last_step = last_step
        self._stream = sys.stdout if stream is None else stream
        self._bold = is_terminal(self._stream) and not os.environ.get("NO_COLOR")
        self._num_rows = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the row of a step."""
        if step % self._log_interval and step != self._last_step and "val/accuracy" not in metrics:
            return
        if self._num_rows % _ROWS_PER_HEADER == 0:
            header = render_header()
            self._print(f"{_BOLD}{header}{_PLAIN}" if self._bold else header)
        self._num_rows += 1
        self._print(render_row(step, metrics))

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Print each response below the row, on one line, cut to a readable length."""
        for sample in samples:
            prompt, response = (
                _one_line(sample.prompt, _TEXT_WIDTH // 2),
                _one_line(sample.response, _TEXT_WIDTH),
            )
            answer = f"  (answer {_one_line(sample.answer, 20)})" if sample.answer else ""
            self._print(f"        reward {sample.reward:g}: {prompt} >>> {response}{answer}")

    def close(self) -> None:
        """Nothing to release: the stream is not ours."""

    def _print(self, line: str) -> None:
        # A closed pipe or terminal must not end a run.
        try:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(line.encode(encoding, errors="backslashreplace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._print = lambda line: None  # type: ignore[method-assign]


def render_header() -> str:
    """Return the titles of the table, aligned with the rows."""
    return "  ".join(["step".rjust(_STEP_WIDTH)] + [column.title.rjust(column.width) for column in _COLUMNS])


def render_row(step: int, metrics: Mapping[str, float]) -> str:
    """Return the table row of one step."""
    cells = [str(step).rjust(_STEP_WIDTH)]
    for column in _COLUMNS:
        value = metrics.get(column.metric, math.nan)
        text = column.form(value) if math.isfinite(value) else "-"
        if column.metric == "val/accuracy" and math.isfinite(value):
            text = _accuracy(metrics)
        cells.append(text.rjust(column.width))
    return "  ".join(cells)


def _accuracy(metrics: Mapping[str, float]) -> str:
    percent = 100 * metrics["val/accuracy"]
    text = "100" if percent == 100 else f"{percent:.1f}"
    if "val/accuracy_low" not in metrics or "val/accuracy_high" not in metrics:
        return text
    low, high = 100 * metrics["val/accuracy_low"], 100 * metrics["val/accuracy_high"]
    return f"{text} ({low:.0f}-{high:.0f})"


def _one_line(text: str, width: int) -> str:
    line = text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= width else line[: width - 3] + "..."
