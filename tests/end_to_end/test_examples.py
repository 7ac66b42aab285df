"""The stability experiment in its smallest form, run as a user runs it, and its table."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from matplotlib.image import imread
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kl_stability"


def _table(output: str) -> dict[tuple[str, str], list[str]]:
    """The other cells of each row by step and arm."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    return {(row[0], row[1]): row[2:] for row in rows[2:]}


def _relative_change(before: Path, after: Path) -> float:
    """`|W' - W| / |W|` over the weights that LoGRA trains."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    names = [name for name in old if name.endswith("_proj.weight")]
    changed = sum(float((new[name].double() - old[name].double()).square().sum()) for name in names)
    return math.sqrt(changed / sum(float(old[name].double().square().sum()) for name in names))


@pytest.mark.timeout(600)
def test_the_stability_experiment_gives_every_arm_the_same_step(tmp_path: Path) -> None:
    # A model after two steps of training answers nothing rightly: reward the length, so that there is a gradient.
    (tmp_path / "reward.py").write_text("def length(response, sample):\n    return float(len(response))\n")
    settings = {"OUT": str(tmp_path), "SEEDS": "7", "RATIOS": "2e-2", "MODEL_STEPS": "2", "JOBS": "2"}
    flags = ["--train-iters", "1", "--grpo-prompts-per-step", "4", "--micro-batch-size", "32"]
    flags += ["--kl-probe-responses", "4", "--reward", f"{tmp_path / 'reward.py'}:length"]
    done = subprocess.run(
        [str(EXAMPLE / "run.sh"), *flags], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    labels = {"controlled": "LoGRA, KL control", "uncontrolled": "LoGRA, no control", "adam": "dense Adam"}
    table = _table(done.stdout)
    assert list(table) == [("0.02", label) for label in labels.values()]
    change = {}
    for arm, label in labels.items():
        folder = tmp_path / "step_2e-2" / arm / "seed_7"
        assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 7
        (row,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        assert table["0.02", label][0] == f"{row['train/reward']:.3f}"
        change[arm] = _relative_change(tmp_path / "inputs" / "model", folder / "huggingface")
        if arm == "controlled":
            assert 0 < row["logra/alpha"] <= 1
            assert change[arm] == pytest.approx(0.02 * row["logra/alpha"], rel=2**-8)
    # Factors are rounded to bf16 on a grid of their row, to 2**-9 of its largest entry.
    assert change["uncontrolled"] == pytest.approx(0.02, rel=2**-8)
    # Adam's first step is the learning rate in every entry whose gradient is far above its epsilon: nearly all are.
    assert 0.95 * 0.02 < change["adam"] < 0.02 * (1 + 1e-3)
    picture = imread(tmp_path / "kl_stability.png")
    assert picture.std() > 0.01  # not one colour


def _write_run(folder: Path, rewards: list[float], kl: float) -> None:
    folder.mkdir(parents=True)
    rows = [{"step": index, "train/reward": reward, "logra/actual_kl": kl} for index, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_final_reward_is_of_the_last_ten_updates_of_all_seeds(tmp_path: Path) -> None:
    for seed, final in ((1, 0.5), (2, 0.25), (3, 0.75)):
        # One of the last ten updates is 0.1 lower, and none of the others counts.
        _write_run(tmp_path / "step_1e-1" / "adam" / f"seed_{seed}", [9.0] * 5 + [final - 0.1] + [final] * 9, 2e-3)
    command = [sys.executable, str(EXAMPLE / "plot.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert _table(done.stdout) == {("0.1", "dense Adam"): ["0.490", "0.240 to 0.740", "2.0e-03"]}

    _write_run(tmp_path / "step_1e-1" / "adam" / "seed_4", [0.5], 0.0)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "have [1, 15] updates: run them all to the same length" in done.stderr
