"""Tests of megatron_logra.loggers and megatron_logra.progress: what reaches files, services and a person."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_logra.loggers.base import LoggerGroup, SampleRecord
from megatron_logra.loggers.build import build_loggers
from megatron_logra.loggers.console import ConsoleLogger, render_header, render_row
from megatron_logra.loggers.jsonl import JsonlLogger, read_rows
from megatron_logra.loggers.tensorboard import TensorBoardLogger
from megatron_logra.loggers.wandb_run import WandbLogger, choose_mode
from megatron_logra.metrics import compute_accuracy_metrics
from megatron_logra.progress import Progress, format_count, format_duration

SAMPLE = SampleRecord(prompt="What is 12 + 34?\nJust the number.", response="46", reward=1.0, answer="46")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def strict_rows(path: Path) -> list[dict[str, Any]]:
    """Parse every line as JSON proper, in which NaN does not exist."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_one_strict_json_object_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = JsonlLogger(tmp_path / "new" / "run", clock=lambda: 12.3456)
    logger.log(0, {"val/accuracy": 0.08})
    logger.log(1, {"train/reward": 0.5, "logra/predicted_kl": math.nan, "logra/alpha": math.inf})
    logger.log_samples(1, [SAMPLE])
    # The file is complete before it is closed: a killed run loses nothing.
    rows = strict_rows(tmp_path / "new" / "run" / "metrics.jsonl")
    assert rows == [
        {"step": 0, "wall_time_s": 12.346, "val/accuracy": 0.08},
        {
            "step": 1,
            "wall_time_s": 12.346,
            "train/reward": 0.5,
            "logra/predicted_kl": None,
            "logra/alpha": None,
        },
    ]
    assert "logra/alpha = inf, logra/predicted_kl = nan" in caplog.text
    assert strict_rows(tmp_path / "new" / "run" / "samples.jsonl")[0]["response"] == "46"
    with pytest.raises(ValueError, match="step 0 cannot be logged after step 1"):
        logger.log(0, {})
    logger.close()


def test_the_last_step_logged_again_joins_its_row(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    for step in (1, 2):
        logger.log(step, {"train/reward": step})
    logger.log(2, {"val/accuracy": 0.5})
    logger.log(3, {"train/reward": 3})
    logger.close()
    resumed = JsonlLogger(tmp_path, resume_step=2)
    resumed.log(2, {"val/accuracy_low": 0.25})
    resumed.log(3, {"train/reward": 4})
    resumed.close()
    rows = strict_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert (rows[1]["train/reward"], rows[1]["val/accuracy"], rows[1]["val/accuracy_low"]) == (2, 0.5, 0.25)
    assert rows[2]["train/reward"] == 4


def test_resuming_drops_later_steps_and_a_half_written_line(tmp_path: Path) -> None:
    whole = "".join(json.dumps({"step": step, "wall_time_s": 1.0, "train/reward": step}) + "\n" for step in range(6))
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 6, "train/rew')
    (tmp_path / "samples.jsonl").write_text('{"step": 2, "prompt": "a"}\n{"step": 5, "prompt": "b"}\n')
    logger = JsonlLogger(tmp_path, resume_step=3)
    logger.log(4, {"train/reward": 40.0})
    logger.close()
    rows = strict_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/reward"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert [row["step"] for row in strict_rows(tmp_path / "samples.jsonl")] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_new_run_keeps_an_older_file(tmp_path: Path) -> None:
    for reward in (1.0, 2.0, 3.0):
        logger = JsonlLogger(tmp_path)
        logger.log(1, {"train/reward": reward})
        logger.close()
    rewards = {path.name: strict_rows(path)[0]["train/reward"] for path in tmp_path.iterdir()}
    assert rewards == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 3.0}


def test_damaged_lines_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n[3]\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [2, 3]


def test_tensorboard_holds_the_scalars_and_hides_what_a_resume_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, values in ((None, {1: 0.25, 2: 0.5, 3: 0.75}), (1, {2: 0.625})):
        logger = TensorBoardLogger(tmp_path, resume_step=resume_step)
        for step, value in values.items():
            logger.log(step, {"train/reward": value})
        logger.log_samples(2, [SAMPLE])
        logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.625)]


