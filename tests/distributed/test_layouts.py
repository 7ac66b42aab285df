"""One update must not depend on the layout: two steps in every layout against the same steps on one rank.

Tolerances: fp32 sums of a few hundred products in another order differ by about 1e-7 relative in a tensor's norm, and
two steps carry that through a KL (quadratic) and a division, hence 1e-5. In fp64 the same chain stays below 1e-10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_logra.hf.config import read_model_shape
from megatron_logra.hf.table import full_table
from tests.distributed.layouts import Layout, join_blocks, make_responses, run_steps
from tests.distributed.ranks import run_ranks
from tests.tiny_models import save_tiny_model

FAMILY = "qwen2"
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, sp=True, recompute=True, micro_batch_size=2),
    Layout(tp=2, dp=2, sp=True),
    Layout(pp=4),
    Layout(micro_batch_size=2),
    Layout(micro_batch_size=4),
    Layout(recompute=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, FAMILY)
    return path


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def reference(folder: Path, request: pytest.FixtureRequest) -> tuple[torch.dtype, dict[str, Any]]:
    results = run_ranks(1, _run, folder, Layout(), request.param)
    return request.param, results[0] | {"whole": join_blocks(results, "weights", _shapes(folder))}


def _run(rank: int, world_size: int, folder: Path, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    return run_steps(rank, world_size, folder, layout, make_responses(), dtype=dtype)


def _shapes(folder: Path) -> dict[str, Any]:
    return {name: size for entry in full_table(read_model_shape(folder)) for name, size in entry.hf_shapes.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_makes_the_same_update(
    folder: Path, reference: tuple[torch.dtype, dict[str, Any]], layout: Layout
) -> None:
    dtype, expected = reference
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    results = run_ranks(layout.world_size, _run, folder, layout, dtype)

    for result in results:
        assert len(result["steps"]) == 2
        for found, wanted in zip(result["steps"], expected["steps"], strict=True):
            assert found.keys() == wanted.keys()
            for name in wanted:
                assert found[name] == pytest.approx(wanted[name], rel=tolerance), name
    # The ranks decide by reduced numbers only, so they agree to the last bit.
    assert all(result["steps"] == results[0]["steps"] for result in results)

    weights = join_blocks(results, "weights", _shapes(folder))
    assert weights.keys() == expected["whole"].keys()
    for name, weight in weights.items():
        difference = (weight - expected["whole"][name]).norm() / expected["whole"][name].norm()
        assert difference < tolerance, name


def test_the_prediction_is_the_kl_that_happens(reference: tuple[torch.dtype, dict[str, Any]]) -> None:
    # The remainder of the expansion is of third order: at a KL of 3e-4 nats it is a few per cent at most.
    for step in reference[1]["steps"]:
        assert step["logra/predicted_kl"] > 0
        assert 0.9 < step["logra/actual_over_predicted_kl"] < 1.1
