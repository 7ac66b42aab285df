"""Checks, on the machines of a long run and before it, that a parallel layout makes the update of a single rank.

    torchrun --nproc-per-node 8 tools/verify_parallelism.py --tensor-model-parallel-size 4 --sequence-parallel \
        --pipeline-model-parallel-size 2 [--hf-checkpoint DIR] [--json FILE]

One update of random responses is made twice, by rank 0 alone and by all ranks in the layout, with the real step:
backward, sketch reduction, row Adam, predicted KL, merge. Compared are log-probabilities, sketches, norms, predicted
KL, step scale and updated weights. Without --hf-checkpoint the model is a small random one that fits the layout. The
exit code is 0 if every relative difference is within the tolerance, 1 if not, 2 for settings that cannot be.

Rank 0 holds the whole model for its half; give --num-layers to check a large one by its first layers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Megatron-Core says at import what is not installed.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\b")

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.hf.table import full_table
from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.bridge_family import read_shape
from megatron_logra.mcore.build import ReadTensor, build_optimizer, build_policy, load_weights_
from megatron_logra.mcore.initialize import (
    initialize_distributed,
    initialize_model_parallel,
    shutdown_distributed,
    shutdown_model_parallel,
)
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.transformer_config import PolicySettings
from megatron_logra.mcore.weights import read_served, stage_tables
from megatron_logra.optim.logra import LograOptimizer, LograSettings
from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.parallel.reductions import sum_over
from megatron_logra.parallel.scalars import run_on_all_ranks
from megatron_logra.rl.advantages import response_advantages
from megatron_logra.rl.batching import Response, attach_logprobs
from megatron_logra.sync.gather import ShardSizes
from megatron_logra.sync.packet import PacketHeader
from megatron_logra.sync.sender import PolicySender
from megatron_logra.train_step import ProbeSettings, UpdateSettings, build_own_batches, train_step

TEMPERATURE = 0.8
LENGTHS = (1, 2, 3, 17, 5, 9, 12, 7)
SCALARS = ("sketch_norm", "weight_norm", "update_norm", "predicted_kl", "alpha")
# A backward pass through dozens of trained layers carries the rounding of float32 to about 1e-4.
TOLERANCES = {"float32": 1e-3, "float64": 1e-9}
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
STAGES = (
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


@dataclass(frozen=True)
class Comparison:
    """Largest relative difference of one kind of quantity, and where it is."""

    quantity: str
    worst: float
    where: str
    passed: bool


@dataclass
class Measured:
    """What one update did, by Hugging Face name and whole; on the CPU of rank 0."""

    scalars: dict[str, float]
    sketches: dict[str, Tensor]
    weights: dict[str, Tensor]
    logprobs: Tensor


def main() -> int:
    """Compare and report; returns the exit code, the same on all ranks."""
    options = _parse()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    device = initialize_distributed(backend=None, timeout_minutes=options.distributed_timeout_minutes)
    world = dist.group.WORLD
    assert world is not None
    try:
        return _compare(options, device, world)
    except ValueError as error:
        if dist.get_rank() == 0:
            print(f"verify_parallelism: error: {error}", file=sys.stderr)
        return 2
    finally:
        shutdown_distributed()


def _compare(options: argparse.Namespace, device: torch.device, world: dist.ProcessGroup) -> int:
    shape, read = run_on_all_ranks(lambda: _model(options), world, device)
    ranks = options.tensor_model_parallel_size * options.pipeline_model_parallel_size * options.context_parallel_size
    if dist.get_world_size() % ranks:
        raise ValueError(f"{dist.get_world_size()} ranks are no multiple of the {ranks} that hold one model")
    replicas = dist.get_world_size() // ranks
    responses = _responses(math.lcm(8, replicas * options.micro_batch_size), shape.vocab_size)

    alone = _alone(initialize_model_parallel(seed=1))
    expected = _measure(options, shape, read, alone, responses, replicas) if dist.get_rank() == 0 else None
    dist.barrier()
    shutdown_model_parallel()
    chunk = options.num_layers_per_virtual_pipeline_stage
    chunks = None if chunk is None else shape.num_layers // options.pipeline_model_parallel_size // chunk
    sizes = {name: getattr(options, name) for name in SIZES}
    groups = initialize_model_parallel(seed=1, virtual_pipeline_model_parallel_size=chunks, **sizes)
    found = _measure(options, shape, read, groups, responses, 1, chunks)

    verdict = torch.zeros(1, dtype=torch.int64, device=device)
    if expected is not None:
        tolerance = TOLERANCES[options.dtype] if options.tolerance is None else options.tolerance
        comparisons = compare(found, expected, tolerance)
        _report(options, comparisons, tolerance)
        verdict += not all(comparison.passed for comparison in comparisons)
    return int(sum_over(verdict, world).item())


def compare(found: Measured, expected: Measured, tolerance: float) -> list[Comparison]:
    """Every kind of quantity against its reference; a value that is not finite fails."""

    def worst(quantity: str, differences: dict[str, float]) -> Comparison:
        where = max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
        return Comparison(quantity, differences[where], where, differences[where] <= tolerance)

    norms = {
        name: abs(found.scalars[name] - value) / max(abs(value), sys.float_info.min)
        for name, value in expected.scalars.items()
    }
    entry = (found.logprobs - expected.logprobs).abs() / expected.logprobs.abs().clamp(min=1.0)
    return [
        worst("log-probability", {f"response {row}": entry[row].max().item() for row in range(len(entry))}),
        worst("sketch", _relative(found.sketches, expected.sketches)),
        worst("norms", {name: norms[name] for name in SCALARS[:3]}),
        worst("predicted KL", {"predicted_kl": norms["predicted_kl"]}),
        worst("alpha", {"alpha": norms["alpha"]}),
        worst("updated weight", _relative(found.weights, expected.weights)),
    ]


def _relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    differences = {}
    for name, tensor in expected.items():
        size = tensor.norm().item()
        difference = (found[name] - tensor).norm().item()
        differences[name] = difference / size if size else (0.0 if difference == 0 else math.inf)
    return differences


def _measure(
    options: argparse.Namespace,
    shape: ModelShape,
    read: ReadTensor,
    groups: ParallelGroups,
    responses: list[Response],
    probe_responses: int,
    chunks: int | None = None,
) -> Measured:
    """One update in the layout of `groups`."""
    dtype = getattr(torch, options.dtype)
    single = groups.size == 1
    settings = PolicySettings(
        dtype=dtype,
        seq_length=256,
        sequence_parallel=options.sequence_parallel and not single,
        virtual_pipeline_model_parallel_size=chunks,
        num_layers_in_first_pipeline_stage=None if single else options.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=None if single else options.decoder_last_pipeline_num_layers,
    )
    policy = build_policy(shape, settings, groups)
    load_weights_(policy, read)
    optimizer = build_optimizer(policy, LograSettings(rank=options.logra_rank, update_ratio=1e-3))
    sender = _sender(policy, groups)
    logprobs = _logprobs(policy, responses, options.micro_batch_size)
    sketches: dict[str, Tensor] = {}
    outcome = train_step(
        policy,
        optimizer,
        KLController(),
        responses,
        response_advantages(responses).tolist(),
        settings=UpdateSettings(options.micro_batch_size, TEMPERATURE, skip_zero_advantage=False),
        probe=ProbeSettings(num_responses=probe_responses),
        on_sketch=lambda optimizer: sketches.update(_sketches(sender, optimizer, dtype)),
    )
    return Measured(
        scalars={name: outcome.metrics[f"logra/{name}"] for name in SCALARS},
        sketches=sketches,
        weights=_weights(sender, policy, dtype),
        logprobs=logprobs,
    )


def _sender(policy: Policy, groups: ParallelGroups) -> PolicySender:
    padded = policy.model.last.vocab_size
    return PolicySender(
        policy.shape,
        stage_tables(policy),
        sizes=ShardSizes(groups.tp_size, groups.etp_size, groups.ep_size, padded),
        tp_group=groups.tp,
        pp_group=groups.pp,
        expert_group=groups.etp_ep,
        bucket_bytes=64 * 2**20,
        device=policy.device,
    )


def _on_first_rank(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors on the CPU of rank 0, nothing elsewhere; all ranks take part in making them."""
    return {name: tensor.cpu() for name, tensor in pairs if dist.get_rank() == 0}


