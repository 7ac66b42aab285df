#!/usr/bin/env python
"""Draws a run's `metrics.jsonl` as one picture: `python tools/plot_run.py RUN_DIR [--output PNG]`.

Six panels over the training step: reward and held-out accuracy with its 95 % interval; KL predicted, measured and
allowed; alpha; response length; time per phase; throughput. A run that is still going on, or was killed in the middle
of a line, is drawn as far as it got; what a run did not record is said in its panel.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from megatron_logra.loggers.jsonl import METRICS_FILE, read_rows
from megatron_logra.progress import format_count, format_duration

# Okabe and Ito's palette: told apart by people with any common colour blindness, and in grey by its lightness.
BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
# Phases within timing_s/step, and those that come between steps.
PHASES = (
    ("gen", "generate", BLUE),
    ("reward", "reward", PURPLE),
    ("old_log_prob", "log-probs", GREEN),
    ("update_actor", "train", ORANGE),
    ("kl_probe", "KL probe", VERMILION),
    ("update_weights", "sync", SKY),
)
PHASES_BETWEEN = (("eval", "evaluate", YELLOW), ("save", "save", BLACK))
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 26,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
LEGEND_COLUMNS = 6
MAX_MARKERS = 40
SMOOTHING_FROM_STEPS = 60
MANY_STEPS = 150
VISIBLE_SHARE = 0.005

Rows = Sequence[Mapping[str, Any]]
Series = tuple[list[int], list[float]]


def load_run(run_dir: Path) -> list[dict[str, Any]]:
    """Return one row a step, in order; raises `ValueError` where there is nothing to draw."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the directory of a run, the one that holds {METRICS_FILE}")
    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        steps.setdefault(row["step"], {}).update(row)
    if not steps:
        raise ValueError(f"{path} holds no complete row yet")
    return [steps[step] for step in sorted(steps)]


def series(rows: Rows, name: str) -> Series:
    """Return the steps at which `name` was recorded, with its values; a null becomes NaN, a gap in the line."""
    present = [row for row in rows if name in row]
    return [row["step"] for row in present], [math.nan if row[name] is None else float(row[name]) for row in present]


def draw_line(axes: Axes, rows: Rows, name: str, label: str, color: str, **style: Any) -> bool:
    """Draw one metric as a line, with markers while there are few points; return whether there was anything."""
    steps, values = series(rows, name)
    if not any(map(math.isfinite, values)):
        return False
    style.setdefault("marker", "o" if len(steps) <= MAX_MARKERS else None)
    style.setdefault("linewidth", 1.8 if len(steps) <= MANY_STEPS else 1.0)
    axes.plot(steps, values, label=label, color=color, **style)
    return True


