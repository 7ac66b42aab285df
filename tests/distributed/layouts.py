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

from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.bridge_family import read_shape
from megatron_logra.mcore.build import build_optimizer, build_policy, load_weights_
from megatron_logra.mcore.cpu import install_cpu_support
from megatron_logra.mcore.initialize import initialize_model_parallel
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.transformer_config import PolicySettings
from megatron_logra.optim.logra import LograOptimizer, LograSettings
from megatron_logra.rl.advantages import response_advantages
from megatron_logra.rl.batching import Response
from megatron_logra.train_step import ProbeSettings, UpdateOutcome, UpdateSettings, train_step


@dataclass(frozen=True)
class Layout:
    """How the ranks of a test share the model."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    sp: bool = False
    micro_batch_size: int = 1
    recompute: str = ""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        given = {
            name: value for name, value in vars(self).items() if value != type(self).__dataclass_fields__[name].default
        }
        return "-".join(name if value is True else f"{name}{value}" for name, value in given.items()) or "single"


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
    policy_options: dict[str, Any] | None = None,
    logra_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`num_steps` updates; scalars of each step on every rank, local weights as Hugging Face row blocks."""
    policy, optimizer = build(folder, layout, dtype, policy_options=policy_options, logra_options=logra_options)
    controller = KLController(budget=1e-3, budget_final=1e-4, schedule_steps=10)
    result: dict[str, Any] = {"steps": [], "sketches": {}}
    for _ in range(num_steps):
        first = not result["steps"]
        outcome = take_step(
            policy,
            optimizer,
            controller=controller,
            responses=responses,
            settings=UpdateSettings(micro_batch_size=layout.micro_batch_size, temperature=0.8),
            probe=ProbeSettings(num_responses=4 // layout.dp, max_tokens=4096),
            measure=True,
            on_sketch=lambda _: keep_blocks(result["sketches"], policy, "sketch") if first else None,  # noqa: B023
        )
        result["steps"].append(outcome.metrics)
    result["weights"] = {}
    keep_blocks(result["weights"], policy, "weight")
    dist.barrier()
    return result


def take_step(
    policy: Policy,
    optimizer: LograOptimizer | None,
    *,
    responses: Sequence[Response] | None = None,
    controller: KLController | None = None,
    settings: UpdateSettings | None = None,
    probe: ProbeSettings | None = None,
    **options: Any,
) -> UpdateOutcome:
    """One update, by default from the fixed responses and as proposed; `options` are further ones of `train_step`."""
    responses = responses or make_responses()
    outcome = train_step(
        policy,
        optimizer,
        controller,
        responses,
        response_advantages(responses).tolist(),
        settings=settings or UpdateSettings(temperature=0.8),
        probe=probe or ProbeSettings(num_responses=4),
        **options,
    )
    # Of the machine and not of the update, so it is in no comparison of layouts.
    outcome.metrics.pop("memory/kl_probe_peak_extra_bytes", None)
    return outcome


def build(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype,
    *,
    policy_options: dict[str, Any] | None = None,
    logra_options: dict[str, Any] | None = None,
) -> tuple[Policy, LograOptimizer]:
    """This rank's policy with the folder's weights, and its optimizer."""
    policy = build_weights(folder, layout, dtype, **(policy_options or {}))
    settings = {"rank": 8, "update_ratio": 1e-3} | (logra_options or {})
    return policy, build_optimizer(policy, LograSettings(**settings))


def build_weights(folder: Path, layout: Layout, dtype: torch.dtype, **options: Any) -> Policy:
    """This rank's policy with the folder's weights; `options` are those of `PolicySettings`."""
    install_cpu_support()
    groups = initialize_model_parallel(
        seed=1,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    settings = PolicySettings(
        dtype=dtype,
        seq_length=64,
        sequence_parallel=layout.sp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        num_layers_in_first_pipeline_stage=layout.first_layers,
        num_layers_in_last_pipeline_stage=layout.last_layers,
        make_vocab_size_divisible_by=1,
        chunk_size=16,
        **_recompute_settings(layout.recompute),
        **options,
    )
    policy = build_policy(read_shape(folder), settings, groups)
    load_weights_(policy, HFReader(folder).read)
    return policy


def _recompute_settings(recompute: str) -> dict[str, Any]:
    """`uniform` or `block` for whole layers; module names joined by + for selective recomputation."""
    if not recompute:
        return {}
    if recompute in ("uniform", "block"):
        return {"recompute_granularity": "full", "recompute_method": recompute, "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": tuple(recompute.split("+"))}


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