def _weights(sender: PolicySender, policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    targets = sender.groups
    stream = sender.stream_weights(lambda entry: read_served(policy, entry), dtype=dtype)
    return _on_first_rank((name, tensor) for name, tensor in stream if name in targets)


def _sketches(sender: PolicySender, optimizer: LograOptimizer, dtype: torch.dtype) -> dict[str, Tensor]:
    header = PacketHeader(0, 0, optimizer.settings.rank, "rademacher", sender.widths, 0, 1)
    by_name = {target.name: target.require_sketch() for target in optimizer.buffer.targets}
    parts = sender.stream_packets(header, lambda entry: by_name[entry.megatron_name], dtype=dtype)
    return _on_first_rank((entry.name, entry.factor_OR) for part in parts for entry in part.entries)


def _logprobs(policy: Policy, responses: list[Response], micro_batch_size: int) -> Tensor:
    """Log-probabilities `[responses, longest]` on every rank, 0 beyond the end of a response."""
    table = torch.zeros(len(responses), max(LENGTHS), dtype=torch.float64)
    own, batches = build_own_batches(policy, responses, [0.0] * len(responses), micro_batch_size=micro_batch_size)
    outputs = policy.compute_logprobs(batches, temperature=TEMPERATURE)
    if outputs and policy.groups.tp_rank == 0:
        values = [output.logprob_N for output in outputs]
        filled = attach_logprobs([responses[index] for index in own], batches, values, kind="old_logprobs")
        for index, response in zip(own, filled, strict=True):
            row = torch.tensor(response.old_logprobs, dtype=torch.float64)
            table[index, : len(row)] = row
    return sum_over(table.to(policy.device), policy.groups.world).cpu()


def _alone(groups: ParallelGroups) -> ParallelGroups:
    """A world of this rank alone: with all sizes 1, its tensor-parallel group has no other rank."""
    return replace(groups, **dict.fromkeys(("dp", "dp_cp", "edp", "world"), groups.tp))


def _responses(count: int, vocab: int) -> list[Response]:
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(count)]
    return [
        Response(tokens(3 + index % 4), tokens(length), [-1.0] * length, rng.random(), True, index // 4, index // 4)
        for index, length in enumerate(lengths)
    ]


def _model(options: argparse.Namespace) -> tuple[ModelShape, Callable[..., Tensor]]:
    """Shape and weights: of the folder, cut to --num-layers, or of a small random model that fits the layout."""
    if options.hf_checkpoint is not None:
        shape = read_shape(options.hf_checkpoint)
        if options.num_layers is not None:
            shape = replace(shape, num_layers=min(options.num_layers, shape.num_layers))
        return shape, HFReader(options.hf_checkpoint).read
    tp = options.tensor_model_parallel_size
    first, last = options.decoder_first_pipeline_num_layers or 0, options.decoder_last_pipeline_num_layers or 0
    per_stage = 2 * (options.num_layers_per_virtual_pipeline_stage or 1)
    others = options.pipeline_model_parallel_size - (first > 0) - (last > 0)
    experts = options.expert_model_parallel_size
    heads = math.lcm(4, tp)
    shape = ModelShape(
        family="qwen3" if experts == 1 else "qwen3_moe",
        num_layers=options.num_layers or first + last + per_stage * others,
        hidden_size=64,
        ffn_hidden_size=24 * heads,
        num_attention_heads=heads,
        num_query_groups=2 if tp <= 2 else tp // 2 if tp % 2 == 0 else tp,
        kv_channels=16,
        vocab_size=499,
        max_position_embeddings=256,
        layernorm_epsilon=1e-6,
        rotary_base=1e4,
        rope_scaling=None,
        qkv_bias=False,
        qk_layernorm=True,
        tie_embeddings=False,
        dtype=torch.float32,
        num_experts=None if experts == 1 else 2 * experts,
        moe_router_topk=2,
        moe_ffn_hidden_size=6 * heads,
    )
    shapes = {name: size for entry in full_table(shape) for name, size in entry.hf_shapes.items()}

    def read(name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        whole = torch.randn(shapes[name], generator=torch.Generator().manual_seed(seed))
        if whole.dim() == 1:
            return (1 + 0.1 * whole)[rows]
        return (whole * (0.5 if "gate.weight" in name else 1.5 / math.sqrt(whole.shape[1])))[rows, columns]

    return shape, read


def _report(options: argparse.Namespace, comparisons: list[Comparison], tolerance: float) -> None:
    layout = {name: getattr(options, name) for name in (*SIZES, *STAGES) if getattr(options, name) not in (None, 1)}
    layout |= {"sequence_parallel": True} if options.sequence_parallel else {}
    words = ", ".join(f"{name} {value}" for name, value in layout.items()) or "data parallel"
    print(f"{dist.get_world_size()} ranks, {dist.get_backend()}, {options.dtype}: {words}")
    print(f"{'quantity':<16} {'worst relative difference':>26}   {'':4}  where")
    for one in comparisons:
        print(f"{one.quantity:<16} {one.worst:>26.3e}   {'ok' if one.passed else 'FAIL':4}  {one.where}")
    passed = all(one.passed for one in comparisons)
    print(f"{'the layout makes the update of one rank' if passed else 'THE LAYOUT DIFFERS'} (tolerance {tolerance:g})")
    if options.json is not None:
        record: dict[str, Any] = {"layout": layout, "ranks": dist.get_world_size(), "backend": dist.get_backend()}
        record |= {"dtype": options.dtype, "tolerance": tolerance, "passed": passed}
        record["comparisons"] = [asdict(one) for one in comparisons]
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", type=Path, help="Hugging Face folder (default: a small random model)")
    parser.add_argument("--num-layers", type=int, help="check the first layers only (default: all)")
    for name in SIZES:
        default = None if name == "expert_tensor_parallel_size" else 1
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help="as in training")
    parser.add_argument("--sequence-parallel", action="store_true", help="as in training")
    for name in STAGES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, help="as in training")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="as in training (default 1)")
    parser.add_argument("--logra-rank", type=int, default=16, help="sketch rank (default 16)")
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="float32", help="of everything (default float32)")
    parser.add_argument("--tolerance", type=float, help="largest relative difference (default 1e-3, 1e-9 in float64)")
    parser.add_argument("--json", type=Path, help="also write the result there")
    parser.add_argument("--distributed-timeout-minutes", type=int, default=30, help="as in training (default 30)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
