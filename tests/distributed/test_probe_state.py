"""The probe reads: weights, masters, moments, sketches, random states and the model's modes are the same bits after it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.logra import LograOptimizer
from megatron_logra.train_step import (
    ProbeSettings,
    UpdateSettings,
    _build_probe,
    _choose_probe,
    _predict_kl,
)
from tests.distributed.layouts import Layout, build, make_responses
from tests.distributed.ranks import run_ranks
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen2", num_hidden_layers=2)
    return path


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _state(policy: Policy, optimizer: LograOptimizer) -> dict[str, Any]:
    """Everything that a step carries from one pass to the next."""
    modules = list(policy.model.modules())
    flags = ("training", "recompute_mlp", "recompute_input_layernorm", "recompute_pre_mlp_layernorm")
    tensors: dict[str, Tensor | None] = dict(policy.model.named_parameters())
    for target in policy.targets:
        tensors |= {f"{target.name} remainder": target.remainder, f"{target.name} master": target.master}
        tensors[f"{target.name} projection"] = target.require_projection().packed
    tensors |= {"moments": optimizer.moment2, "sketches": optimizer.buffer.flat, "finite": optimizer.row_is_finite}
    tensors |= {f"megatron {name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    tensors["torch"] = torch.get_rng_state()
    return {
        "bits": {name: _bits(tensor) for name, tensor in tensors.items() if tensor is not None},
        "numpy": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "python": random.getstate(),
        "modules": [[getattr(module, flag, None) for flag in flags] for module in modules],
        "requires_grad": [(weight.requires_grad, weight.grad is None) for _, weight in policy.model.named_parameters()],
        "hooks": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules),
        "config": dict(vars(policy.model.config)),
        "phase": policy.phase.current,
        "optimizer": (optimizer.num_updates, optimizer.last_update, optimizer.kl_per_square_norm),
    }


def _probe(rank: int, world_size: int, folder: Path, layout: Layout, master: str) -> dict[str, list[str]]:
    """What each estimator changed, by name."""
    policy, optimizer = build(folder, layout, torch.bfloat16, policy_options={"master": master})
    generator = torch.Generator().manual_seed(rank)
    optimizer.buffer.flat.copy_(torch.randn(optimizer.buffer.flat.shape, generator=generator) * 1e-3)
    optimizer.moment2.copy_(torch.rand(optimizer.moment2.shape, generator=generator))
    # Flags that differ from module to module, so that restoring them all to one value would show.
    policy.model.last.train()
    policy.model.last.decoder.layers[0].mlp.training = False
    changed = {}
    for estimator in ("jvp", "fisher"):
        probe = ProbeSettings(num_responses=2, estimator=estimator, draws=2)
        chosen = _choose_probe(policy, make_responses(), probe)
        before = _state(policy, optimizer)
        value, _ = _predict_kl(
            policy, chosen, _build_probe(policy, chosen), probe, optimizer.num_updates, UpdateSettings()
        )
        after = _state(policy, optimizer)
        assert value > 0 or not policy.groups.is_last_stage or (estimator == "fisher" and policy.groups.tp_rank > 0)
        bits = [name for name, old in before["bits"].items() if after["bits"].get(name) != old]
        changed[estimator] = bits + [name for name in before if name != "bits" and before[name] != after[name]]
    return changed


@pytest.mark.parametrize(
    ("layout", "master"),
    [
        (Layout(tp=2, sp=True, recompute="core_attn+mlp"), "split"),
        (Layout(pp=2, recompute="uniform"), "fp32"),
    ],
    ids=["tp2-selective-split", "pp2-uniform-fp32"],
)
def test_a_probe_leaves_everything_as_it_was(folder: Path, layout: Layout, master: str) -> None:
    for changed in run_ranks(2, _probe, folder, layout, master, timeout_s=60):
        assert changed == {"jvp": [], "fisher": []}
