"""The Fisher form of the predicted KL against the exact one, over layouts and for experts; the labels it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.mcore.fisher import sample_labels
from megatron_logra.mcore.logprobs import VocabShard
from megatron_logra.train_step import ProbeSettings
from tests.distributed.layouts import Layout, build, take_step
from tests.distributed.ranks import run_ranks
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "mixtral"):
        save_tiny_model(root / family, family, num_hidden_layers=2)
    return {path.name: path for path in root.iterdir()}


def _predict(
    rank: int, world_size: int, folder: Path, layout: Layout, estimator: str, draws: int, num_responses: int = 4
) -> tuple[dict[str, float], bool]:
    """Metrics of one update, and whether the estimate left sketches and projections to the update as they were."""
    policy, optimizer = build(folder, layout, torch.float64, logra_options={"projection_cache": True})
    outcome = take_step(
        policy,
        optimizer,
        probe=ProbeSettings(num_responses=num_responses // layout.dp, estimator=estimator, draws=draws, seed=5),
        measure=True,
    )
    return outcome.metrics, policy.phase.current == "off"


@pytest.mark.parametrize(("family", "num_responses"), [("qwen2", 2), ("mixtral", 1)])
def test_the_mean_over_draws_is_the_exact_value(folders: dict[str, Path], family: str, num_responses: int) -> None:
    """256 draws: within 3 standard errors of the forward-mode derivative, which has one chance in 370 to fail."""
    exact = run_ranks(1, _predict, folders[family], Layout(), "jvp", 1, num_responses)[0][0]
    found = run_ranks(1, _predict, folders[family], Layout(), "fisher", 256, num_responses)[0][0]
    error = found["logra/predicted_kl_std_error"]
    assert error < 0.15 * exact["logra/predicted_kl"]  # about sqrt(2 / 256) for one response, less for more
    assert abs(found["logra/predicted_kl"] - exact["logra/predicted_kl"]) < 3 * error
    # The update itself is the same, whatever predicted it.
    for name in ("logra/update_norm", "logra/actual_kl"):
        assert found[name] == pytest.approx(exact[name], rel=1e-12)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", Layout(tp=2, sp=True)),
        ("qwen2", Layout(pp=2, dp=2)),
        ("qwen2", Layout(cp=2, tp=2)),
        ("qwen2", Layout(pp=2, recompute="uniform")),
        ("mixtral", Layout(tp=2, sp=True, ep=2, etp=1)),
    ],
    ids=str,
)
def test_the_estimate_does_not_depend_on_the_layout(folders: dict[str, Path], family: str, layout: Layout) -> None:
    single = run_ranks(1, _predict, folders[family], Layout(), "fisher", 2)[0][0]
    for metrics, is_off in run_ranks(layout.world_size, _predict, folders[family], layout, "fisher", 2):
        assert is_off
        for name in ("logra/predicted_kl", "logra/predicted_kl_std_error"):
            assert metrics[name] == pytest.approx(single[name], rel=1e-9), name


def _labels(rank: int, world_size: int, logits: Tensor, uniform: Tensor) -> Tensor:
    """Labels of every token, with the vocabulary split over the ranks; the last 3 columns are padding."""
    group = dist.group.WORLD
    assert group is not None
    shard = VocabShard.of_rank(logits.shape[1] - 3, logits.shape[1], group)
    width = logits.shape[1] // world_size
    own = logits[:, rank * width : (rank + 1) * width]
    # Hidden states that are unit vectors make the output layer the logits themselves.
    hidden = torch.eye(len(logits), dtype=torch.float64)
    return sample_labels(hidden, own.T.contiguous(), uniform, shard=shard, temperature=0.7, chunk_size=4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_labels_follow_the_distribution_function(world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 24, dtype=torch.float64, generator=generator) * 3
    uniform = torch.rand(64, dtype=torch.float64, generator=generator)
    distribution = (logits[:, :-3] / 0.7).softmax(-1).cumsum(-1)
    expected = (distribution <= uniform[:, None]).sum(-1)
    results: list[Any] = run_ranks(world_size, _labels, logits, uniform)
    assert all(torch.equal(labels, expected) for labels in results)
    assert len(expected.unique()) > 5
