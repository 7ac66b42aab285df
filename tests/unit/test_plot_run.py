"""Tests of tools/plot_run.py: what is drawn, that it is legible, and that unfinished runs are drawn too."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from megatron_logra.metrics import compute_accuracy_metrics

SCRIPT = Path(__file__).parents[2] / "tools" / "plot_run.py"
PHASES = ("gen", "reward", "old_log_prob", "update_actor", "kl_probe", "update_weights", "eval", "save")


@pytest.fixture(scope="module")
def plot_run() -> Iterator[ModuleType]:
    """Load the script as a module."""
    spec = importlib.util.spec_from_file_location("plot_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plot_run"] = module
    spec.loader.exec_module(module)
    yield module
    module.plt.close("all")
    del sys.modules["plot_run"]


def make_rows(num_steps: int, *, phases: tuple[str, ...] = PHASES) -> list[dict[str, Any]]:
    """Return the rows of a plausible run in which every metric is recorded."""
    rows: list[dict[str, Any]] = [{"step": 0, "wall_time_s": 1000.0, **compute_accuracy_metrics(8, 100)}]
    for step in range(1, num_steps + 1):
        wave = 1 + 0.5 * math.sin(step)
        row: dict[str, Any] = {
            "step": step,
            "wall_time_s": 1000.0 + 60 * step,
            "train/reward": 0.4 * wave,
            "logra/predicted_kl": 2e-4 * wave**4,
            "logra/alpha": wave**-2,
            "logra/effective_budget": 2e-4,
            "logra/actual_kl": 2.1e-4,
            "response_length/mean": 1500 * wave,
            "response_length/max": 4096.0,
            "response_length/clip_ratio": 0.1 * wave,
            "perf/throughput": 12_000 * wave,
        }
        row |= {f"timing_s/{phase}": 10.0 for phase in phases}
        # The update holds the probe; evaluation and saving happen between steps; 7 s belong to no phase.
        row |= {"timing_s/update_actor": 25.0, "timing_s/step": 72.0}
        row |= compute_accuracy_metrics(57, 100) if step == num_steps else {}
        rows.append(row)
    return rows


def panel(figure: Figure, title: str) -> Axes:
    """Return the axes under a title."""
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def line(axes: Axes, label: str) -> list[tuple[float, float]]:
    """Return the points of a labelled line."""
    found = next(line for line in axes.get_lines() if line.get_label() == label)
    return [(float(x), float(y)) for x, y in zip(found.get_xdata(), found.get_ydata(), strict=True)]  # type: ignore[arg-type]


def text_boxes(figure: Figure) -> dict[str, Bbox]:
    """Return where every title, legend, axis label and column of tick labels ends up, in pixels."""
    figure.draw_without_rendering()
    boxes: dict[str, Bbox] = {text.get_text(): text.get_window_extent() for text in figure.texts}
    for number, axes in enumerate(figure.axes):
        legend = axes.get_legend()
        parts: dict[str, Any] = {"title": axes.title if axes.title.get_text() else axes._left_title}  # type: ignore[attr-defined]
        parts |= {"xlabel": axes.xaxis.label, "ylabel": axes.yaxis.label}
        parts |= {"legend": legend} if legend else {}
        parts |= {f"tick {label.get_text()} {index}": label for index, label in enumerate(axes.get_yticklabels())}
        for name, part in parts.items():
            box = part.get_window_extent()
            inside = not name.startswith("tick") or axes.bbox.y0 - 1 <= (box.y0 + box.y1) / 2 <= axes.bbox.y1 + 1
            if inside and box.width * box.height > 1:
                boxes[f"{number} {name}"] = box
    return boxes


@pytest.mark.parametrize("num_steps", [1, 25, 300])
def test_nothing_overlaps_or_leaves_the_picture(plot_run: ModuleType, num_steps: int) -> None:
    figure = plot_run.build_figure(make_rows(num_steps), "a_run_with_$_in_its_name")
    boxes = text_boxes(figure)
    assert sum(name.endswith("legend") for name in boxes) == 6
    width, height = figure.canvas.get_width_height()  # type: ignore[attr-defined]
    for name, box in boxes.items():
        assert box.x0 >= 0, name
        assert box.x1 <= width, name
        assert box.y0 >= 0, name
        assert box.y1 <= height, name
    for (first, first_box), (second, second_box) in combinations(boxes.items(), 2):
        assert not first_box.overlaps(second_box), (first, second)


def test_the_drawn_numbers_are_the_recorded_ones(plot_run: ModuleType) -> None:
    rows = make_rows(4)
    rows[2]["train/reward"] = None
    figure = plot_run.build_figure(rows, "run")
    reward = line(panel(figure, "Reward and held-out accuracy"), "train reward")
    assert [x for x, _ in reward] == [1, 2, 3, 4]
    assert [y for _, y in reward] == pytest.approx([row["train/reward"] or math.nan for row in rows[1:]], nan_ok=True)
    kl = panel(figure, "KL of one update")
    assert kl.get_yscale() == "log"
    # alpha is the inverse square of what the prediction is the fourth power of: alpha^2 * prediction is the budget.
    assert [y for _, y in line(kl, "predicted as applied")] == pytest.approx([2e-4] * 4, rel=1e-12)
    assert line(kl, "measured") == [(step, 2.1e-4) for step in (1, 2, 3, 4)]

    accuracy = panel(figure, "Reward and held-out accuracy").containers[0]
    segments = accuracy.lines[2][0].get_segments()  # type: ignore[attr-defined]
    drawn = [[float(point[1]) for point in segment] for segment in segments]
    expected = [[row["val/accuracy_low"], row["val/accuracy_high"]] for row in (rows[0], rows[4])]
    assert [pytest.approx(ends) for ends in drawn] == expected

    # Every second once: the update without its probe, and what no phase accounts for.
    patches: list[Any] = list(panel(figure, "Time a step").patches)
    bars = [patch for patch in patches if abs(patch.get_x() + patch.get_width() / 2 - 1) < 0.01]
    assert sorted(bar.get_height() for bar in bars) == pytest.approx([7.0] + [10.0] * 7 + [15.0])
    assert max(bar.get_y() + bar.get_height() for bar in bars) == pytest.approx(72.0 + 20.0)


def test_what_was_not_recorded_is_said(plot_run: ModuleType) -> None:
    figure = plot_run.build_figure([{"step": 1, "loss": 1.0}], "run")
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert said == ["not recorded"] * 6


def test_a_killed_run_is_drawn(plot_run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(3, phases=("gen", "update_actor"))
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "train/rew'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [row["step"] for row in plot_run.load_run(tmp_path)] == [0, 1, 2, 3]
    assert plot_run.summarize(plot_run.load_run(tmp_path)) == (
        "3 steps  |  3 min 00 s  |  held-out accuracy 8.0 % at step 0, 57.0 % at step 3"
    )
    output = tmp_path / "pictures" / "run.png"
    assert plot_run.main([str(tmp_path), "--output", str(output)]) == 0
    assert output.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert capsys.readouterr().out.strip() == str(output)


def test_a_run_without_metrics_is_an_error(
    plot_run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot_run.main([str(tmp_path)]) == 1
    assert "metrics.jsonl does not exist: give the directory of a run" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    assert plot_run.main([str(tmp_path)]) == 1
    assert "no complete row yet" in capsys.readouterr().err
    assert not (tmp_path / "metrics.png").exists()


def test_axis_labels_are_short(plot_run: ModuleType) -> None:
    assert [plot_run.format_tick(value) for value in (0, 2.5, 150, 1500, 20_000)] == [
        "0",
        "2.5",
        "150",
        "1.5k",
        "20k",
    ]
    assert [plot_run.format_power(value) for value in (2e-4, 1e-10, 5e3)] == ["2e-4", "1e-10", "5e3"]


def test_moving_mean_skips_gaps(plot_run: ModuleType) -> None:
    values = [1.0, math.nan, 3.0, 5.0]
    assert plot_run.moving_mean(values, 2) == pytest.approx([1.0, 1.0, 3.0, 4.0])
