"""What cannot be predicted ends the step on all ranks, soon, by name and with no weight changed; odd probes are right.

Every case has 60 s for all its ranks: a rank left waiting for another one would be found by that limit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.initialize import shutdown_model_parallel
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.tangent import compute_predicted_kl
from megatron_logra.optim.logra import LograOptimizer
from megatron_logra.rl.batching import Response
from megatron_logra.train_step import (
    ProbeSettings,
    _build_probe,
    _choose_probe,
    build_own_batches,
    check_forward_mode,
)
from tests.distributed.layouts import Layout, build, make_responses, take_step
from tests.distributed.ranks import run_ranks
from tests.tiny_models import save_tiny_model

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "llama", num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough layers for two chunks on each of two stages."""
    path = tmp_path_factory.mktemp("deep")
    save_tiny_model(path, "llama", num_hidden_layers=4)
    return path


def _failure(action: Callable[[], Any]) -> str:
    """Kind and message of what `action` raises, or nothing."""
    try:
        action()
    except (ArithmeticError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _step(policy: Policy, optimizer: LograOptimizer, estimator: str = "jvp") -> str:
    """Failure of a step, which must leave weights, remainders and the count of updates alone."""
    optimizer.buffer.zero_()
    kept = [tensor for target in policy.targets for tensor in (target.weight, target.remainder) if tensor is not None]
    before, num_updates = [tensor.clone() for tensor in kept], optimizer.num_updates
    probe = ProbeSettings(num_responses=2, estimator=estimator, draws=1)
    responses = make_responses(num_prompts=1)
    failure = _failure(
        lambda: take_step(policy, optimizer, responses=responses, controller=KLController(), probe=probe)
    )
    unchanged = all(torch.equal(old, new) for old, new in zip(before, kept, strict=True))
    assert (unchanged and optimizer.num_updates == num_updates) == bool(failure)
    return failure


def _poison(rank: int, world_size: int, folder: Path, layout: Layout) -> list[str]:
    """Failures of steps whose probe, on the last rank only, meets one output weight that is not a number."""
    policy, optimizer = build(folder, layout, torch.bfloat16)
    healthy = policy.output_weight
    failures = []
    for value in (math.nan, math.inf):

        def poisoned(value: float = value) -> Tensor:
            weight = healthy().clone()
            if rank == world_size - 1 and policy.phase.current in ("tangent", "score"):
                weight[3, 5] = value
            return weight

        policy.output_weight = poisoned  # type: ignore[method-assign]
        failures += [_step(policy, optimizer, estimator) for estimator in ("jvp", "fisher")]
    return failures


@pytest.mark.parametrize(
    ("layout", "replica"), [(Layout(tp=2), 0), (Layout(dp=2), 1), (Layout(pp=2), 0)], ids=["tp2", "dp2", "pp2"]
)
def test_a_logit_that_is_not_finite_ends_the_step_on_all_ranks(folder: Path, layout: Layout, replica: int) -> None:
    for failures in run_ranks(2, _poison, folder, layout, timeout_s=LIMIT_S):
        assert len(failures) == 4
        for failure in failures:
            assert failure.startswith("FloatingPointError: non-finite values in this step, nothing was applied")
            assert "logra/predicted_kl = nan" in failure
            assert (
                f"The logits of the probe, or their derivative along the update, are not finite on data-parallel rank {replica}."
                in failure
            )


class _WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _on_mlp(operation: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Put an operation before the last linear of a layer's MLP."""
    return lambda layer: layer.mlp.linear_fc2.register_forward_pre_hook(lambda _, inputs: (operation(inputs[0]),))


def _detach_layer(layer: Any) -> Any:
    def detach(_: object, __: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        # A stage whose output needs no gradient would end the training pass first.
        return None if torch.is_grad_enabled() else (output[0].detach(), *output[1:])

    return layer.register_forward_hook(detach)


# What is put into the last layer of a stage, and what the message must say of it.
FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no forward mode": (_on_mlp(_WithoutForwardMode.apply), "You must implement the jvp"),
    "tangent dropped in the MLP": (_on_mlp(Tensor.detach), "mlp.down_proj has no tangent"),
    "tangent dropped after the layer": (_detach_layer, "output"),
}


def _break(rank: int, world_size: int, folder: Path, layout: Layout) -> dict[tuple[int, str], list[str]]:
    """Failures by (stage, fault) with the fault in the last layer of that stage: of a step, and of the check at start."""
    policy, optimizer = build(folder, layout, torch.bfloat16)
    check_forward_mode(policy)
    failures = {}
    for stage in range(layout.pp):
        for name, (install, _) in FAULTS.items():
            hook = install(policy.model.last.decoder.layers[-1]) if policy.groups.pp_rank == stage else None
            failures[stage, name] = [_step(policy, optimizer), _failure(lambda: check_forward_mode(policy))]
            if hook is not None:
                hook.remove()
    # The schedule came to its end each time, so the ranks are still in step with each other.
    assert _step(policy, optimizer) == ""
    return failures


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(pp=2), Layout(pp=2, vpp=2)], ids=str)
def test_a_derivative_that_ends_in_one_stage_ends_the_step_on_all_ranks(
    folder: Path, deep_folder: Path, layout: Layout
) -> None:
    ranks = run_ranks(2, _break, deep_folder if layout.vpp else folder, layout, timeout_s=LIMIT_S)
    for rank, failures in enumerate(ranks):
        assert len(failures) == layout.pp * len(FAULTS)
        for (stage, name), messages in failures.items():
            last_layer = (2 if layout.vpp else 0) + (stage if layout.pp == 2 else 1)
            for message in messages:
                if rank // layout.tp != stage:
                    assert message.startswith(f"RuntimeError: rank {stage * layout.tp} failed"), message
                    continue
                assert message.startswith("ForwardModeError: the KL of the update cannot be predicted"), message
                assert f"pipeline stage {stage}" in message and FAULTS[name][1] in message
                assert "nothing was applied" in message and "--kl-estimator fisher" in message
                assert name == "tangent dropped after the layer" or f"layer {last_layer}, " in message


