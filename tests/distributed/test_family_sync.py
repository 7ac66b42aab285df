"""Factors of every family's update bring the embedded engine to the trainer's weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.weights import read_served, stage_tables
from megatron_logra.rollout.embedded import EmbeddedEngine
from megatron_logra.sync.gather import ShardSizes
from megatron_logra.sync.packet import PacketHeader
from megatron_logra.sync.sender import PolicySender
from tests.distributed.layouts import Layout, build, take_step
from tests.distributed.ranks import run_ranks
from tests.tiny_models import ATTENTION, save_tiny_model


def _step_and_send(rank: int, world_size: int, folder: Path, layout: Layout) -> dict[str, Any]:
    policy, optimizer = build(folder, layout, torch.bfloat16)
    groups, factors = policy.groups, {}
    take_step(
        policy, optimizer, controller=KLController(), on_factor=lambda target, u: factors.update({target.name: u})
    )
    made = optimizer.last_update
    sender = PolicySender(
        policy.shape,
        stage_tables(policy),
        sizes=ShardSizes(tp=groups.tp_size, padded_vocab=policy.shape.vocab_size),
        tp_group=groups.tp,
        pp_group=groups.pp,
        bucket_bytes=1 << 14,
    )
    header = PacketHeader(
        base_seed=optimizer.settings.seed,
        update=made.projection_update,
        keep=made.keep,
        rank=optimizer.settings.rank,
        distribution=optimizer.settings.distribution,
        widths=sender.widths,
        version_before=0,
        version_after=1,
    )
    engine = EmbeddedEngine(folder, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in engine.weights().items()}
    engine.apply_factors(sender.gather_packet(header, lambda entry: factors[entry.megatron_name]))
    served = engine.weights()
    exported = dict(sender.stream_weights(lambda entry: read_served(policy, entry), dtype=torch.bfloat16))
    assert exported.keys() == served.keys()
    return {
        "different": [name for name in served if not torch.equal(exported[name], served[name])],
        "changed": sorted(name for name in served if not torch.equal(before[name], served[name])),
    }


@pytest.mark.parametrize("family", ATTENTION)
def test_the_engine_has_the_trainers_weights(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, tie_word_embeddings=family.startswith("gemma"))
    fused = family == "phi3"
    parts = ["self_attn.qkv_proj"] if fused else [f"self_attn.{one}_proj" for one in "qkv"]
    parts += ["mlp.gate_up_proj"] if fused else ["mlp.gate_proj", "mlp.up_proj"]
    parts += ["self_attn.o_proj", "mlp.down_proj"]
    for result in run_ranks(2, _step_and_send, tmp_path, Layout(tp=2, sp=True)):
        assert result["different"] == []
        assert result["changed"] == sorted(
            f"model.layers.{layer}.{part}.weight" for layer in range(4) for part in parts
        )
