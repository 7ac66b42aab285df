#!/usr/bin/env python
"""Draws the runs of `run.sh` and prints their final rewards: `python plot.py RUNS [--output PNG]`.

RUNS holds `step_{ratio}/{arm}/seed_{seed}/metrics.jsonl`. A column of panels for each step, rewards above and the
measured KL of an update below; a line is the mean over seeds, its band runs from the lowest to the highest seed. Curves
are means of the last few updates, the table is of what was recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_logra.loggers.jsonl import METRICS_FILE, read_rows


class Arm(NamedTuple):
    """How an arm is called and drawn; colours of Okabe and Ito, which differ in lightness too."""

    label: str
    color: str
    line: str


ARMS = {
    "controlled": Arm("LoGRA, KL control", "#0072B2", "-"),
    "uncontrolled": Arm("LoGRA, no control", "#E69F00", "--"),
    "adam": Arm("dense Adam", "#000000", ":"),
}
FINAL_UPDATES = 10
SMOOTHED_UPDATES = 5
REWARD, KL, BUDGET = "train/reward", "logra/actual_kl", "logra/effective_budget"
SMALLEST_KL = 1e-6
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 2,
    "legend.frameon": False,
}

Curves = dict[str, np.ndarray]
"""By metric, `[seeds, updates]`; NaN where a run recorded nothing."""


def load_arm(folder: Path) -> Curves:
    """Read the runs of all seeds of an arm. Raises `ValueError` for runs of different lengths."""
    paths = sorted(folder.glob(f"seed_*/{METRICS_FILE}"))
    runs = [[row for row in read_rows(path) if REWARD in row] for path in paths]
    lengths = {len(rows) for rows in runs}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"the runs in {folder} have {sorted(lengths)} updates: run them all to the same length")
    return {
        name: np.array([[np.nan if row.get(name) is None else row[name] for row in rows] for rows in runs], dtype=float)
        for name in (REWARD, KL, BUDGET)
    }


def load_runs(folder: Path) -> dict[float, dict[str, Curves]]:
    """Read all runs, by proposed step (the largest first) and arm. Raises `ValueError` when there are none."""
    steps = {float(path.name.removeprefix("step_")): path for path in folder.glob("step_*")}
    if not steps:
        raise ValueError(f"{folder} holds no runs: make them with examples/kl_stability/run.sh")
    return {
        step: {arm: load_arm(steps[step] / arm) for arm in ARMS if (steps[step] / arm).is_dir()}
        for step in sorted(steps, reverse=True)
    }


def format_table(runs: Mapping[float, Mapping[str, Curves]]) -> str:
    """Return a Markdown table: rewards of the last updates, over all seeds and of single ones, and KL at the start."""
    lines = [
        "| proposed step | arm | mean final reward | lowest and highest seed "
        f"| KL of the first {FINAL_UPDATES} updates |",
        "|---|---|---|---|---|",
    ]
    for step, arms in runs.items():
        for name, curves in arms.items():
            final_S = curves[REWARD][:, -FINAL_UPDATES:].mean(axis=1)
            kl = curves[KL][:, :FINAL_UPDATES].mean()
            lines.append(
                f"| {step:g} | {ARMS[name].label} | {final_S.mean():.3f} | {final_S.min():.3f} to {final_S.max():.3f} "
                f"| {kl:.1e} |"
            )
    return "\n".join(lines)


def smooth(values_SU: np.ndarray) -> np.ndarray:
    """Mean of each value and the few before it, `[seeds, updates]`."""
    starts = [max(0, stop - SMOOTHED_UPDATES) for stop in range(1, values_SU.shape[1] + 1)]
    return np.stack([values_SU[:, start : stop + 1].mean(axis=1) for stop, start in enumerate(starts)], axis=1)


def draw_panel(axes: Axes, arms: Mapping[str, Curves], metric: str) -> None:
    """Draw one metric of all arms."""
    for name, curves in arms.items():
        values_SU = smooth(curves[metric])
        if metric == KL:
            values_SU = values_SU.clip(min=0.1 * SMALLEST_KL)  # no update at all: off the lower edge
        updates = np.arange(1, values_SU.shape[1] + 1)
        arm = ARMS[name]
        axes.fill_between(
            updates, values_SU.min(axis=0), values_SU.max(axis=0), color=arm.color, alpha=0.2, linewidth=0
        )
        axes.plot(updates, values_SU.mean(axis=0), arm.line, color=arm.color, label=arm.label)
    if metric == KL and "controlled" in arms:
        budget_U = arms["controlled"][BUDGET].mean(axis=0)
        axes.plot(np.arange(1, len(budget_U) + 1), budget_U, color="#888888", linewidth=1, label="KL budget")


def build_figure(runs: Mapping[float, Mapping[str, Curves]]) -> Figure:
    """Return the picture: a column for each step."""
    with plt.rc_context(cast(Any, STYLE)):
        figure, grid = plt.subplots(
            2, len(runs), figsize=(1.5 + 4.6 * len(runs), 6.6), dpi=90, sharex=True, sharey="row", squeeze=False
        )
        for (step, arms), (above, below) in zip(runs.items(), grid.T, strict=True):
            num_seeds = len(next(iter(arms.values()))[REWARD])
            draw_panel(above, arms, REWARD)
            draw_panel(below, arms, KL)
            above.set_title(f"proposed step {step:g} |W|", fontsize=12)
            above.set_ylim(-0.02, 1.02)
            below.set_yscale("log")
            below.set_ylim(bottom=SMALLEST_KL)
            below.set_xlabel("update")
        grid[0, 0].set_ylabel("mean reward (share correct)")
        grid[1, 0].set_ylabel("measured KL of an update\n(nats per token)")
        handles, labels = grid[1, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(handles), bbox_to_anchor=(0.5, 1.0))
        figure.text(
            0.99,
            0.005,
            f"mean of {num_seeds} seeds, band from the lowest to the highest; "
            f"each point is the mean of {SMOOTHED_UPDATES} updates",
            ha="right",
            fontsize=9,
            color="#555555",
        )
        figure.tight_layout(rect=(0, 0.03, 1, 0.94))
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw the stability experiment and print its final rewards.")
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder that run.sh wrote")
    parser.add_argument("--output", type=Path, metavar="PNG", help="picture (default: RUNS/kl_stability.png)")
    options = parser.parse_args(argv)
    output = options.output or options.runs / "kl_stability.png"
    try:
        runs = load_runs(options.runs)
        figure = build_figure(runs)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, format="png", pil_kwargs={"optimize": True})
    except (OSError, ValueError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 1
    plt.close(figure)
    print(f"\n{format_table(runs)}\n\n{output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