def draw_reward(axes: Axes, rows: Rows) -> bool:
    """Draw the training reward, smoothed where there are many steps, and held-out accuracy with its interval."""
    axes.set_title("Reward and held-out accuracy")
    steps, values = series(rows, "train/reward")
    if len(steps) >= SMOOTHING_FROM_STEPS:
        draw_line(axes, rows, "train/reward", "reward, each step", SKY, linewidth=0.8, alpha=0.7)
        window = max(5, len(steps) // 20)
        axes.plot(steps, moving_mean(values, window), color=BLUE, label=f"mean of {window} steps")
        drawn = True
    else:
        drawn = draw_line(axes, rows, "train/reward", "train reward", BLUE)
    evaluated = [row for row in rows if row.get("val/accuracy") is not None]
    if evaluated:
        accuracy = [row["val/accuracy"] for row in evaluated]
        below = [value - row.get("val/accuracy_low", value) for value, row in zip(accuracy, evaluated, strict=True)]
        above = [row.get("val/accuracy_high", value) - value for value, row in zip(accuracy, evaluated, strict=True)]
        axes.errorbar(
            [row["step"] for row in evaluated],
            accuracy,
            yerr=[below, above],
            color=VERMILION,
            marker="s",
            markersize=5,
            capsize=3.5,
            linewidth=1.4,
            label="held-out accuracy, 95 % interval",
        )
    axes.set_ylabel("mean reward, share correct")
    return drawn or bool(evaluated)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the finite values among the last `window` ones, at every place."""
    means = []
    for stop in range(1, len(values) + 1):
        finite = [value for value in values[max(0, stop - window) : stop] if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means


def draw_kl(axes: Axes, rows: Rows) -> bool:
    """Draw the predicted KL of the proposed and of the scaled update, the measured KL and the budget, on a log axis."""
    axes.set_title("KL of one update")
    scaled = [row | {"scaled": scaled_kl(row)} for row in map(dict, rows) if scaled_kl(row) is not None]
    # The controller aims at the budget exactly, so the budget is a broad band behind the line that should lie on it.
    band: dict[str, Any] = {
        "linewidth": 7,
        "marker": "s" if len(rows) == 1 else None,
        "solid_capstyle": "butt",
    }
    points: dict[str, Any] = {
        "linestyle": "none",
        "marker": "D",
        "markersize": 4 if len(rows) <= MANY_STEPS else 2.5,
    }
    shown = [
        draw_line(axes, rows, "logra/effective_budget", "budget", "#c8c8c8", **band),
        draw_line(axes, rows, "logra/predicted_kl", "predicted at alpha 1", SKY, linewidth=1.1, marker=None),
        draw_line(axes, scaled, "scaled", "predicted as applied", BLUE),
        draw_line(axes, rows, "logra/actual_kl", "measured", VERMILION, **points),
    ]
    positive = [value for line in axes.get_lines() for value in np.asarray(line.get_ydata(), dtype=float) if value > 0]
    if positive:
        axes.set_yscale("log")
        decades = math.log10(max(positive) / min(positive))
        # Room for at least one label of each of 1, 2 and 5 where the values span little.
        margin = 10 ** max(0.06 * decades, 0.5 - decades / 2)
        axes.set_ylim(min(positive) / margin, max(positive) * margin)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_power(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("nats a token")
    return any(shown)


def format_power(value: float) -> str:
    """Return `2e-4`."""
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def scaled_kl(row: Mapping[str, Any]) -> float | None:
    """Return the predicted KL of the update as it was applied: alpha squared times that of the proposed update."""
    if "logra/scaled_predicted_kl" in row:
        return row["logra/scaled_predicted_kl"]
    predicted, alpha = row.get("logra/predicted_kl"), row.get("logra/alpha")
    return None if predicted is None or alpha is None else alpha * alpha * predicted


def from_zero(axes: Axes) -> None:
    """Let the vertical axis run from zero to a little above the data."""
    highest = axes.dataLim.y1
    axes.set_ylim(0, 1.06 * highest if math.isfinite(highest) and highest > 0 else 1.0)


def draw_alpha(axes: Axes, rows: Rows) -> bool:
    """Draw the factor that scales the proposed update."""
    axes.set_title("Step scale alpha")
    drawn = draw_line(axes, rows, "logra/alpha", "applied update / proposed update", BLUE)
    if drawn:
        axes.axhline(1.0, color=GREY, linewidth=1.2, linestyle=":")
    from_zero(axes)
    axes.set_ylabel("factor")
    return drawn


def draw_length(axes: Axes, rows: Rows) -> bool:
    """Draw mean and longest response, and on the right axis the share that the token limit cut off."""
    axes.set_title("Response length")
    drawn = draw_line(axes, rows, "response_length/mean", "mean", BLUE)
    draw_line(axes, rows, "response_length/max", "longest", SKY, linewidth=1.2, marker=None)
    from_zero(axes)
    axes.set_ylabel("tokens")
    steps, shares = series(rows, "response_length/clip_ratio")
    if steps:
        right = axes.twinx()
        right.fill_between(
            steps,
            shares,
            color=ORANGE,
            alpha=0.35,
            linewidth=0,
            label="cut off by the token limit (right axis)",
        )
        right.set_ylim(0, 1)
        right.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        right.set_ylabel("share of responses")
        right.grid(visible=False)
        right.spines["right"].set_visible(True)
        # The lines belong in front of the shaded share.
        axes.set_zorder(right.get_zorder() + 1)
        axes.patch.set_visible(False)
    return drawn


def phase_seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase of a step, each second counted once, with `other` for what no phase holds."""
    seconds = {key: float(row.get(f"timing_s/{key}") or 0.0) for key, _, _ in (*PHASES, *PHASES_BETWEEN)}
    # The probe is run in the middle of an update, and timed within it.
    seconds["update_actor"] = max(0.0, seconds["update_actor"] - seconds["kl_probe"])
    known_s = math.fsum(seconds[key] for key, _, _ in PHASES)
    return seconds | {"other": max(0.0, float(row.get("timing_s/step") or 0.0) - known_s)}


def draw_time(axes: Axes, rows: Rows) -> bool:
    """Stack the seconds of every phase; what `timing_s/step` has beyond them is drawn as other."""
    axes.set_title("Time a step")
    by_step = {row["step"]: phase_seconds(row) for row in rows if any(phase_seconds(row).values())}
    if not by_step:
        return False
    steps = list(by_step)
    total_s = math.fsum(value for seconds in by_step.values() for value in seconds.values())
    layers = [
        (label, color, column)
        for key, label, color in (*PHASES, ("other", "other", "#cccccc"), *PHASES_BETWEEN)
        # A phase that nobody could see does not deserve a place in the legend.
        if math.fsum(column := [seconds[key] for seconds in by_step.values()]) > VISIBLE_SHARE * total_s
    ]
    bottom = [0.0] * len(steps)
    for label, color, seconds in layers:
        top = [low + value for low, value in zip(bottom, seconds, strict=True)]
        if len(steps) <= MAX_MARKERS:
            axes.bar(steps, seconds, bottom=bottom, width=0.85, color=color, label=label)
        else:
            axes.fill_between(steps, bottom, top, step="mid", color=color, linewidth=0, label=label)
        bottom = top
    from_zero(axes)
    axes.set_ylabel("seconds")
    return True


def draw_throughput(axes: Axes, rows: Rows) -> bool:
    """Draw prompt and response tokens a second and rank."""
    axes.set_title("Throughput")
    drawn = draw_line(axes, rows, "perf/throughput", "prompt and response tokens", BLUE)
    from_zero(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axes.set_ylabel("tokens a second and rank")
    return drawn


def format_tick(value: float) -> str:
    """Return a tick label without trailing zeros: `0`, `250`, `1.5k`."""
    text = format_count(value)
    digits, suffix = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + suffix


PANELS: tuple[Callable[[Axes, Rows], bool], ...] = (
    draw_reward,
    draw_kl,
    draw_alpha,
    draw_length,
    draw_time,
    draw_throughput,
)


def finish_panel(axes: Axes, drawn: bool, first_step: int, last_step: int) -> None:
    """Give a panel its common step axis, and a legend between title and frame where nothing can be hidden by it."""
    axes.set_xlabel("step")
    margin = max(0.6, 0.015 * (last_step - first_step)) if last_step > first_step else 2.0
    axes.set_xlim(first_step - margin, last_step + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    if not drawn:
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#777777")
        return
    found = [other.get_legend_handles_labels() for other in axes.figure.axes if other.bbox.bounds == axes.bbox.bounds]
    handles = [handle for some, _ in found for handle in some]
    labels = [label for _, some in found for label in some]
    num_columns = min(len(handles), LEGEND_COLUMNS)
    if len(handles) > num_columns:
        axes.set_title(axes.get_title(loc="left"), pad=STYLE["axes.titlepad"] + 15)
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            borderaxespad=0.1,
            borderpad=0.2,
            ncols=num_columns,
            columnspacing=1.1,
            handlelength=1.3,
            handletextpad=0.4,
        )


def summarize(rows: Rows) -> str:
    """Return the line below the picture's title: steps, duration, first and last held-out accuracy."""
    num_steps = sum(row["step"] > 0 for row in rows)
    parts = [f"{num_steps} step" + "s" * (num_steps != 1)]
    if "wall_time_s" in rows[0] and "wall_time_s" in rows[-1] and len(rows) > 1:
        parts.append(format_duration(rows[-1]["wall_time_s"] - rows[0]["wall_time_s"]))
    evaluated = [row for row in rows if row.get("val/accuracy") is not None]
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        change = "" if first is last else f"{100 * first['val/accuracy']:.1f} % at step {first['step']}, "
        parts.append(f"held-out accuracy {change}{100 * last['val/accuracy']:.1f} % at step {last['step']}")
    return "  |  ".join(parts)


def build_figure(rows: Rows, title: str) -> Figure:
    """Return the picture of a run."""
    with plt.rc_context(cast(Any, STYLE)):
        figure, grid = plt.subplots(3, 2, figsize=(13, 13.5), dpi=130)
        for axes, draw in zip(grid.flat, PANELS, strict=True):
            finish_panel(axes, draw(axes, rows), rows[0]["step"], rows[-1]["step"])
        figure.text(0.07, 0.978, title, fontsize=17, fontweight="bold", va="center", parse_math=False)
        figure.text(0.07, 0.957, summarize(rows), fontsize=11, color="#444444", va="center")
        figure.subplots_adjust(left=0.07, right=0.94, top=0.895, bottom=0.045, hspace=0.42, wspace=0.2)
        figure.align_ylabels()
    return figure


def plot_run(run_dir: Path, output: Path) -> None:
    """Draw the run in `run_dir` to the PNG `output`."""
    figure = build_figure(load_run(run_dir), run_dir.resolve().name)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png")
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw a run's metrics.jsonl as one PNG.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory that holds metrics.jsonl")
    parser.add_argument("--output", type=Path, metavar="PNG", help="picture to write (default: RUN_DIR/metrics.png)")
    options = parser.parse_args(argv)
    output = options.output or options.run_dir / "metrics.png"
    try:
        plot_run(options.run_dir, output)
    except (OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
