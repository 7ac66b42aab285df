"""Whole runs on gloo ranks with a tiny model: rollouts, updates, synchronisation, files, export, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_logra.arguments import parse_arguments
from megatron_logra.mcore.weights import read_served
from megatron_logra.rl.data import PromptStream, load_dataset
from megatron_logra.run import build_run
from megatron_logra.saving import export, finish_saving, save, start
from megatron_logra.trainer import report, train_iteration
from tests.distributed.ranks import run_ranks


def arguments(inputs: Path, *more: str) -> list[str]:
    return [
        *("--hf-checkpoint", str(inputs / "model"), "--train-data", str(inputs / "train.jsonl")),
        *("--reward", f"{inputs / 'reward.py'}:count_letters", "--make-vocab-size-divisible-by", "1"),
        *("--seq-length", "128", "--rollout-max-new-tokens", "8", "--logra-rank", "8", "--kl-budget", "1e-3"),
        *("--grpo-prompts-per-step", "4", "--grpo-group-size", "4", "--logra-update-ratio", "1e-3"),
        *more,
    ]


def _train(rank: int, world_size: int, argv: list[str], until: int) -> dict[str, Any]:
    """Train to iteration `until` and save; after each iteration compare the engine with the trainer's export."""
    run = build_run(parse_arguments(argv))
    start(run)
    differences, metrics = [], []
    while run.step < until:
        metrics.append(train_iteration(run))
        run.step += 1
        report(run, metrics[-1])
        dtype = run.policy.model.config.params_dtype
        exported = dict(run.sender.stream_weights(lambda entry: read_served(run.policy, entry), dtype=dtype))
        served = run.engine.weights()  # type: ignore[attr-defined]
        assert exported.keys() == served.keys()
        differences.append(sum(int((exported[name] != served[name]).sum()) for name in exported))
    save(run)
    export(run)
    finish_saving(run)
    run.loggers.close()
    return {"differences": differences, "metrics": metrics, "version": run.engine.policy_version}