def _responses_of(lengths: Sequence[int]) -> list[Response]:
    """Responses with so many generated tokens each."""
    rng = random.Random(7)
    tokens = [[rng.randrange(130) for _ in range(length)] for length in lengths]
    return [
        replace(response, response_ids=ids, generation_logprobs=[-2.0] * len(ids))
        for response, ids in zip(make_responses(), tokens, strict=True)
    ]


def _predict(
    rank: int, world_size: int, folder: Path, layout: Layout, lengths: Sequence[int], num_responses: int
) -> list[dict[str, float]]:
    """Metrics of a step for each estimator."""
    metrics = []
    for estimator in ("jvp", "fisher"):
        policy, optimizer = build(folder, layout, torch.float64)
        probe = ProbeSettings(num_responses=num_responses // layout.dp, estimator=estimator, draws=2)
        responses = _responses_of(lengths)
        metrics.append(take_step(policy, optimizer, responses=responses, probe=probe, measure=True).metrics)
        shutdown_model_parallel()
    return metrics


def test_a_replica_without_generated_tokens_in_its_probe_adds_nothing(folder: Path) -> None:
    lengths = [0, 0, 9, 0, 0, 0, 0, 0]
    (alone,) = run_ranks(1, _predict, folder, Layout(), lengths, 4, timeout_s=LIMIT_S)
    assert all(metrics["logra/predicted_kl"] > 0 for metrics in alone)
    for replica in run_ranks(2, _predict, folder, Layout(dp=2), lengths, 4, timeout_s=LIMIT_S):
        for metrics, expected in zip(replica, alone, strict=True):
            for name in ("logra/predicted_kl", "logra/actual_kl", "logra/alpha"):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-10), name


def _choose(rank: int, world_size: int, folder: Path) -> tuple[list[tuple[float, float]], str]:
    """Predicted KL of probes next to that of what they should be, and the failure of one that cannot be."""
    policy, optimizer = build(folder, Layout(tp=2), torch.float64)
    generator = torch.Generator().manual_seed(rank)
    optimizer.buffer.flat.copy_(torch.randn(optimizer.buffer.flat.shape, generator=generator) * 1e-3)
    silent, long, short = _responses_of([0, 17, 3, *[0] * 5])[:3]
    cut = replace(long, response_ids=long.response_ids[:4], generation_logprobs=long.generation_logprobs[:4])
    pairs = []
    for responses, number, max_tokens, expected in (
        ([silent, long, short], 1, 99, [long]),
        ([silent, silent, short, long], 2, 99, [short, long]),
        (
            [long, short],
            2,
            7,
            [replace(cut, response_ids=long.response_ids[:3], generation_logprobs=[-1.0] * 3), short],
        ),
        ([long], 1, 4, [cut]),
    ):
        chosen = _choose_probe(policy, responses, ProbeSettings(num_responses=number, max_tokens=max_tokens))
        _, (batch,) = build_own_batches(policy, expected, [0.0] * len(expected))
        found = compute_predicted_kl(policy, _build_probe(policy, chosen), temperature=0.8)
        pairs.append((found.item(), compute_predicted_kl(policy, batch, temperature=0.8).item()))
    probe = ProbeSettings(num_responses=4, max_tokens=3)
    return pairs, _failure(lambda: take_step(policy, optimizer, probe=probe))


def test_the_probe_skips_responses_without_tokens_and_is_cut_to_its_bound(folder: Path) -> None:
    for pairs, failure in run_ranks(2, _choose, folder, timeout_s=LIMIT_S):
        for found, expected in pairs:
            assert found > 0 and found == pytest.approx(expected, rel=1e-12)
        assert failure == "ValueError: kl_probe_max_tokens 3 gives no token to some of the 4 responses"
