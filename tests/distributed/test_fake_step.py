"""A whole step over layers of a 7B model at TP 8 runs on tensors without values, and allocates what the formulas say."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_logra.hf.config import ModelShape
from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.build import build_optimizer, build_policy
from megatron_logra.mcore.fake import fake_world
from megatron_logra.mcore.transformer_config import PolicySettings
from megatron_logra.optim.logra import LograSettings
from megatron_logra.rl.batching import Response
from megatron_logra.train_step import ProbeSettings, UpdateSettings, train_step

RANK, TP, LAYERS, HIDDEN, FFN = 256, 8, 4, 4096, 11008
LLAMA_7B_LAYERS = ModelShape(
    family="llama",
    num_layers=LAYERS,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    vocab_size=32000,
    max_position_embeddings=4096,
    layernorm_epsilon=1e-5,
    rotary_base=10000.0,
    rope_scaling=None,
    qkv_bias=False,
    qk_layernorm=False,
    tie_embeddings=False,
    dtype=torch.bfloat16,
)


def _responses(count: int, prompt: int, length: int) -> list[Response]:
    return [
        Response(
            prompt_ids=[1] * prompt,
            response_ids=[2] * length,
            generation_logprobs=[-1.0] * length,
            reward=float(number % 2),
            finished=True,
            sample_index=0,
            group=0,
        )
        for number in range(count)
    ]


def _step(world_rank: int) -> dict[str, Any]:
    with fake_world(rank=world_rank, world_size=TP, tensor_model_parallel_size=TP) as groups:
        settings = PolicySettings(
            dtype=torch.bfloat16,
            seq_length=1024,
            sequence_parallel=True,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        policy = build_policy(LLAMA_7B_LAYERS, settings, groups)
        optimizer = build_optimizer(policy, LograSettings(rank=RANK))
        factors: dict[str, tuple[int, ...]] = {}
        train_step(
            policy,
            optimizer,
            KLController(),
            _responses(4, prompt=128, length=384),
            [-1.0, 1.0, -1.0, 1.0],
            settings=UpdateSettings(micro_batch_size=2),
            probe=ProbeSettings(num_responses=2),
            on_factor=lambda target, factor: factors.update({target.name: tuple(factor.shape)}),
            measure=True,
        )
        values = [optimizer.buffer.flat, optimizer.moment2, *(target.weight.data for target in policy.targets)]
        return {
            "fake": all(isinstance(value, FakeTensor) for value in values),
            "sketch": tuple(optimizer.buffer.flat.shape),
            "weights": sum(target.weight.numel() for target in policy.targets),
            "gradients": [name for name, weight in policy.model.named_parameters() if weight.grad is not None],
            "factors": factors,
            "updates": optimizer.num_updates,
        }


def test_a_step_of_7b_layers_runs_on_fake_tensors_at_tp_8() -> None:
    with multiprocessing.get_context("fork").Pool(1, torch.set_num_threads, (1,)) as pool:
        result = pool.apply_async(_step, (3,)).get(timeout=300)
    column_rows = (3 * HIDDEN + 2 * FFN) // TP
    row_rows = 2 * HIDDEN
    assert result["fake"]
    assert result["updates"] == 1
    assert result["sketch"] == (LAYERS * (column_rows + row_rows), RANK)
    assert result["weights"] == LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN) // TP
    assert result["gradients"] == []
    assert len(result["factors"]) == 4 * LAYERS
    assert set(result["factors"].values()) == {(3 * HIDDEN // TP, RANK), (2 * FFN // TP, RANK), (HIDDEN, RANK)}
