"""Whole runs in further layouts and with further optimizer settings; the engine must hold the export after every step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_logra.train import main
from tests.distributed.ranks import run_ranks
from tests.end_to_end.test_run import _train, arguments
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

BF16 = ["--bf16"]
TP2_SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
CASES: dict[str, tuple[int, list[str]]] = {
    "more ranks than KV heads": (4, ["--tensor-model-parallel-size", "4"]),
    "context parallel": (2, ["--context-parallel-size", "2", *BF16]),
    "interleaved": (2, [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "uneven stages": (2, [*PP2, "--decoder-first-pipeline-num-layers", "1", *BF16]),
    "divided masters": (2, [*BF16, "--use-distributed-optimizer", "--logra-check-interval", "1"]),
    "rule lr": (2, [*TP2_SP, *BF16, "--logra-rule", "lr", "--lr", "1e-4", "--weight-decay", "0.1", "--clip-grad", "1"]),
    "rule sgd": (2, [*PP2, "--logra-rule", "sgd", "--lr", "1e-3", "--lr-decay-style", "cosine"]),
    "gaussian": (2, [*TP2_SP, "--logra-distribution", "gaussian", "--logra-refresh-interval", "2"]),
    "probe in intervals": (2, [*PP2, "--kl-probe-interval", "2", "--kl-schedule", "linear"]),
    "fisher": (2, [*PP2, "--kl-estimator", "fisher", "--kl-fisher-draws", "2"]),
    "cached projections": (2, [*PP2, *BF16, "--logra-projection-cache"]),
    "selective recomputation": (2, [*TP2_SP, "--recompute-granularity", "selective", "--recompute-modules", "mlp"]),
    "full synchronisation": (2, [*BF16, "--use-distributed-optimizer", "--sync", "full"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_follows_every_setting(inputs: Path, name: str) -> None:
    num_ranks, flags = CASES[name]
    more = ["--log-comm-interval", "1"] if name == "divided masters" else []
    results = run_ranks(num_ranks, _train, arguments(inputs, *flags, *more), 3)
    for result in results:
        assert result["differences"] == [0, 0, 0]
        assert result["version"] == 3
    metrics = results[0]["metrics"][-1]
    assert metrics["logra/predicted_kl"] > 0
    if name == "probe in intervals":
        first, between, last = results[0]["metrics"]
        assert [step["logra/kl_probed"] for step in (first, between, last)] == [1.0, 0.0, 1.0]
        # The rule `paper` makes updates of equal norm, so the prediction is simply the last one again.
        assert between["logra/predicted_kl"] == pytest.approx(first["logra/predicted_kl"], rel=1e-3)
        assert last["logra/predicted_kl"] != pytest.approx(first["logra/predicted_kl"], rel=1e-3)
    if more:
        assert metrics["comm/sketch/dp_cp/all_reduce_bytes"] > 0 and metrics["comm/total_bytes"] > 0


@pytest.mark.parametrize("name", ["divided masters", "rule lr", "interleaved"])
def test_further_settings_resume_where_they_were(inputs: Path, tmp_path: Path, name: str) -> None:
    num_ranks, flags = CASES[name]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(num_ranks, _train, arguments(inputs, *flags, "--save", str(whole)), 3)
    run_ranks(num_ranks, _train, arguments(inputs, *flags, "--save", str(parts)), 1)
    run_ranks(num_ranks, _train, arguments(inputs, *flags, "--save", str(parts), "--load", str(parts)), 3)
    expected, found = (load_file(run / "huggingface" / "model.safetensors") for run in (whole, parts))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_only_the_named_targets_change(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = arguments(inputs, *PP2, "--logra-targets", "*.o_proj", "*.3.mlp.*", "--save", str(out))
    assert run_ranks(2, _train, argv, 2)[0]["differences"] == [0, 0]
    before = load_file(inputs / "model" / "model.safetensors")
    after = load_file(out / "huggingface" / "model.safetensors")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if "o_proj" in key or "layers.3.mlp" in key}


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer", "adam", *PP2],
        ["--optimizer", "adam", *TP2_SP, *BF16],
        ["--optimizer", "adam", "--use-distributed-optimizer", *BF16],
        ["--logra-train-non-targets", *TP2_SP],
        ["--logra-train-non-targets", *PP2, *BF16],
    ],
    ids=" ".join,
)
def test_dense_training_changes_everything_and_the_engine_follows(
    inputs: Path,
    tmp_path: Path,
    flags: list[str],
) -> None:
    argv = arguments(inputs)
    if "adam" in flags:  # these have no effect there, which is an error
        for flag in ("--logra-rank", "--kl-budget", "--logra-update-ratio"):
            index = argv.index(flag)
            del argv[index : index + 2]
    argv += [*flags, "--lr", "1e-3", "--kl-measure-interval", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    results = run_ranks(2, _train, [*argv, "--save", str(whole)], 3)
    assert all(result["differences"] == [0, 0, 0] for result in results)
    assert results[0]["metrics"][0]["logra/actual_kl"] > 0
    before = load_file(inputs / "model" / "model.safetensors")
    after = load_file(whole / "huggingface" / "model.safetensors")
    assert all(not torch.equal(before[key].to(after[key].dtype), after[key]) for key in before)
    if "--use-distributed-optimizer" in flags:
        return
    run_ranks(2, _train, [*argv, "--save", str(parts)], 1)
    run_ranks(2, _train, [*argv, "--save", str(parts), "--load", str(parts)], 3)
    found = load_file(parts / "huggingface" / "model.safetensors")
    assert all(torch.equal(found[key], after[key]) for key in after)


@pytest.fixture(scope="module")
def expert_inputs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same questions for a mixture of experts."""
    folder = tmp_path_factory.mktemp("experts")
    save_tiny_model(folder / "model", "qwen2_moe", vocab_size=260, max_position_embeddings=256, num_hidden_layers=2)
    save_tiny_tokenizer(folder / "model")
    for name in ("train.jsonl", "reward.py"):
        shutil.copy(inputs / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, ["--expert-model-parallel-size", "2", *BF16]),
        (4, [*TP2_SP, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"]),
        (2, [*PP2, "--use-distributed-optimizer", *BF16]),
    ],
    ids=["ep2-bf16", "tp2-ep2-etp2", "pp2"],
)
def test_experts_are_trained_exported_and_followed(
    expert_inputs: Path, tmp_path: Path, num_ranks: int, flags: list[str]
) -> None:
    out = tmp_path / "run"
    results = run_ranks(num_ranks, _train, arguments(expert_inputs, *flags, "--save", str(out)), 2)
    assert all(result["differences"] == [0, 0] for result in results)
    before = load_file(expert_inputs / "model" / "model.safetensors")
    after = load_file(out / "huggingface" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key].to(after[key].dtype), after[key])}
    assert any("experts.3.down_proj" in key for key in changed) and any("shared_expert." in key for key in changed)
    assert all(key.endswith("_proj.weight") for key in changed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logra-targets", "*.q_proj"], "logra_targets '*.q_proj' names no weight"),
        (["--transformer-impl", "transformer_engine"], "transformer_impl transformer_engine needs"),
        (["--logra-rule", "lr"], "logra_rule lr needs lr"),
    ],
)
def test_wrong_settings_end_with_exit_code_2(
    inputs: Path,
    capfd: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    argv = arguments(inputs, *flags)
    if "--logra-rule" in flags:
        index = argv.index("--logra-update-ratio")
        del argv[index : index + 2]
    assert run_ranks(1, lambda rank, size: main(argv)) == [2]
    assert message in capfd.readouterr().err


def test_metrics_of_a_run_are_json(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--context-parallel-size", "2", "--global-batch-size", "8", "--log-comm-interval", "2"]
    run_ranks(2, _train, arguments(inputs, *flags, "--save", str(out)), 2)
    first, second = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    assert not any(key.startswith("comm/") for key in first) and any(key.startswith("comm/") for key in second)
