"""The command lines beside training, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_verify_roundtrip(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=True)
    script = "checkpoints_conversion/verify_roundtrip.py"
    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    good = _run(script, "--hf-checkpoint", str(tmp_path), *layout)
    assert good.returncode == 0, good.stderr
    # 46 tensors on disk; the last stage holds the tied embedding once more.
    assert "47 of 47 tensors are the same to the last bit at TP 2 x PP 2" in good.stdout
    names = _run(script, "--hf-checkpoint", str(tmp_path), *layout, "--dry-run").stdout
    assert "stage 1  decoder.layers.0.mlp.linear_fc1.weight  <-  model.layers.2.mlp.gate_proj.weight" in names
    bad = _run(script, "--hf-checkpoint", str(tmp_path), "--tensor-model-parallel-size", "3")
    assert bad.returncode == 2 and "4 % 3 = 1" in bad.stderr