LAYOUTS = {
    "tp2": ["--tensor-model-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "tp2-sp-bf16": ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"],
    "dp2-bf16-fp32-master": ["--bf16", "--logra-master", "fp32"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_engine_holds_the_exported_weights_after_every_step(inputs: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    results = run_ranks(2, _train, arguments(inputs, *LAYOUTS[name], "--save", str(out)), 3)
    for result in results:
        # Factors are exact in fp32 in any order of summation, so trainer and engine agree to the last bit.
        assert result["differences"] == [0, 0, 0]
        assert result["version"] == 3
    assert results[0]["metrics"][0]["logra/predicted_kl"] > 0
    assert results[0]["metrics"][0]["memory/kl_probe_peak_extra_bytes"] >= 0
    before = load_file(inputs / "model" / "model.safetensors")
    after = load_file(out / "huggingface" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key].to(after[key].dtype), after[key])]
    assert sorted(changed) == sorted(key for key in before if key.endswith("_proj.weight"))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_the_exported_folder_is_the_trained_policy(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = arguments(inputs, *LAYOUTS["pp2"], "--save", str(out), "--kl-measure-interval", "1")
    (first, _) = run_ranks(2, _train, argv, 2)
    model, info = AutoModelForCausalLM.from_pretrained(
        out / "huggingface", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(out / "huggingface")
    assert tokenizer.chat_template
    assert json.loads((out / "huggingface" / "generation_config.json").read_text())
    assert first["metrics"][-1]["logra/actual_over_predicted_kl"] == pytest.approx(1, abs=0.2)

    # A run that starts from the exported folder sees the log-probabilities that `transformers` computes from it.
    again = arguments(inputs, *LAYOUTS["tp2"])
    again[1] = str(out / "huggingface")
    results = run_ranks(2, _logprobs, again)
    for ids, first_generated, logprobs, _ in results[0]:
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        targets = torch.tensor(ids)[first_generated:, None]
        expected = expected[first_generated - 1 : -1].gather(1, targets)[:, 0]
        assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)


def _logprobs(rank: int, world_size: int, argv: list[str]) -> list[tuple[list[int], int, list[float], list[float]]]:
    """(tokens, first generated position, log-probabilities of trainer and engine) of one batch of rollouts."""
    from megatron_logra.train_step import build_own_batches
    from megatron_logra.trainer import sample

    run = build_run(parse_arguments(argv))
    responses = sample(run).responses
    _, batches = build_own_batches(run.policy, responses, [0.0] * len(responses), micro_batch_size=1)
    outputs = run.policy.compute_logprobs(batches, temperature=run.config.rollout.rollout_temperature)
    return [
        (
            [*response.prompt_ids, *response.response_ids],
            len(response.prompt_ids),
            output.logprob_N.tolist(),
            list(response.generation_logprobs),
        )
        for response, output in zip(responses, outputs, strict=True)
    ]


def test_top_k_and_top_p_choose_tokens_and_leave_log_probabilities_alone(inputs: Path) -> None:
    """Engine and trainer, whose vocabulary is padded, give each token its share of the whole distribution at 0.7."""
    argv = arguments(inputs, *LAYOUTS["tp2"], "--rollout-temperature", "0.7", "--rollout-top-p", "0.8")
    argv += ["--rollout-top-k", "20"]
    argv[argv.index("--make-vocab-size-divisible-by") + 1] = "64"
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    results = run_ranks(2, _logprobs, argv)[0]
    assert len(results) == 16
    for ids, first_generated, trained, generated in results:
        assert torch.allclose(torch.tensor(generated), torch.tensor(trained), rtol=0, atol=1e-4)
        with torch.no_grad():
            rows = (model(input_ids=torch.tensor([ids])).logits[0, first_generated - 1 : -1] / 0.7).log_softmax(-1)
        for row, token, logprob in zip(rows, ids[first_generated:], generated, strict=True):
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
            best = row.topk(20).values.exp()
            likelier = best[best > row[token].exp() * (1 + 1e-4)]  # not those that rounding may have put behind it
            assert len(likelier) < 20 and likelier.sum() < 0.8 * best.sum() + 1e-4


@pytest.mark.parametrize("name", ["pp2", "tp2-sp-bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(inputs: Path, tmp_path: Path, name: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, _train, arguments(inputs, *LAYOUTS[name], "--save", str(whole)), 4)
    run_ranks(2, _train, arguments(inputs, *LAYOUTS[name], "--save", str(parts)), 2)
    resume = arguments(inputs, *LAYOUTS[name], "--save", str(parts), "--load", str(parts))
    results = run_ranks(2, _train, resume, 4)
    assert results[0]["version"] == 4
    expected = load_file(whole / "huggingface" / "model.safetensors")
    found = load_file(parts / "huggingface" / "model.safetensors")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    steps = [json.loads(line)["step"] for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_several_updates_a_batch_and_a_reference_policy(inputs: Path, tmp_path: Path) -> None:
    more = [*LAYOUTS["pp2"], "--global-batch-size", "8", "--grpo-iterations", "2", "--grpo-kl-beta", "0.1"]
    results = run_ranks(2, _train, arguments(inputs, *more), 2)
    assert results[0]["version"] == 2 * 2 * 2
    assert all(result["differences"] == [0, 0] for result in results)
    first, second = results[0]["metrics"]
    # The first update of all starts at the reference itself; later ones have moved away from it.
    assert first["actor/kl_loss"] < second["actor/kl_loss"]
    assert second["actor/ppo_kl"] != 0


def test_replicas_train_on_the_old_values_of_their_own_responses(inputs: Path, tmp_path: Path) -> None:
    """Leaving responses out changes which replica gets which: the values must follow the responses."""
    stream = PromptStream(load_dataset(inputs / "train.jsonl"), seed=1234, prompts_per_step=4)
    # With groups of three, dropping the first and the last shifts the pairs that two replicas share out.
    informative = [sample.index for sample in stream.next_batch()[1:3]]
    (tmp_path / "reward.py").write_text(
        "def some(response, sample):\n"
        f"    return sum(map(str.isalpha, response)) / 10 if sample.index in {informative} else 0.0\n"
    )
    argv = arguments(inputs, "--grpo-iterations", "2")
    argv[argv.index("--grpo-group-size") + 1] = "3"
    argv[argv.index("--reward") + 1] = f"{tmp_path / 'reward.py'}:some"
    # One rank with micro-batches of two fills up to the same number of responses as two replicas do.
    (alone,) = run_ranks(1, _train, [*argv, "--kl-probe-responses", "4", "--micro-batch-size", "2"], 1)
    replicas = run_ranks(2, _train, [*argv, "--kl-probe-responses", "2"], 1)
    assert alone["metrics"][0]["train/zero_variance_groups"] == 0.5
    for result in replicas:
        for name in ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "logra/sketch_norm"):
            # fp32 sums in another order; ppo_kl is itself a difference of order 1e-4
            assert result["metrics"][0][name] == pytest.approx(alone["metrics"][0][name], rel=1e-3, abs=1e-6), name


def _fail_alone(rank: int, world_size: int, argv: list[str], where: str) -> str:
    """What each rank raises when one of them fails: rank 0 cannot write, or the engine of rank 1 refuses a packet."""
    run = build_run(parse_arguments(argv))
    try:
        start(run)
        if where == "engine" and rank == 1:
            run.engine._version = 7  # type: ignore[attr-defined]
        train_iteration(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_folder_that_cannot_be_written_ends_all_ranks(inputs: Path) -> None:
    argv = arguments(inputs, *LAYOUTS["pp2"], "--save", "/dev/null/run")
    first, second = run_ranks(2, _fail_alone, argv, "folder", timeout_s=60)
    assert first.startswith("NotADirectoryError") and second.startswith("RuntimeError: rank 0 failed")


def test_a_refused_packet_ends_all_ranks_or_brings_all_weights(inputs: Path) -> None:
    argv = arguments(inputs, *LAYOUTS["pp2"])
    first, second = run_ranks(2, _fail_alone, [*argv, "--sync", "factors"], "engine", timeout_s=60)
    assert first.startswith("RuntimeError: rank 1 failed") and second.startswith("PacketRefused")
    assert run_ranks(2, _fail_alone, [*argv, "--sync", "auto"], "engine", timeout_s=60) == ["nothing", "nothing"]
