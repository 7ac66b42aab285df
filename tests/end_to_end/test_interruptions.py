"""Runs that are killed, asked to end, restarted, or find damaged checkpoints: nothing is lost, and all say what is."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megatron_logra.checkpoint.training as training
from megatron_logra.arguments import parse_arguments
from megatron_logra.checkpoint.folders import checkpoint_folder, list_iterations, read_pointer
from megatron_logra.metrics import compute_accuracy_metrics
from megatron_logra.trainer import train
from tests.distributed.ranks import RankError, run_ranks
from tests.end_to_end.test_run import arguments

ITERATIONS = 8


def continued(inputs: Path, out: Path, *more: str) -> list[str]:
    """A run that saves every iteration and goes on where its folder stands."""
    argv = arguments(inputs, "--pipeline-model-parallel-size", "2", "--train-iters", str(ITERATIONS))
    return [*argv, "--save", str(out), "--load", str(out), "--save-interval", "1", *more]


def _train(rank: int, world_size: int, argv: list[str], arm: Callable[[int], None] = lambda rank: None) -> None:
    arm(rank)
    train(parse_arguments(argv))


def kill_after(delays: dict[int, float]) -> Callable[[int], None]:
    """Each of these ranks is killed so many seconds after its start."""

    def arm(rank: int) -> None:
        def wait_and_kill() -> None:
            time.sleep(delays[rank])
            os.kill(os.getpid(), signal.SIGKILL)

        if rank in delays:
            threading.Thread(target=wait_and_kill, daemon=True).start()

    return arm


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_ranks(2, _train, continued(inputs, out))
    return out


def assert_same_run(found: Path, expected: Path) -> None:
    """The same exported weights, and one row of metrics for each iteration."""
    weights, wanted = (load_file(folder / "huggingface" / "model.safetensors") for folder in (found, expected))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    rows, wanted_rows = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (found, expected)
    )
    assert [row["step"] for row in rows] == [row["step"] for row in wanted_rows]
    assert [row["train/reward"] for row in rows] == [row["train/reward"] for row in wanted_rows]


def test_twenty_kills_at_random_moments_change_nothing(inputs: Path, undisturbed: Path, tmp_path: Path) -> None:
    """One rank of two or both; after each kill the newest checkpoint is whole and no older than before."""
    rng = random.Random(0)
    kills = runs = 0
    while kills < 20 or runs == 0:
        out = tmp_path / f"run{runs}"
        newest = -1
        while True:
            delay = rng.uniform(0.2, 3.0)
            victims = rng.choice([[0], [1], [0, 1]]) if kills < 20 else []
            try:
                run_ranks(2, _train, continued(inputs, out), kill_after(dict.fromkeys(victims, delay)))
            except RankError as error:
                assert "died with exit code -9" in str(error), error
                kills += 1
                pointed = read_pointer(out)
                assert (pointed or -1) >= newest
                newest = -1 if pointed is None else pointed
                continue
            break
        assert_same_run(out, undisturbed)
        runs += 1
        shutil.rmtree(out)


STAGES = {
    "before anything is written": "open_partial",
    "before the blocks are written": "save_blocks",
    "before the list of files": "write_manifest",
    "before it gets its name": "publish",
    "before the pointer moves": "write_pointer",
    "before old ones are deleted": "delete",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_of_a_save_leaves_a_whole_checkpoint(
    inputs: Path, undisturbed: Path, tmp_path: Path, stage: str
) -> None:
    out = tmp_path / "run"
    name = STAGES[stage]

    def arm(rank: int) -> None:
        import megatron_logra.checkpoint.folders as folders

        module: Any = folders if name == "write_pointer" else training
        original, calls = getattr(module, name), []

        def dying(*given: Any, **named: Any) -> Any:
            calls.append(given)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **named)

        if rank == 0:
            setattr(module, name, dying)

    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(2, _train, continued(inputs, out, "--save-retain-interval", "4"), arm)
    # The third save died: its checkpoint is there if it already had its name.
    expected = 3 if name == "delete" else 2
    assert read_pointer(out) == expected
    run_ranks(2, _train, continued(inputs, out, "--save-retain-interval", "4"))
    assert_same_run(out, undisturbed)
    assert list_iterations(out) == [4, 7, 8]
    assert not list(out.glob(".iter_*"))


def test_a_signal_ends_the_run_after_a_save(inputs: Path, undisturbed: Path, tmp_path: Path) -> None:
    """SIGTERM reaches one rank in the middle of an iteration; with saves in the background."""
    out = tmp_path / "run"
    (tmp_path / "reward.py").write_text(
        "import os, pathlib, signal\n"
        f"from importlib.util import spec_from_file_location, module_from_spec\n"
        f"spec = spec_from_file_location('original', {str(inputs / 'reward.py')!r})\n"
        "original = module_from_spec(spec); spec.loader.exec_module(original)\n"
        f"calls = pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "def count_letters(response, sample):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        with calls.open('a') as file: file.write('.')\n"
        "        if calls.stat().st_size == 20: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return original.count_letters(response, sample)\n"
    )
    argv = continued(inputs, out, "--exit-signal-handler", "--async-save")
    argv[argv.index("--save-interval") + 1] = "100"
    argv[argv.index("--reward") + 1] = f"{tmp_path / 'reward.py'}:count_letters"
    run_ranks(2, _train, argv)  # ends without an error
    assert list_iterations(out) == [3]  # 8 responses a rank and iteration: call 20 is in the third
    run_ranks(2, _train, argv)
    assert_same_run(out, undisturbed)


def test_torchrun_restarts_a_run_where_it_stood(inputs: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "reward.py").write_text(
        "import os, pathlib, signal\n"
        f"marker = pathlib.Path({str(tmp_path / 'died')!r})\n"
        f"out = pathlib.Path({str(out)!r})\n"
        "def count_letters(response, sample):\n"
        "    if (out / 'iter_0000003').exists() and os.environ['RANK'] == '1' and not marker.exists():\n"
        "        marker.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return sum(character.isalpha() for character in response) / 10\n"
    )
    argv = continued(inputs, out)
    argv[argv.index("--reward") + 1] = f"{tmp_path / 'reward.py'}:count_letters"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "megatron_logra.train"]
    done = subprocess.run([*command, *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    assert "continuing" in done.stderr + done.stdout
    assert_same_run(out, undisturbed)


def _cut(place: Path) -> str:
    file = max(place.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    return file.name


def _flip(place: Path) -> str:
    file = max(place.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file.name


def _without(name: str) -> Callable[[Path], str]:
    def damage(place: Path) -> str:
        (place / name).unlink()
        return name

    return damage


def _without_folder(place: Path) -> str:
    shutil.rmtree(place)
    return place.name


DAMAGES: dict[str, Callable[[Path], str]] = {
    "a file cut off": _cut,
    "a byte changed": _flip,
    "no index": _without(".metadata"),
    "no list of files": _without("integrity.json"),
    "no state": _without("state.json"),
    "no folder": _without_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_taken(
    inputs: Path, undisturbed: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    for iteration in list_iterations(out)[:-2]:
        shutil.rmtree(checkpoint_folder(out, iteration))
    name = DAMAGES[damage](checkpoint_folder(out, ITERATIONS))
    with pytest.raises(RankError, match=rf"(?s)SetUpError.*{name}.*--no-fallback"):
        run_ranks(2, _train, continued(inputs, out, "--no-fallback"))
    log = tmp_path / "log"

    def attach(rank: int) -> None:
        import logging

        logging.basicConfig(filename=f"{log}{rank}", level=logging.INFO, force=True)

    run_ranks(2, _train, continued(inputs, out), attach)
    messages = "".join(Path(f"{log}{rank}").read_text() for rank in range(2))
    assert name in messages and f"trying checkpoint {ITERATIONS - 1}" in messages
    assert_same_run(out, undisturbed)


def test_a_full_disk_ends_all_ranks_and_keeps_the_checkpoint_before(inputs: Path, tmp_path: Path) -> None:
    """In the third save a rank may write no more than a few bytes to a file."""
    out = tmp_path / "run"

    def arm(rank: int) -> None:
        original, calls = training.save_blocks, []

        def without_room(*given: Any, **named: Any) -> None:
            calls.append(given)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == 1 and len(calls) == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            try:
                original(*given, **named)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        training.save_blocks = without_room  # type: ignore[assignment]

    with pytest.raises(RankError, match=r"(?s)writing .*iter_0000003.* failed: rank 1: .*File too large"):
        run_ranks(2, _train, continued(inputs, out), arm)
    assert read_pointer(out) == 2 and list_iterations(out) == [1, 2]


def test_a_folder_of_another_run_is_not_started_in(inputs: Path, tmp_path: Path) -> None:
    argv = continued(inputs, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    argv[argv.index("--load") + 1] = str(tmp_path / "empty")
    with pytest.raises(RankError, match="holds no checkpoint"):
        run_ranks(2, _train, argv)


def test_the_best_checkpoint_is_saved_and_kept(inputs: Path, tmp_path: Path) -> None:
    """Evaluations with rewards that the test dictates: best at the second of six."""
    out = tmp_path / "run"
    rewards = [0.1, 0.2, 0.5, 0.3, 0.5, 0.4, 0.2, 0.1, 0.0]

    def arm(rank: int) -> None:
        import megatron_logra.trainer as trainer

        made = iter(rewards)
        trainer.evaluate = lambda run: compute_accuracy_metrics(1, 2) | {"val/reward": next(made)}

    argv = continued(inputs, out, "--eval-data", str(inputs / "train.jsonl"), "--eval-interval", "1")
    argv[argv.index("--save-interval") + 1] = "6"
    argv += ["--save-best-metric", "val/reward", "--save-retain-interval", "6"]
    run_ranks(2, _train, argv, arm)
    assert read_pointer(out, "best_checkpointed_iteration.txt") == 2
    assert list_iterations(out) == [2, 6, 8]
    state = json.loads((checkpoint_folder(out, 8) / "state.json").read_text())
    assert state["best"] == {"name": "val/reward", "value": 0.5, "step": 2}
    with pytest.raises(
        RankError,
        match=r"save_best_metric 'val/bleu' is not a metric .* give one of val/accuracy.* val/reward",
    ):
        run_ranks(2, _train, [*argv[:-3], "val/bleu"], arm)