@dataclass(frozen=True)
class Settings:
    log_interval: int = 1
    run_name: str = "run"
    wandb_project: str = ""
    wandb_exp_name: str = ""
    wandb_save_dir: str | None = None
    tensorboard_dir: str | None = None


def test_wandb_records_offline_and_continues_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []

    class Run:
        def __init__(self, run_id: str | None) -> None:
            self.id = run_id or "fresh"

        def define_metric(self, name: str, **options: Any) -> None:
            pass

        def log(self, values: dict[str, Any]) -> None:
            logged.append(values)
            if values["step"] == 2:
                raise ConnectionError("gone")

        def finish(self) -> None:
            raise AssertionError("a run that failed is left alone")

    def init(**options: Any) -> Run:
        calls.append(options)
        if options["mode"] == "online":
            raise TimeoutError("no network")
        return Run(options["id"])

    fake = types.SimpleNamespace(init=init, Settings=dict, Table=lambda columns, data: data)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    settings = Settings(wandb_project="project", wandb_exp_name="name")
    group = build_loggers(settings, run_dir=tmp_path, rank=0, wandb_run_id="abc", run_config={"a": 1})
    # Online failed, so the same run went on offline.
    assert [call["mode"] for call in calls] == ["online", "offline"]
    assert (calls[1]["project"], calls[1]["name"], calls[1]["id"], calls[1]["resume"]) == (
        "project",
        "name",
        "abc",
        "allow",
    )
    assert group.wandb_run_id == "abc"
    for step in (1, 2, 3):
        group.log(step, {"train/reward": 0.5})
    group.close()
    # It went quiet at the failure, and the run went on.
    assert logged == [{"step": 1, "train/reward": 0.5}, {"step": 2, "train/reward": 0.5}]
    assert len(strict_rows(tmp_path / "metrics.jsonl")) == 3


def test_wandb_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(project="project", name="run", folder=tmp_path, run_config={})
    logger.log(1, {"train/reward": 0.5})
    logger.log_samples(1, [SAMPLE])
    logger.close()
    assert logger.run_id is None
    assert "wandb could not be started offline" in caplog.text


