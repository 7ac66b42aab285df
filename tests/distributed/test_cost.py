"""What a step costs: bytes on the wire by formula, no memory of a weight's size, saved activations R wide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.build import build_optimizer
from megatron_logra.mcore.dense import DenseOptimizer
from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.dense import DenseSettings
from megatron_logra.optim.logra import LograOptimizer, LograSettings
from megatron_logra.optim.schedule import LearningRateSchedule
from megatron_logra.parallel.traffic import TrafficCounter
from megatron_logra.train_step import (
    ProbeSettings,
    UpdateSettings,
    _build_probe,
    _choose_probe,
    build_own_batches,
)
from tests.distributed.layouts import Layout, build_weights, make_responses, take_step
from tests.distributed.ranks import run_ranks
from tests.tiny_models import save_tiny_model

RANK, HIDDEN, FFN, LAYERS = 8, 128, 384, 2
HEADS, KV_HEADS, HEAD = 4, 2, 32
FP32 = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(
        path,
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        head_dim=HEAD,
        scale=1.0,
    )
    return path


def _step(policy: Policy, optimizer: LograOptimizer | None, dense: DenseOptimizer | None = None) -> None:
    take_step(
        policy,
        optimizer,
        controller=KLController(),
        settings=UpdateSettings(micro_batch_size=2, temperature=0.8),
        probe=ProbeSettings(num_responses=2),
        dense=dense,
    )


def _count(rank: int, world_size: int, folder: Path, layout: Layout) -> tuple[dict[Any, int], int]:
    """Bytes by (collective, group, purpose) of one step, and the tokens of its backward passes and its probe."""
    policy = build_weights(folder, layout, torch.float32)
    optimizer = build_optimizer(policy, LograSettings(rank=RANK))
    responses = make_responses()
    _, batches = build_own_batches(policy, responses, [0.0] * len(responses), micro_batch_size=2)
    with TrafficCounter(policy.groups.labels()) as counter:
        _step(policy, optimizer)
    records = {tuple(key): record.num_bytes for key, record in counter.records.items()}
    probe = _build_probe(policy, _choose_probe(policy, responses, ProbeSettings(num_responses=2)))
    return records, batches[0].tokens_BT.numel() * len(batches) + probe.tokens_BT.numel()


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2), Layout(tp=2, dp=2, sp=True), Layout(cp=2, tp=2)], ids=str)
def test_bytes_of_a_step_are_those_of_the_formulas(folder: Path, layout: Layout) -> None:
    column_rows = LAYERS * ((HEADS + 2 * KV_HEADS) * HEAD + 2 * FFN) // layout.tp
    row_rows = LAYERS * 2 * HIDDEN
    replicas = "dp" if layout.dp > 1 else "cp"
    for records, num_tokens in run_ranks(layout.world_size, _count, folder, layout):
        sketch = {key[:2]: value for key, value in records.items() if key[2] == "sketch"}
        assert sketch.pop(("all_reduce", "tp")) == row_rows * RANK * FP32
        ((collective, group), num_bytes) = sketch.popitem()
        assert collective == "all_reduce" and replicas in group
        assert num_bytes == (column_rows + row_rows) * RANK * FP32
        assert not sketch
        # Of a column-parallel input, only its projection is gathered, R wide: in backward and once in the probe.
        projected = {key: value for key, value in records.items() if key[2] == "projected"}
        assert projected.keys() == {("all_gather", "tp", "projected")}
        assert sum(projected.values()) == 2 * LAYERS * num_tokens * RANK * FP32


def _dense_bytes(rank: int, world_size: int, folder: Path, layout: Layout) -> tuple[int, int, int]:
    """Gradient bytes over DP: of sketches, of dense Adam, and of the targets in fp32."""
    policy = build_weights(folder, layout, torch.float32)
    optimizer = build_optimizer(policy, LograSettings(rank=RANK))
    with TrafficCounter(policy.groups.labels()) as sketched:
        _step(policy, optimizer)
    target_bytes = sum(target.weight.numel() for target in policy.targets) * FP32
    for _, weight in policy.model.named_parameters():
        weight.requires_grad_(True)
    for target in policy.targets:
        policy.model.get_submodule(target.name.removesuffix(".weight")).target = None  # type: ignore[assignment]
    policy.targets.clear()
    dense = DenseOptimizer(policy, DenseSettings(schedule=LearningRateSchedule(lr=1e-4)))
    with TrafficCounter(policy.groups.labels()) as adam:
        _step(policy, None, dense)
    return sketched.total_bytes(purpose="sketch"), adam.total_bytes(purpose="gradient"), target_bytes


def test_gradient_traffic_is_a_small_part_of_dense(folder: Path) -> None:
    for sketch_bytes, adam_bytes, target_bytes in run_ranks(2, _dense_bytes, folder, Layout(dp=2)):
        assert adam_bytes >= target_bytes
        assert sketch_bytes <= RANK / HIDDEN * target_bytes


class _LargeAllocations(TorchDispatchMode):
    """Records operations that return new memory of at least `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.found: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Forward mode has zeros without memory.
            if isinstance(tensor, Tensor) and not tensor._is_zerotensor():
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.num_bytes and storage._cdata not in known:
                    self.found.append((str(func), tuple(tensor.shape), tensor.dtype))
        return result


def _allocations(
    rank: int, world_size: int, folder: Path, layout: Layout, options: dict[str, Any]
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    policy = build_weights(folder, layout, torch.bfloat16, **options)
    optimizer = build_optimizer(policy, LograSettings(rank=RANK))
    assert all(policy.model.get_parameter(target.name).grad is None for target in policy.targets)
    smallest = min(target.weight.numel() * target.weight.element_size() for target in policy.targets)
    _step(policy, optimizer)
    with _LargeAllocations(smallest) as allocations:
        _step(policy, optimizer)
    assert all(policy.model.get_parameter(target.name).grad is None for target in policy.targets)
    return allocations.found


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that dwarf the activations of a few tokens, logits included."""
    path = tmp_path_factory.mktemp("wide")
    save_tiny_model(
        path,
        "llama",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_key_value_heads=4,
        head_dim=128,
        scale=1.0,
    )
    return path


@pytest.mark.parametrize("options", [{}, {"master": "fp32"}, {"shard_master": True}], ids=["split", "fp32", "divided"])
def test_nothing_of_a_weights_size_is_allocated_in_a_step(wide_folder: Path, options: dict[str, Any]) -> None:
    layout = Layout(dp=2) if options.get("shard_master") else Layout()
    for found in run_ranks(layout.world_size, _allocations, wide_folder, layout, options):
        assert found == []


def _saved(rank: int, world_size: int, folder: Path, layout: Layout) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Shapes that the autograd function of each target of the first layer saves, without the weight itself."""
    policy = build_weights(folder, layout, torch.float32)
    build_optimizer(policy, LograSettings(rank=RANK))
    length = 6 // layout.tp if layout.sp else 6
    saved = []
    with policy.phase.during("accumulate"):
        for target in policy.targets[:4]:
            linear = policy.model.get_submodule(target.name.removesuffix(".weight"))
            seq = length if target.sharding == "column" else 6
            x = torch.randn(seq, 2, target.weight.shape[1], requires_grad=True)
            shapes: list[tuple[int, ...]] = []
            _visit(linear(x)[0].grad_fn, lambda node: shapes.extend(_shapes(node, target.weight)))  # noqa: B023
            saved.append((target.name, shapes))
    return saved


def _visit(node: Any, visit: Callable[[Any], None]) -> None:
    if node is None:
        return
    visit(node)
    for following, _ in node.next_functions:
        _visit(following, visit)


def _shapes(node: Any, weight: Tensor) -> list[tuple[int, ...]]:
    tensors = getattr(node, "saved_tensors", ()) or ()
    return [tuple(tensor.shape) for tensor in tensors if tensor.data_ptr() != weight.data_ptr()]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sp=True)], ids=str)
def test_saved_activations_of_a_target_are_r_wide(folder: Path, layout: Layout) -> None:
    tokens = 6 * 2
    for saved in run_ranks(layout.world_size, _saved, folder, layout):
        assert len(saved) == 4
        for name, shapes in saved:
            is_column = "linear_qkv" in name or "linear_fc1" in name
            # Each rank projects its own share of the tokens of a column-parallel layer.
            assert shapes == [(tokens // layout.tp if is_column else tokens, RANK)], name
