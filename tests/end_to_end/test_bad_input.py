"""Wrong settings, model folders and data: a clear message, exit status 2 on all ranks, nothing written, no training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.ranks import run_ranks
from tests.end_to_end.test_run import arguments


def _main(rank: int, world_size: int, argv: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and standard error of the training command on one rank."""
    import megatron_logra.mcore.initialize
    from megatron_logra.train import main

    # The harness owns the process group: it meets the ranks once more afterwards.
    megatron_logra.mcore.initialize.shutdown_distributed = lambda: None
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)} | environment
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            status = main(argv)
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
    return status, errors.getvalue()


def refuse(argv: list[str], *expected: str, world_size: int = 2, out: Path | None = None) -> None:
    results = run_ranks(world_size, _main, argv, {})
    assert [status for status, _ in results] == [2] * world_size
    message = results[0][1]
    for text in expected:
        assert text in message, message
    assert "Traceback" not in message
    assert out is None or not out.exists()


def replaced(argv: list[str], flag: str, value: object) -> list[str]:
    argv = list(argv)
    argv[argv.index(flag) + 1] = str(value)
    return argv


SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "heads over TP": (["--tensor-model-parallel-size", "3"], ["4 attention heads", "4 % 3 = 1"]),
    "layers over PP": (["--pipeline-model-parallel-size", "3"], ["4 layers", "4 % 3 = 1"]),
    "world over TP x PP": (["--tensor-model-parallel-size", "4"], ["world size 2", "4"]),
    "global batch": (["--global-batch-size", "5"], ["5"]),
    "micro batch": (["--micro-batch-size", "3"], ["16", "3"]),
    "unknown flag": (["--tensor-model-paralel-size", "2"], ["unknown flag", "--tensor-model-parallel-size"]),
    "rank 0": (["--logra-rank", "0"], ["logra_rank 0"]),
    "negative budget": (["--kl-budget", "-1e-4"], ["kl_budget -0.0001"]),
    "contradiction": (["--num-layers", "5"], ["--num-layers is 5", "4"]),
    "reward that does not import": (["--reward", "no_such_module:function"], ["no_such_module"]),
    "reward that is not there": (["--reward", "megatron_logra.rl.rewards:exact_numbr"], ["exact_number"]),
    "prompt longer than the sequence": (["--seq-length", "12"], ["prompts are too long", "seq_length 12"]),
}
WORLD_SIZES = {"heads over TP": 3, "layers over PP": 3}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(inputs: Path, tmp_path: Path, name: str) -> None:
    more, expected = SETTINGS[name]
    argv = arguments(inputs, "--save", str(tmp_path / "out"))
    for flag, value in zip(more[::2], more[1::2], strict=True):
        argv = replaced(argv, flag, value) if flag in argv else [*argv, flag, value]
    refuse(argv, *expected, world_size=WORLD_SIZES.get(name, 2), out=tmp_path / "out")


def test_unknown_yaml_key(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("kl_budgt: 1e-4\n")
    argv = arguments(inputs, "--save", str(tmp_path / "out"), "--config", str(tmp_path / "run.yaml"))
    refuse(argv, "kl_budgt", "kl_budget", "line 1", out=tmp_path / "out")


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _reshape_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _drop_shard(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    shards = {name: f"model-0000{1 + (number % 2)}-of-00002.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def _change_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing tensors": (_drop_tensor, ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]),
    "wrong shape": (_reshape_tensor, ["model.norm.weight", "(31,)", "(32,)"]),
    "missing shard": (_drop_shard, ["model-00002-of-00002.safetensors"]),
    "unsupported family": (_change_family, ["gpt2", "llama"]),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], ["tokenizer"]),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_model_folders(inputs: Path, tmp_path: Path, name: str) -> None:
    spoil, expected = FOLDERS[name]
    shutil.copytree(inputs / "model", tmp_path / "model")
    spoil(tmp_path / "model")
    argv = replaced(arguments(inputs, "--save", str(tmp_path / "out")), "--hf-checkpoint", tmp_path / "model")
    refuse(argv, *expected, out=tmp_path / "out")


def test_missing_folder(inputs: Path, tmp_path: Path) -> None:
    argv = replaced(arguments(inputs, "--save", str(tmp_path / "out")), "--hf-checkpoint", tmp_path / "nowhere")
    refuse(argv, "hf_checkpoint", "nowhere", "does not exist", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "no samples"), ('{"prompt": "1", "answer": "2"}\n{oops\n', "line 2"), ('{"prompt": "1"}\n', "answer")],
)
def test_data(inputs: Path, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "train.jsonl").write_text(text)
    argv = replaced(arguments(inputs, "--save", str(tmp_path / "out")), "--train-data", tmp_path / "train.jsonl")
    refuse(argv, expected, out=tmp_path / "out")


def test_a_problem_of_one_rank_ends_all_ranks(inputs: Path, tmp_path: Path) -> None:
    results = run_ranks(2, _main_with_one_broken_rank, arguments(inputs, "--save", str(tmp_path / "out")))
    assert [status for status, _ in results] == [2, 2]
    assert "rank 1 failed" in results[0][1]
    assert not (tmp_path / "out").exists()


def _main_with_one_broken_rank(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    return _main(rank, world_size, replaced(argv, "--reward", "no_such:thing") if rank == 1 else argv, {})


def test_nothing_to_continue_from(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    argv = arguments(inputs, "--save", str(tmp_path / "out"), "--load", str(tmp_path / "empty"))
    refuse(argv, "holds no checkpoint", out=tmp_path / "out")


def test_a_failing_reward_costs_its_own_sample_only(inputs: Path, tmp_path: Path) -> None:
    reward = (
        "import math\n"
        "def moody(response, sample):\n"
        "    if sample.index % 3 == 0:\n        raise RuntimeError('no mood')\n"
        "    return math.nan if sample.index % 3 == 1 else float(len(response) % 3)\n"
    )
    (tmp_path / "moody.py").write_text(reward)
    out = tmp_path / "out"
    argv = arguments(inputs, "--save", str(out), "--train-iters", "1")
    argv = replaced(argv, "--reward", f"{tmp_path / 'moody.py'}:moody")
    results = run_ranks(2, _main, argv, {})
    assert [status for status, _ in results] == [0, 0]
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < row["train/num_failed_rewards"] < 16
    assert row["train/num_failed_rewards"] % 4 == 0  # whole groups: the reward depends on the sample
