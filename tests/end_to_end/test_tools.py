"""The command lines beside training, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_verify_parallelism_compares_the_layout_with_one_rank(tmp_path: Path) -> None:
    script, result = "tools/verify_parallelism.py", tmp_path / "result.json"
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--dtype", "float64")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    good = _run(*launch, *flags, "--json", str(result))
    assert good.returncode == 0, good.stderr
    assert "the layout makes the update of one rank (tolerance 1e-09)" in good.stdout
    record = json.loads(result.read_text())
    assert record["passed"] and record["ranks"] == 2 and record["backend"] == "gloo"
    names = [one["quantity"] for one in record["comparisons"]]
    assert names == ["log-probability", "sketch", "norms", "predicted KL", "alpha", "updated weight"]
    assert all(one["worst"] < 1e-10 for one in record["comparisons"])
    # Nothing in floating point agrees to the last bit over ranks, so a tolerance of 0 must fail.
    bad = _run(*launch, *flags, "--tolerance", "0")
    assert bad.returncode == 1 and "THE LAYOUT DIFFERS" in bad.stdout
    assert _run(script, "--tensor-model-parallel-size", "2").returncode == 2


def test_a_difference_is_found_and_named() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from verify_parallelism import SCALARS, Measured, compare
    finally:
        sys.path.pop(0)

    def measured(**changes: float) -> Measured:
        weight = torch.ones(4, 4)
        weight[1, 2] += changes.get("weight", 0.0)
        logprobs = torch.tensor([[-1.0, -2.0], [-3.0, changes.get("logprob", -4.0)]])
        return Measured(
            scalars={name: changes.get(name, 1.0) for name in SCALARS},
            sketches={"a": torch.ones(2), "b": torch.full((2,), changes.get("sketch", 0.0))},
            weights={"a": torch.ones(3), "b": weight},
            logprobs=logprobs,
        )

    assert all(one.passed for one in compare(measured(), measured(), 1e-6))
    cases = {
        "weight": ("updated weight", "b"),
        "logprob": ("log-probability", "response 1"),
        "sketch": ("sketch", "b"),  # of an expert without tokens: anything but 0 is wrong
        "alpha": ("alpha", "alpha"),
        "predicted_kl": ("predicted KL", "predicted_kl"),
        "update_norm": ("norms", "update_norm"),
    }
    for change, (quantity, where) in cases.items():
        for value in (0.5, float("nan")):
            failed = [one for one in compare(measured(**{change: value}), measured(), 1e-6) if not one.passed]
            assert [(one.quantity, one.where) for one in failed] == [(quantity, where)], change
