"""The step on CUDA against the same step on the CPU, with each implementation of the layers (needs CUDA)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_logra.hf.config import read_model_shape
from megatron_logra.hf.table import full_table
from tests.distributed.layouts import Layout, join_blocks, make_responses, run_steps
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

IMPLEMENTATIONS = [
    "local",
    pytest.param(
        "transformer_engine",
        marks=pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
    ),
]


def _steps(rank: int, device: str, folder: Path, dtype: torch.dtype, implementation: str) -> dict[str, Any]:
    """Run in a process of its own: whether Megatron sees CUDA is decided once."""
    import torch.distributed as dist

    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    options = {"transformer_impl": implementation}
    result = run_steps(0, 1, folder, Layout(), make_responses(), dtype=dtype, policy_options=options)
    for kind in ("weights", "sketches"):
        for blocks in result[kind].values():
            blocks[:] = [(rows, columns, block.cpu()) for rows, columns, block in blocks]
    return result


def _run(device: str, folder: Path, dtype: torch.dtype, implementation: str) -> dict[str, Any]:
    context = torch.multiprocessing.get_context("spawn")
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    os.environ |= environment
    try:
        with context.Pool(1) as pool:
            return pool.apply_async(_steps, (0, device, folder, dtype, implementation)).get(timeout=240)
    finally:
        for name in environment:
            del os.environ[name]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2)], ids=["fp32", "bf16"])
def test_a_step_on_cuda_is_the_step_on_the_cpu(
    tmp_path: Path, implementation: str, dtype: torch.dtype, tolerance: float
) -> None:
    save_tiny_model(tmp_path, "qwen3", scale=1.0, head_dim=32)
    expected = _run("cpu", tmp_path, torch.float32, "local")
    found = _run("cuda", tmp_path, dtype, implementation)
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        for name in ("logra/sketch_norm", "logra/weight_norm", "logra/update_norm", "logra/predicted_kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance), name
    shapes: dict[str, Any] = {
        name: size for entry in full_table(read_model_shape(tmp_path)) for name, size in entry.hf_shapes.items()
    }
    sketches = [join_blocks([result], "sketches", shapes) for result in (found, expected)]
    for name, sketch in sketches[1].items():
        assert (sketches[0][name] - sketch).norm() <= tolerance * sketch.norm(), name
