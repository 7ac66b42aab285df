"""Tests of megatron_logra.metrics against scipy-free references, NeMo-RL's documented numbers and brute force."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from megatron_logra import metrics


def reduce_over_ranks(shares: list[metrics.Sums]) -> metrics.Sums:
    """Do to the vectors of all ranks what two all-reduces would."""
    vectors = torch.stack([share.to_vector() for share in shares])
    num_summed = shares[0].num_summed
    reduced = torch.cat([vectors[:, :num_summed].sum(0), vectors[:, num_summed:].amax(0)])
    return shares[0].from_vector(reduced)


def rollout(generator: random.Random, num_groups: int, first_group: int) -> dict[str, list[Any]]:
    """Return a random batch of 3 responses a group."""
    count = 3 * num_groups
    return {
        "rewards": [float(generator.random() < 0.4) for _ in range(count)],
        "prompt_lengths": [generator.randint(3, 90) for _ in range(count)],
        "response_lengths": [generator.randint(1, 200) for _ in range(count)],
        "finished": [int(generator.random() < 0.7) for _ in range(count)],
        "valid": [int(generator.random() < 0.9) for _ in range(count)],
        "group": [first_group + index // 3 for index in range(count)],
    }


def test_unequal_ranks_give_the_statistics_of_the_whole_batch() -> None:
    generator = random.Random(7)
    parts = [rollout(generator, num_groups, 100 * rank) for rank, num_groups in enumerate((1, 5, 0, 12))]
    whole = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    result = reduce_over_ranks([metrics.compute_rollout_sums(**part) for part in parts]).to_metrics()

    kept = [reward for reward, valid in zip(whole["rewards"], whole["valid"], strict=True) if valid]
    mean = math.fsum(kept) / len(kept)
    distinct: dict[int, set[float]] = {}
    for group, reward, valid in zip(whole["group"], whole["rewards"], whole["valid"], strict=True):
        distinct.setdefault(group, set()).update({reward} if valid else set())
    lengths, count = whole["response_lengths"], len(whole["rewards"])
    expected = {
        "train/reward": mean,
        "train/reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in kept) / len(kept)),
        "train/num_failed_rewards": count - len(kept),
        "train/zero_variance_groups": sum(len(values) < 2 for values in distinct.values()) / len(distinct),
        "response_length/mean": sum(lengths) / count,
        "response_length/max": max(lengths),
        "response_length/min": min(lengths),
        "response_length/clip_ratio": whole["finished"].count(0) / count,
        "prompt_length/mean": sum(whole["prompt_lengths"]) / count,
        "perf/total_num_tokens": sum(lengths) + sum(whole["prompt_lengths"]),
    }
    # A few dozen float64 additions of numbers up to 200: relative error below 1e-13.
    assert result == pytest.approx(expected, rel=1e-12)


def test_agreement_equals_the_figures_nemo_rl_documents() -> None:
    # guides/grpo.md, "KL Divergence Error": log p_gen = -5, log p_policy = -15 gives exp(-10) + 10 - 1, about 9;
    # the other direction, policy_kl_error, would give 22,015.
    sums = metrics.compute_agreement_sums([-5.0], [-15.0])
    result = sums.to_metrics()
    assert result["gen_kl_error"] == pytest.approx(math.exp(-10) + 9, rel=1e-12)
    assert result["token_mult_prob_error"] == pytest.approx(math.exp(10), rel=1e-12)
    assert result["logra/mismatch"] == pytest.approx(10, rel=1e-12)


def test_gen_kl_error_estimates_the_exact_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    gen_V = torch.log_softmax(torch.randn(20, generator=generator, dtype=torch.float64), -1)
    train_V = torch.log_softmax(gen_V + 0.3 * torch.randn(20, generator=generator, dtype=torch.float64), -1)
    # The expectation of the estimator under p_gen, summed out exactly, is KL(p_gen || p_train).
    estimate = (gen_V.exp() * metrics.gen_kl_error(gen_V, train_V)).sum()
    exact = (gen_V.exp() * (gen_V - train_V)).sum()
    torch.testing.assert_close(estimate, exact, rtol=1e-12, atol=0)


def test_gen_kl_error_is_exact_for_tiny_differences() -> None:
    # exp(r) - r - 1 = r^2 / 2 + r^3 / 6 + ...; at r = 1e-4 the float64 error of expm1(r) - r is about 1e-20.
    r = 1e-4
    value = metrics.gen_kl_error(
        torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.0 + r], dtype=torch.float64)
    )
    assert float(value) == pytest.approx(r**2 / 2 + r**3 / 6, rel=1e-6)


def test_agreement_over_micro_batches_weighs_tokens_not_micro_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    gen_N = -torch.rand(50, generator=generator)
    train_N = gen_N + 0.1 * torch.randn(50, generator=generator)
    finished_N = torch.rand(50, generator=generator) < 0.5
    shares = [metrics.Sums(), metrics.Sums()]
    for start, stop, rank in ((0, 3, 0), (3, 40, 1), (40, 50, 0)):
        part = slice(start, stop)
        shares[rank].merge_(metrics.compute_agreement_sums(gen_N[part], train_N[part], finished_N[part]))
    result = reduce_over_ranks(shares).to_metrics()
    pairs = list(zip(gen_N.tolist(), train_N.tolist(), finished_N.tolist(), strict=True))
    errors = [math.exp(abs(gen - train)) for gen, train, _ in pairs]
    mismatches = [gen - train for gen, train, finished in pairs if finished]
    assert result["token_mult_prob_error"] == pytest.approx(math.fsum(errors) / 50, rel=1e-12)
    assert result["logra/mismatch"] == pytest.approx(math.fsum(mismatches) / len(mismatches), rel=1e-12)


def test_nothing_to_average_is_left_out_and_nan_is_kept() -> None:
    sums = metrics.Sums()
    sums.add_mean_("empty", [])
    sums.add_max_("empty_max", [])
    sums.add_mean_("masked", [math.nan, 2.0], [0, 1])
    sums.add_mean_("bad", [math.nan, 2.0])
    sums.add_max_("bad_max", [1.0, math.nan])
    sums.add_min_("low", [3.0, -4.0])
    result = reduce_over_ranks([sums, sums]).to_metrics()
    assert set(result) == {"masked", "bad", "bad_max", "low"}
    assert result["masked"] == 2.0
    assert result["low"] == -4.0
    assert math.isnan(result["bad"])
    assert not math.isfinite(result["bad_max"])


def test_ranks_with_different_names_are_found_out() -> None:
    first, second = metrics.Sums(), metrics.Sums()
    first.add_mean_("a", [1.0])
    second.add_mean_("b", [1.0])
    with pytest.raises(ValueError, match="different metric names"):
        reduce_over_ranks([first, second])
    with pytest.raises(ValueError, match="do not fit"):
        first.add_mean_("a", [1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("successes", "total", "confidence"), [(8, 100, 0.95), (57, 100, 0.95), (3, 7, 0.8), (99, 100, 0.99)]
)
def test_wilson_interval_solves_its_defining_equation(successes: int, total: int, confidence: float) -> None:
    # Both ends p satisfy |share - p| = z sqrt(p (1 - p) / n), with z the two-sided normal quantile.
    share = successes / total
    for end in metrics.wilson_interval(successes, total, confidence):
        z = abs(share - end) / math.sqrt(end * (1 - end) / total)
        assert math.erf(z / math.sqrt(2)) == pytest.approx(confidence, abs=1e-12)


def test_wilson_interval_at_the_ends_and_outside() -> None:
    # Newcombe 1998, table I: 0 of 20 gives 0 to 0.1611 and 1 of 29 gives 0.0061 to 0.1718 (score, no correction).
    assert metrics.wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert metrics.wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert metrics.wilson_interval(20, 20) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    for successes, total in ((0, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="interval needs"):
            metrics.wilson_interval(successes, total)
    with pytest.raises(ValueError, match="confidence"):
        metrics.wilson_interval(1, 2, confidence=95)


def test_accuracy_reads_as_a_sentence() -> None:
    result = metrics.compute_accuracy_metrics(57, 100)
    assert metrics.format_accuracy(result) == "57.0 % (57 of 100, 95 % interval 47.2 to 66.3 %)"


def test_throughput_is_per_rank() -> None:
    assert metrics.compute_throughput(1200, step_s=3.0, num_ranks=4) == {"perf/throughput": 100.0}
    with pytest.raises(ValueError, match="step_s > 0"):
        metrics.compute_throughput(1200, step_s=0.0, num_ranks=4)


def test_timers_add_nest_and_survive_errors() -> None:
    now_s = 0.0
    num_synchronised = 0

    def synchronize() -> None:
        nonlocal num_synchronised
        num_synchronised += 1

    timers = metrics.Timers(synchronize=synchronize, clock=lambda: now_s)
    with timers("step"):
        for seconds in (1.5, 2.5):
            with timers("gen"):
                now_s += seconds
        now_s += 1.0
        assert timers.elapsed_s("step") == 5.0
        with pytest.raises(RuntimeError), timers("reward"):
            now_s += 0.25
            raise RuntimeError
        with pytest.raises(ValueError, match="already running"), timers("step"):
            pass
    assert num_synchronised > 0
    assert timers.collect() == {"timing_s/gen": 4.0, "timing_s/reward": 0.25, "timing_s/step": 5.25}
    assert timers.collect() == {}
