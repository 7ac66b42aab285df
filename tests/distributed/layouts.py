"""Runs LoGRA steps on fixed responses in a given layout and returns everything in Hugging Face naming, for comparison."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.hf.config import read_model_shape
from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.build import PolicySettings, build_optimizer, build_policy, load_weights_
from megatron_logra.mcore.cpu import install_cpu_support
from megatron_logra.mcore.initialize import initialize_model_parallel
from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.logra import LograOptimizer, LograSettings
from megatron_logra.rl.advantages import response_advantages
from megatron_logra.rl.batching import Response
from megatron_logra.train_step import ProbeSettings, UpdateSettings, train_step


@dataclass(frozen=True)
class Layout:
    """How the ranks of a test share the model."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    micro_batch_size: int = 1
    recompute: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        text = f"tp{self.tp}-pp{self.pp}-dp{self.dp}-mb{self.micro_batch_size}"
        return text + ("-sp" if self.sp else "") + ("-recompute" if self.recompute else "")


def make_responses(*, num_prompts: int = 2, group_size: int = 4, vocab: int = 130, seed: int = 3) -> list[Response]:
    """Random prompts and responses of unequal lengths (1, 2, 3 and up to 17 tokens) with random rewards."""
    rng = random.Random(seed)
    lengths = [1, 2, 3, 17, 5, 9, 12, 7]
    responses = []
    for group in range(num_prompts):
        prompt = [rng.randrange(vocab) for _ in range(3 + 2 * group)]
        for member in range(group_size):
            length = lengths[(group * group_size + member) % len(lengths)]
            responses.append(
                Response(
                    prompt_ids=prompt,
                    response_ids=[rng.randrange(vocab) for _ in range(length)],
                    generation_logprobs=[-rng.random() * 5 for _ in range(length)],
                    reward=rng.random(),
                    finished=True,
                    sample_index=group,
                    group=group,
                )
            )
    return responses


def run_steps(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    responses: Sequence[Response],
    *,
    dtype: torch.dtype = torch.float32,
    num_steps: int = 2,
    sketch_rank: int = 8,
) -> dict[str, Any]:
    """`num_steps` updates; scalars of each step on every rank, local weights as Hugging Face row blocks."""
    policy, optimizer = build(folder, layout, dtype, sketch_rank=sketch_rank)
    controller = KLController(budget=1e-3, budget_final=1e-4, schedule_steps=10)
    result: dict[str, Any] = {"steps": []}
    for _ in range(num_steps):
        outcome = train_step(
            policy,
            optimizer,
            controller,
            responses,
            response_advantages(responses).tolist(),
            settings=UpdateSettings(micro_batch_size=layout.micro_batch_size, temperature=0.8),
            probe=ProbeSettings(num_responses=4 // layout.dp, max_tokens=4096),
            measure=True,
        )
        result["steps"].append(outcome.metrics)
    result["weights"] = {}
    keep_blocks(result["weights"], policy, "weight")
    dist.barrier()
    return result


def build(folder: Path, layout: Layout, dtype: torch.dtype, *, sketch_rank: int = 8) -> tuple[Policy, LograOptimizer]:
    """This rank's policy with the folder's weights, and its optimizer."""
    install_cpu_support()
    groups = initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, seed=1
    )
    settings = PolicySettings(
        dtype=dtype,
        seq_length=64,
        sequence_parallel=layout.sp,
        make_vocab_size_divisible_by=1,
        recompute_granularity="full" if layout.recompute else None,
        recompute_method="uniform" if layout.recompute else None,
        recompute_num_layers=1 if layout.recompute else None,
        chunk_size=16,
    )
    policy = build_policy(read_model_shape(folder), settings, groups)
    load_weights_(policy, HFReader(folder).read)
    return policy, build_optimizer(policy, LograSettings(rank=sketch_rank, update_ratio=1e-3))


def keep_blocks(store: dict[str, Any], policy: Policy, what: str) -> None:
    """Add this rank's rows (and columns) of every target to `store`, by Hugging Face name; `what`: weight or sketch."""
    by_name = {parameter.entry.megatron_name: parameter for parameter in policy.parameters}
    for target in policy.targets:
        parameter = by_name[target.name]
        value: Tensor = target.require_sketch() if what == "sketch" else target.weight
        for piece in parameter.row_slices:
            block = value[piece.local_rows].detach().clone()
            columns = target.columns if what == "weight" else slice(None)
            store.setdefault(piece.hf_name, []).append((piece.hf_rows, columns, block))


def join_blocks(results: Sequence[dict[str, Any]], what: str, shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Whole tensors from the row and column blocks of all ranks; every entry must be covered."""
    whole: dict[str, Tensor] = {}
    for result in results:
        for name, blocks in result[what].items():
            for rows, columns, block in blocks:
                if name not in whole:
                    width = shapes[name][1] if what == "weights" else block.shape[1]
                    whole[name] = torch.full((shapes[name][0], width), float("nan"), dtype=block.dtype)
                whole[name][rows, columns] = block
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} is not covered by the ranks' blocks"
    return whole