def test_wandb_is_online_only_with_a_key(tmp_path: Path) -> None:
    netrc_file = tmp_path / "netrc"
    netrc_file.write_text("machine api.wandb.ai\n  login user\n  password " + "x" * 40 + "\n")
    here, nowhere = {"NETRC": str(netrc_file)}, {"NETRC": str(tmp_path / "missing")}
    assert choose_mode(nowhere) == "offline"
    assert choose_mode({**nowhere, "WANDB_API_KEY": "x"}) == "online"
    assert choose_mode({**nowhere, "WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}) == "disabled"
    assert choose_mode(here) == "online"
    assert choose_mode({**here, "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"


def test_only_the_first_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = build_loggers(Settings(), run_dir=tmp_path / "run", rank=1)
    group.log(1, {"train/reward": 0.5})
    group.log_samples(1, [SAMPLE])
    group.close()
    assert group.wandb_run_id is None
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""
    first = build_loggers(Settings(tensorboard_dir=str(tmp_path / "tb")), run_dir=tmp_path / "run", rank=0)
    assert isinstance(first, LoggerGroup)
    first.close()
    assert any((tmp_path / "tb").iterdir())


FULL_ROW = {
    "train/reward": 0.4375,
    "logra/predicted_kl": 1.934e-4,
    "logra/alpha": 1.0204,
    "response_length/mean": 11.25,
    "timing_s/gen": 6.104,
    "timing_s/update_actor": 123.4,
    "perf/throughput": 12345.6,
    **compute_accuracy_metrics(57, 100),
}


def test_table_is_aligned_and_fits_a_terminal() -> None:
    assert render_header() == (" step  reward    accuracy %  KL pred  alpha  length  gen s  train s  tok/s/rank")
    assert render_row(12, FULL_ROW) == (
        "   12   0.438  57.0 (47-66)  1.9e-04   1.02    11.2   6.10      123       12.3k"
    )
    assert render_row(0, {**compute_accuracy_metrics(0, 100), "train/reward": math.nan}) == (
        "    0       -     0.0 (0-4)        -      -       -      -        -           -"
    )
    extreme = dict.fromkeys(FULL_ROW, 100000000.0) | {"train/reward": -1.0} | compute_accuracy_metrics(100, 100)
    widths = {len(render_row(99999, row)) for row in (FULL_ROW, extreme, {})}
    assert widths == {len(render_header())}
    assert len(render_header()) <= 79


def test_console_rows_headers_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logger = ConsoleLogger(log_interval=10, last_step=37, stream=stream)
    for step in range(38):
        logger.log(step, {"train/reward": 0.5} | (compute_accuracy_metrics(1, 2) if step == 5 else {}))
    logger.log_samples(37, [SampleRecord("a\nb", "46\x1b[31m" + "y" * 500, 1.0)])
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["step", "0", "5", "10", "20", "30", "37"]
    assert "a\\nb >>> 46?[31m" in lines[-1]
    assert lines[-1].endswith("...")
    assert "\x1b" not in stream.getvalue()

    terminal = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    bold = ConsoleLogger(stream=terminal)
    for step in range(26):
        bold.log(step, {})
    assert terminal.getvalue().count("\x1b[1m") == 2


def test_progress_redraws_one_line_on_a_terminal_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "90")
    terminal, clock = Terminal(), Clock()
    with Progress("step 12  generate", 64, unit="responses", stream=terminal, clock=clock) as progress:
        for _ in range(64):
            clock.now_s += 0.25 / 10
            progress.advance(note="1.2k tokens/s")
    frames = terminal.getvalue().split("\r\x1b[2K")
    # 64 updates in 1.6 s are drawn at most every 0.1 s; the last thing written erases the line.
    assert 10 <= len(frames) <= 20
    assert "\n" not in terminal.getvalue()
    assert frames[-1] == ""
    assert all(len(frame) < 90 for frame in frames)
    assert frames[8].startswith("step 12  generate  [########............]  28/64 responses  1.2k tokens/s")
    # The bar gives way where the terminal is narrow, then the end of the line.
    assert "[############]  64/64" in progress.render(70)
    assert progress.render(60).startswith("step 12  generate  64/64 responses")
    assert len(progress.render(20)) == 20


def test_progress_is_sparse_in_a_file() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("short", 4, stream=stream, clock=clock) as progress:
        for _ in range(4):
            clock.now_s += 5
            progress.advance()
    assert stream.getvalue() == ""
    with Progress("long", 100, unit="questions", stream=stream, clock=clock) as progress:
        for done in range(101):
            clock.now_s += 1
            progress.update(done)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "long  29/100 questions  30 s, 1 min 13 s left"
    assert lines[-1] == "long  100/100 questions  1 min 41 s"
    assert len(lines) == 4
    with Progress("other rank", 4, stream=stream, clock=clock, enabled=False) as progress:
        clock.now_s += 1000
        progress.advance(4)
    assert "other rank" not in stream.getvalue()


def test_progress_survives_a_closed_stream() -> None:
    stream = io.StringIO()
    stream.close()
    with Progress("work", 1, stream=stream, plain_interval_s=0) as progress:
        progress.advance()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.05, "0.05"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1.00k"),
    ]
    + [(12345, "12.3k"), (999_600, "1.00M"), (-4.5e6, "-4.50M"), (2e9, "2.00G")],
)
def test_counts_have_three_digits(value: float, text: str) -> None:
    assert format_count(value) == text


def test_durations() -> None:
    assert [format_duration(s) for s in (0.4, 59.4, 185, 7630)] == ["0 s", "59 s", "3 min 05 s", "2 h 07 min"]


def test_logger_messages_go_through_logging_not_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logging.getLogger("megatron_logra").setLevel(logging.WARNING)
    group = build_loggers(Settings(), run_dir=tmp_path, rank=0)
    group.log(1, {"train/reward": math.nan})
    group.close()
    assert len(capsys.readouterr().out.splitlines()) == 2
