"""The calibration of predicted KLs (tools/calibrate_kl.py), run on ranks that share a tiny model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
try:
    import calibrate_kl
finally:
    sys.path.pop(0)

BUDGET = 1e-6


def arguments(inputs: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-checkpoint", str(inputs / "model"), "--train-data", str(inputs / "train.jsonl")),
        *("--reward", f"{inputs / 'reward.py'}:count_letters", "--make-vocab-size-divisible-by", "1"),
        *("--seq-length", "128", "--rollout-max-new-tokens", "8", "--logra-rank", "8"),
        *("--grpo-prompts-per-step", "2", "--grpo-group-size", "4", "--output", str(output)),
        *more,
    ]


LAYOUTS = {
    "tp2": ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--steps", "1"],
    # What belongs to checkpoints is ignored.
    "pp2": ["--pipeline-model-parallel-size", "2", "--steps", "1", "--grpo-iterations", "2", "--save-interval", "5"],
    "dp2": ["--use-distributed-optimizer", "--steps", "1"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_predicted_kls_come_true_in_both_precisions(inputs: Path, tmp_path: Path, name: str) -> None:
    budget = ["--kl-budget", str(BUDGET), "--kl-schedule", "constant", "--kl-mismatch-weight", "0"]
    argv = arguments(inputs, tmp_path, *budget, *LAYOUTS[name])
    assert run_ranks(2, lambda rank, size: calibrate_kl.main(argv)) == [0, 0]
    assert (tmp_path / "kl_calibration.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "kl_calibration.json").read_text())
    runs = record["updates"]
    assert {precision: len(rows) for precision, rows in runs.items()} == dict.fromkeys(
        ("fp32", "bf16"), 2 if name == "pp2" else 1
    )
    for row in (*runs["fp32"], *runs["bf16"]):
        assert all(map(math.isfinite, row.values()))
        # The ratio is to the scaled prediction, which the controller put on the budget.
        assert row["predicted_kl"] == pytest.approx(row["alpha"] ** 2 * row["proposed_kl"], rel=1e-12)
        assert row["predicted_kl"] == pytest.approx(BUDGET, rel=1e-6)
    # What the second order leaves out is one power of the change of the logits, sqrt(2 KL) = 1.4e-3, times a number of
    # order 1; rounding a factor to bf16 changes each entry by at most 2^-9 of it, the KL by less than 2^-8.
    tolerance = 10 * math.sqrt(2 * BUDGET) + 2**-8
    for row in runs["fp32"]:
        assert row["actual_kl"] / row["predicted_kl"] == pytest.approx(1.0, abs=tolerance)
    for row in runs["bf16"]:
        # The fp32 prediction is of the same factors from the same masters, whose bf16 halves are off by 2^-9 each; some
        # forty roundings in a row of this model, at random, make sqrt(40) 2^-9 = 1.2 % of a tangent, twice that of a KL.
        assert row["predicted_kl"] / row["predicted_kl_in_fp32"] == pytest.approx(1.0, abs=0.1)
        assert row["actual_kl_masters_in_fp32"] / row["predicted_kl_in_fp32"] == pytest.approx(1.0, abs=tolerance)
        # bf16 logits from 8 to 16 are multiples of 2^-4: rounding them alone changes a policy by more than the budget.
        assert row["rounding_floor"] > 2 * BUDGET
        assert row["actual_kl"] > 0 and row["actual_kl_weights_in_fp32"] >= 0


def test_a_prediction_that_fails_is_said(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # An update as large as the weights is nothing that a second-order expansion describes.
    argv = arguments(inputs, tmp_path, "--steps", "1", "--precisions", "fp32", "--logra-update-ratio", "1")
    assert run_ranks(1, lambda rank, size: calibrate_kl.main([*argv, "--kl-control", "off"])) == [1]
    assert "OUTSIDE [0.9, 1.1]" in capfd.readouterr().out
    record = json.loads((tmp_path / "kl_calibration.json").read_text())
    assert not record["summary"]["fp32"]["within"] and set(record["updates"]) == {"fp32"}


def test_settings_that_contradict_the_tool_are_refused(inputs: Path, tmp_path: Path) -> None:
    for flags in (["--bf16"], ["--optimizer", "adam", "--lr", "1e-4"], ["--micro-batch-size", "3"]):
        assert calibrate_kl.main(arguments(inputs, tmp_path / "none", *flags)) == 2
    assert not (tmp_path / "none").exists()


def test_the_summary_judges_every_update() -> None:
    def row(ratio: float) -> dict[str, float]:
        return {"predicted_kl": 2.0, "actual_kl": 2 * ratio}

    good = calibrate_kl.summarise({"fp32": [row(0.9), row(1.0), row(1.1)]})["fp32"]
    assert good["within"] and (good["min"], good["max"], good["updates"]) == (0.9, 1.1, 3)
    assert good["mean"] == pytest.approx(1.0)
    assert not calibrate_kl.summarise({"fp32": [row(1.0), row(1.2)]})["fp32"]["within"]
    # Nothing measured is nothing shown.
    assert not calibrate_kl.summarise({"fp32": []})["fp32"]["within"]
