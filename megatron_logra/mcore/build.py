"""Builds the policy of one rank from a Hugging Face folder: model, weights, masters, targets, sketches, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_logra.hf.assemble import assemble_local
from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.rows import padded_vocab_size
from megatron_logra.hf.table import LocalParameter, build_param_plan
from megatron_logra.mcore.logprobs import VocabShard
from megatron_logra.mcore.model import build_model, build_transformer_config, stage_layers
from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.logra import LograOptimizer, LograSettings
from megatron_logra.optim.split_master import round_to_bf16, split_fp32
from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.parallel.reductions import sum_over
from megatron_logra.sketch.buffer import SegmentRows, SketchBuffer
from megatron_logra.sketch.target import SketchPhase, SketchTarget

ReadTensor = Callable[[str, slice, slice], Tensor]
"""`read(hf_name, rows, columns)` gives a block of a Hugging Face tensor (`hf.safetensors_io.HFReader.read`)."""


@dataclass(frozen=True)
class PolicySettings:
    """How a policy is laid out and computed; names as in Megatron.

    With bf16 weights `master` says how their fp32 values are kept: `split`, as a 16-bit remainder beside the weight, or
    `fp32`, as a copy. Wider weights are their own masters.
    `chunk_size` bounds the tokens whose logits exist at once.
    """

    dtype: torch.dtype
    seq_length: int
    sequence_parallel: bool = False
    make_vocab_size_divisible_by: int = 128
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    master: str = "split"
    chunk_size: int = 1024


def build_policy(shape: ModelShape, settings: PolicySettings, groups: ParallelGroups) -> Policy:
    """This rank's policy with uninitialised weights; follow with `load_weights_`.

    Collective when embeddings are tied across pipeline stages (Megatron ties them at construction).

    Raises:
        ValueError: the model cannot be split this way, with the arithmetic.
    """
    config = build_transformer_config(
        shape,
        dtype=settings.dtype,
        tensor_model_parallel_size=groups.tp_size,
        pipeline_model_parallel_size=groups.pp_size,
        sequence_parallel=settings.sequence_parallel,
        recompute_granularity=settings.recompute_granularity,
        recompute_method=settings.recompute_method,
        recompute_num_layers=settings.recompute_num_layers,
    )
    padded_vocab = padded_vocab_size(shape.vocab_size, settings.make_vocab_size_divisible_by, groups.tp_size)
    parameters = build_param_plan(
        shape,
        tp_rank=groups.tp_rank,
        tp_size=groups.tp_size,
        padded_vocab=padded_vocab,
        layers=stage_layers(config, groups.pp_rank),
        embedding=groups.is_first_stage,
        final=groups.is_last_stage,
    )
    model = build_model(shape, config, groups, max_sequence_length=settings.seq_length, padded_vocab_size=padded_vocab)
    phase = SketchPhase()
    named = dict(model.named_parameters())
    targets = []
    for parameter in parameters:
        if parameter.entry.group is None:
            continue
        target = _build_target(parameter, named[parameter.entry.megatron_name], phase)
        if settings.dtype == torch.bfloat16 and settings.master == "split":
            target.remainder = torch.zeros_like(target.weight, dtype=torch.int16)
        elif settings.dtype == torch.bfloat16:
            target.master = torch.zeros_like(target.weight, dtype=torch.float32)
        model.get_submodule(target.name.removesuffix(".weight")).bind_target(target)
        targets.append(target)
    return Policy(
        shape=shape,
        model=model,
        parameters=parameters,
        targets=targets,
        phase=phase,
        groups=groups,
        vocab=VocabShard.of_rank(shape.vocab_size, padded_vocab, groups.tp),
        chunk_size=settings.chunk_size,
    )


def _build_target(parameter: LocalParameter, weight: torch.nn.Parameter, phase: SketchPhase) -> SketchTarget:
    entry, width = parameter.entry, parameter.entry.num_columns
    assert entry.group is not None and width is not None and entry.parallel in ("column", "row")
    columns = parameter.columns
    return SketchTarget(
        name=entry.megatron_name,
        group=entry.group,
        sharding="column" if entry.parallel == "column" else "row",
        weight=weight.data,
        columns=slice(columns.start or 0, width if columns.stop is None else columns.stop),
        width=width,
        phase=phase,
    )


@torch.no_grad()
def load_weights_(policy: Policy, read: ReadTensor) -> None:
    """Fill every parameter of this rank from Hugging Face tensors, one at a time; no collectives.

    A split master keeps the bits that its bf16 half loses, whatever the dtype on disk. A parameter without a master
    is rounded to the compute dtype.
    """
    named = dict(policy.model.named_parameters())
    by_name = {target.name: target for target in policy.targets}
    for parameter in policy.parameters:
        weight = named[parameter.entry.megatron_name]
        if tuple(weight.shape) != parameter.shape:
            raise ValueError(
                f"{parameter.entry.megatron_name} is {tuple(weight.shape)} in Megatron but {parameter.shape} by the "
                "table of its family"
            )
        local = assemble_local(parameter.entry, parameter.row_slices, parameter.columns, read, parameter.shape)
        target = by_name.get(parameter.entry.megatron_name)
        if target is not None:
            store_master_(target, local.to(weight.device))
        else:
            weight.copy_(local)


@torch.no_grad()
def store_master_(target: SketchTarget, value: Tensor) -> None:
    """Set a target to fp32 (or wider) values with every bit its master can keep; the model sees them rounded."""
    if target.remainder is not None:
        high, remainder = split_fp32(value.float())
        target.weight.copy_(high)
        target.remainder.copy_(remainder)
    elif target.master is not None:
        target.master.copy_(value)
        target.weight.copy_(round_to_bf16(target.master))
    else:
        target.weight.copy_(value)


def build_optimizer(policy: Policy, settings: LograSettings) -> LograOptimizer:
    """Flat sketches over the policy's targets and their optimizer, with this rank's reductions.

    Sketches accumulate in fp32, or fp64 for an fp64 model (which only references use).
    """
    groups = policy.groups
    dtype = torch.float64 if policy.model.config.params_dtype == torch.float64 else torch.float32
    segments = {
        parameter.entry.megatron_name: _segment_rows(parameter)
        for parameter in policy.parameters
        if parameter.entry.group is not None
    }
    device = policy.targets[0].weight.device
    buffer = SketchBuffer(policy.targets, segments, rank=settings.rank, dtype=dtype, device=device)
    return LograOptimizer(
        buffer,
        settings,
        sum_over_layer=lambda x: sum_over(x, groups.tp),
        is_first_of_layer=groups.tp_rank == 0,
        sum_over_model=lambda x: sum_over(x, groups.mp),
    )


def _segment_rows(parameter: LocalParameter) -> list[SegmentRows]:
    return [
        SegmentRows(piece.hf_name, piece.local_rows, parameter.entry.hf_shapes[piece.hf_name][0])
        for piece in parameter.row_slices
    ]
