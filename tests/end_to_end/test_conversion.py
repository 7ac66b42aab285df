"""The conversion command lines, run as a user runs them, on a tiny model and on SmolLM2-135M."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_logra.checkpoint import convert
from megatron_logra.hf.rows import ParameterEntry
from megatron_logra.hf.safetensors_io import HFReader
from tests.conversion import assert_same_folder, save_model

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"checkpoints_conversion/{script}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command line in this process, in a folder of the test; its exit code and what it printed on both streams."""
    monkeypatch.syspath_prepend(ROOT / "checkpoints_conversion")
    monkeypatch.chdir(tmp_path)

    def run_here(script: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        capsys.readouterr()  # what making the model printed
        code = importlib.import_module(script).main()
        return code, *capsys.readouterr()

    return run_here


def layout(tp: int, pp: int) -> tuple[object, ...]:
    return ("--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp)


def test_there_and_back(tmp_path: Path) -> None:
    hf, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    save_model(hf, "qwen3", "mixed", tie_word_embeddings=True)
    there = run("hf_to_megatron", "--hf-checkpoint", hf, "--save", megatron, *layout(2, 2))
    assert (there.returncode, there.stderr) == (0, ""), there.stderr
    assert there.stdout == f"wrote {megatron / 'iter_0000000'}\n"
    again = run("megatron_to_hf", "--load", megatron, "--hf-reference", hf, "--save", back)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"wrote {back}\n", "")
    assert_same_folder(hf, back)
    verified = run("verify_roundtrip", "--hf-checkpoint", hf, *layout(2, 2), "--scratch", tmp_path)
    assert verified.stdout == "46 of 46 tensors are the same to the last bit at TP 2 x PP 2\n"
    assert (verified.returncode, verified.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def test_a_dry_run_prints_the_map_of_names_and_writes_nothing(tmp_path: Path, call: Callable[..., Any]) -> None:
    hf, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    save_model(hf, "llama")
    code, printed, errors = call(
        "hf_to_megatron", "--hf-checkpoint", hf, "--save", megatron, *layout(1, 2), "--dry-run"
    )
    gate, up = (f"model.layers.2.mlp.{name}_proj.weight" for name in ("gate", "up"))
    name, stored = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc1.weight[2]"
    assert (code, errors) == (0, "")
    assert f"stage 1  {name}  <-  {gate}, {up}  (stored: {stored})\n" in printed
    assert not megatron.exists()
    assert call("verify_roundtrip", "--hf-checkpoint", hf, *layout(1, 2), "--dry-run") == (0, printed, "")
    assert call("hf_to_megatron", "--hf-checkpoint", hf, "--save", megatron)[0] == 0
    code, printed, errors = call(
        "megatron_to_hf", "--load", megatron, "--hf-reference", hf, "--save", back, "--dry-run"
    )
    assert (code, errors) == (0, "")
    assert f"{gate}  <-  {stored}\n" in printed and len(printed.splitlines()) == 4 * 9 + 3
    assert not back.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf_to_megatron", "--hf-checkpoint", "none", "--save", "out"), "hf_checkpoint none is not a folder"),
        (("hf_to_megatron", "--hf-checkpoint", "{hf}", "--save", "out", *layout(3, 1)), "4 % 3 = 1"),
        (("verify_roundtrip", "--hf-checkpoint", "{hf}", *layout(1, 0)), "pipeline_model_parallel_size 0 must be"),
        (("megatron_to_hf", "--load", "{hf}", "--hf-reference", "{hf}", "--save", "out"), "no Megatron checkpoint"),
        (
            ("megatron_to_hf", "--load", "x", "--hf-reference", "x", "--save", "x", "--master", "--dtype", "bf16"),
            "--master writes fp32",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    tmp_path: Path, call: Callable[..., Any], arguments: tuple[object, ...], message: str
) -> None:
    save_model(tmp_path / "hf", "llama")
    script, *rest = (str(argument).format(hf=tmp_path / "hf") for argument in arguments)
    code, _, errors = call(script, *rest)
    assert code == 2
    assert errors.startswith(f"{script}: error: ") and errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize("way", ["warning", "disk"])
def test_warnings_and_failures_are_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], way: str
) -> None:
    save_model(tmp_path / "hf", "llama")
    to_megatron = ("hf_to_megatron", "--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "megatron")
    if way == "disk":
        monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        code, _, errors = call(*to_megatron)
        assert code == 1 and "error: writing" in errors and "No space left on device" in errors
    else:
        assert call(*to_megatron)[0] == 0
        (tmp_path / "megatron" / "iter_0000000" / "integrity.json").unlink()
        paths = ("--load", tmp_path / "megatron", "--hf-reference", tmp_path / "hf", "--save", tmp_path / "back")
        code, _, errors = call("megatron_to_hf", *paths, "--dtype", "bf16")
        assert code == 0 and "megatron_to_hf: warning: " in errors and "has no integrity.json" in errors
        assert {HFReader(tmp_path / "back").dtype(name) for name in HFReader(tmp_path / "hf").names} == {torch.bfloat16}
    assert errors.count("\n") == 1, errors


def test_a_difference_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    """Of a checkpoint in which one weight is off by a bit."""
    save_model(tmp_path / "hf", "llama")
    honest = convert.assemble_local

    def off_by_one(entry: ParameterEntry, *arguments: Any) -> torch.Tensor:
        local = honest(entry, *arguments)
        if entry.megatron_name == "decoder.layers.1.mlp.linear_fc2.weight":
            local.view(torch.int32)[3, 5] ^= 1
        return local

    monkeypatch.setattr(convert, "assemble_local", off_by_one)
    code, printed, _ = call("verify_roundtrip", "--hf-checkpoint", tmp_path / "hf")
    assert code == 1
    expected = "DIFFERENT  model.layers.1.mlp.down_proj.weight\n38 of 39 tensors are the same to the last bit at TP 1"
    assert printed.startswith(expected)


def test_smollm2_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    """9 heads over TP 3, 3 KV heads, tied embeddings over PP 2."""
    assert SMOLLM2.is_dir(), "make it with tools/prepare_smollm2.py"
    there = run("hf_to_megatron", "--hf-checkpoint", SMOLLM2, "--save", tmp_path / "megatron", *layout(3, 2))
    assert there.returncode == 0, there.stderr
    again = run(
        "megatron_to_hf", "--load", tmp_path / "megatron", "--hf-reference", SMOLLM2, "--save", tmp_path / "back"
    )
    assert again.returncode == 0, again.stderr
    assert_same_folder(SMOLLM2, tmp_path / "back")
