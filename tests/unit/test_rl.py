"""Advantages, losses, batching and the prompt stream against slow references."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from megatron_logra.rl.advantages import group_advantages
from megatron_logra.rl.batching import (
    Response,
    attach_logprobs,
    build_microbatches,
    count_valid_tokens,
    shard_context,
    split_data_parallel,
)
from megatron_logra.rl.data import PromptStream, Sample, load_dataset
from megatron_logra.rl.losses import grpo_token_loss
from megatron_logra.rl.rewards import exact_number, math_verify_reward, score_responses


def _responses(number: int = 8, seed: int = 0) -> list[Response]:
    rng = random.Random(seed)
    made = []
    for index in range(number):
        length = rng.randint(1, 9)
        made.append(
            Response(
                prompt_ids=[rng.randrange(50) for _ in range(rng.randint(1, 6))],
                response_ids=[rng.randrange(50) for _ in range(length)],
                generation_logprobs=[-rng.random() for _ in range(length)],
                reward=rng.random(),
                finished=rng.random() < 0.5,
                sample_index=index // 4,
                group=index // 4,
                valid=index != 2,
            )
        )
    return made


def test_group_advantages() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.3, 0.9, float("nan"), 0.1]])
    valid = torch.ones(3, 4, dtype=torch.bool)
    valid[2, 2] = False
    found = group_advantages(rewards.double(), valid, epsilon=1e-6)
    for row in (0, 2):
        values = [float(r) for r, v in zip(rewards[row], valid[row], strict=True) if v]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
        wanted = iter([(x - mean) / (deviation + 1e-6) for x in values])
        for column in range(4):
            assert found[row, column] == pytest.approx(next(wanted) if valid[row, column] else 0.0, rel=1e-6)
    assert torch.equal(found[1], torch.zeros(4, dtype=torch.float64))


def test_loss_and_gradient_of_clipped_ratio_and_k3() -> None:
    generator = torch.Generator().manual_seed(0)
    logprob, old, reference = (torch.randn(200, generator=generator, dtype=torch.float64) * 0.3 - 2 for _ in range(3))
    advantage = torch.randn(200, generator=generator, dtype=torch.float64)
    logprob.requires_grad_()
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.1}
    loss, sums = grpo_token_loss(logprob, old, advantage, reference_logprobs_T=reference, **options)

    def slow(lp: float, o: float, a: float, r: float) -> tuple[float, bool]:
        ratio = math.exp(lp - o)
        clipped = min(max(ratio, 0.8), 1.28)
        policy = -min(ratio * a, clipped * a)
        return policy + 0.1 * (math.exp(r - lp) - (r - lp) - 1), -clipped * a > -ratio * a

    rows = list(zip(logprob.tolist(), old.tolist(), advantage.tolist(), reference.tolist(), strict=True))
    assert loss.tolist() == pytest.approx([slow(*row)[0] for row in rows], rel=1e-12)
    assert sums["pg_clipfrac"] == sum(slow(*row)[1] for row in rows)
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    h = 1e-6
    for index, (lp, o, a, r) in enumerate(rows):
        if min(abs(math.exp(lp - o) - edge) for edge in (0.8, 1.28)) > 1e-4:
            difference = (slow(lp + h, o, a, r)[0] - slow(lp - h, o, a, r)[0]) / (2 * h)
            assert gradient[index] == pytest.approx(difference, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_micro_batches_list_each_generated_token_once(micro_batch_size: int) -> None:
    responses = _responses()
    advantages = [float(index) for index in range(8)]
    batches = build_microbatches(responses, advantages, micro_batch_size=micro_batch_size, pad_multiple=4)
    found = []
    for batch in batches:
        length = batch.tokens_BT.shape[1]
        assert length % 4 == 0
        flat = batch.tokens_BT.t().reshape(-1)  # sequence first, as Megatron's hidden states
        assert batch.entry_index_N.tolist() == list(range(batch.num_batch_entries))
        for hidden, target, sequence, advantage in zip(
            batch.hidden_index_N, batch.target_N, batch.sequence_N, batch.advantage_N, strict=True
        ):
            assert hidden % micro_batch_size == sequence
            assert flat[hidden + micro_batch_size] == target  # one position later in the same row
            found.append((int(batch.response_index_B[sequence]), int(target), float(advantage)))
    wanted = [
        (index, token, float(index))
        for index, response in enumerate(responses)
        if response.valid
        for token in response.response_ids
    ]
    assert found == wanted
    assert count_valid_tokens(responses) == len(wanted)


def test_data_parallel_shares_are_a_partition_with_balanced_tokens() -> None:
    responses = _responses(16, seed=4)
    shares = [split_data_parallel(responses, rank, 4) for rank in range(4)]
    assert sorted(index for share in shares for index in share) == list(range(16))
    tokens = [sum(responses[index].num_tokens for index in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(response.num_tokens for response in responses)


def test_prompt_stream_covers_each_epoch_and_resumes() -> None:
    samples = [Sample(index, [{"role": "user", "content": str(index)}], "0") for index in range(10)]
    stream = PromptStream(samples, seed=1, prompts_per_step=4)
    drawn = [sample.index for _ in range(5) for sample in stream.next_batch()]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    again = PromptStream(samples, seed=1, prompts_per_step=4)
    for _ in range(2):
        again.next_batch()
    resumed = PromptStream(samples, seed=1, prompts_per_step=4)
    resumed.load_state_dict(again.state_dict())
    assert [s.index for s in resumed.next_batch()] == drawn[8:12]
    with pytest.raises(ValueError, match="seed"):
        PromptStream(samples, seed=2, prompts_per_step=4).load_state_dict(again.state_dict())


def test_data_sets_in_both_formats(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"q": f"What is {n}?", "a": n, "level": "easy"} for n in range(3)]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    options = {"prompt_key": "q", "answer_key": "a", "system_prompt": "Be short."}
    lines, table = (load_dataset(tmp_path / name, **options) for name in ("d.jsonl", "d.parquet"))
    assert [(s.messages, s.answer, s.extra) for s in lines] == [(s.messages, s.answer, s.extra) for s in table]
    assert lines[1].messages[0] == {"role": "system", "content": "Be short."}
    assert lines[1].answer == "1" and lines[1].extra == {"level": "easy"}


def _sample(answer: str) -> Sample:
    return Sample(0, [{"role": "user", "content": "?"}], answer)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("17 + 25 = 42", "42", 1.0),
        ("The answer is 1,250.0", "1250", 1.0),
        ("42 or 43", "42", 0.0),
        ("it is -7", "-7", 1.0),
        ("10-7", "7", 1.0),
        ("nothing", "1", 0.0),
        ("so 3", "2 + 1 = 3 #### 3", 1.0),
    ],
)
def test_exact_number(response: str, answer: str, reward: float) -> None:
    assert exact_number(response, _sample(answer)) == reward


def test_math_verify_reads_latex() -> None:
    assert math_verify_reward(r"Hence $\boxed{\frac{1}{2}}$.", _sample("0.5")) == 1.0
    assert math_verify_reward(r"Hence $\boxed{\frac{1}{3}}$.", _sample("0.5")) == 0.0


def test_a_failing_reward_is_named_and_the_others_are_kept() -> None:
    def reward(response: str, sample: Sample) -> float:
        if response == "raise":
            raise RuntimeError("broken")
        return float(response)

    rewards, failures = score_responses(reward, [(text, _sample("1")) for text in ("1", "raise", "nan", "0.5")])
    assert rewards == [1.0, 0.0, 0.0, 0.5]
    assert [failure.position for failure in failures] == [1, 2]
    assert "broken" in failures[0].message and "nan" in failures[1].message


@pytest.mark.parametrize("size", [2, 3, 4])
def test_context_parallel_parts_are_a_balanced_partition(size: int) -> None:
    """Every token and entry has one rank; a rank holds chunk `r` and chunk `2 size - 1 - r` of each sequence."""
    (batch,) = build_microbatches(_responses(), [0.5] * 8, micro_batch_size=8, pad_multiple=2 * size)
    parts = [shard_context(batch, rank, size) for rank in range(size)]
    chunk = batch.tokens_BT.shape[1] // (2 * size)
    for rank, part in enumerate(parts):
        first, second = part.positions_BT[0].split(chunk)
        assert first.tolist() == list(range(rank * chunk, (rank + 1) * chunk))
        assert second[0] == (2 * size - 1 - rank) * chunk and second[-1] == (2 * size - rank) * chunk - 1
        assert torch.equal(part.tokens_BT, batch.tokens_BT.gather(1, part.positions_BT))
        assert part.num_batch_entries == batch.num_entries
        assert torch.equal(part.target_N, batch.target_N[part.entry_index_N])
        # The predicting position, from the rank's own sequence-first index, is the one in the whole batch.
        own_position = part.positions_BT[0][part.hidden_index_N // 8]
        assert torch.equal(own_position * 8 + part.sequence_N, batch.hidden_index_N[part.entry_index_N])
    assert torch.cat([part.entry_index_N for part in parts]).sort().values.tolist() == list(range(batch.num_entries))
    values = [[part.advantage_N * 2] for part in parts]
    filled = [attach_logprobs(_responses(), [p], v, kind="old_logprobs") for p, v in zip(parts, values, strict=True)]
    for responses in zip(*filled, strict=True):
        total = [sum(numbers) for numbers in zip(*(response.old_logprobs for response in responses), strict=True)]
        assert total == [1.0 if responses[0].valid else 0.0] * len(responses[0].response_ids)


def test_a_sequence_that_cannot_be_cut_into_chunks_is_an_error() -> None:
    (batch,) = build_microbatches(_responses(), [0.0] * 8, micro_batch_size=8, pad_multiple=5)
    with pytest.raises(ValueError, match=r"context_parallel_size 4 chunks: \d+ % 8 = "):
        shard_context(batch, 0, 4)
