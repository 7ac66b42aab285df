"""Builds the policy of one rank from a Hugging Face folder: model, weights, masters, targets, sketches, optimizer."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.hf.assemble import assemble_local
from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.rows import padded_vocab_size
from megatron_logra.hf.table import LocalParameter, build_param_plan, expert_range, full_table
from megatron_logra.mcore.linear import SketchedColumnParallelLinear, SketchedRowParallelLinear
from megatron_logra.mcore.logprobs import VocabShard
from megatron_logra.mcore.model import build_model
from megatron_logra.mcore.moe import SketchedMoELayer
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.spec import attention_beyond_engine, select_modules
from megatron_logra.mcore.transformer_config import PolicySettings, build_transformer_config, stage_layers
from megatron_logra.optim.logra import LograOptimizer, LograSettings, PartReductions
from megatron_logra.optim.split_master import round_to_bf16, split_fp32
from megatron_logra.parallel.collectives import gather_rows_, own_rows
from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.parallel.guards import require_same_on_replicas, require_same_projections
from megatron_logra.parallel.reductions import sum_over
from megatron_logra.sketch.buffer import PartName, SegmentRows, SketchBuffer
from megatron_logra.sketch.target import SketchPhase, SketchTarget

ReadTensor = Callable[[str, slice, slice], Tensor]
"""`read(hf_name, rows, columns)` gives a block of a Hugging Face tensor (`hf.safetensors_io.HFReader.read`)."""


def build_policy(shape: ModelShape, settings: PolicySettings, groups: ParallelGroups) -> Policy:
    """This rank's policy with uninitialised weights; follow with `load_weights_`.

    Collective when embeddings are tied across pipeline stages (Megatron ties them at construction).

    Raises:
        ValueError: the model cannot be split this way, with the arithmetic; or a pattern of targets is wrong.
    """
    modules = select_modules(settings.transformer_impl, own_attention=attention_beyond_engine(shape, groups.cp_size))
    config = build_transformer_config(shape, settings, groups, fused_rope=modules.fused_rope)
    padded_vocab = padded_vocab_size(shape.vocab_size, settings.make_vocab_size_divisible_by, groups.tp_size)
    parameters = build_param_plan(
        shape,
        tp_rank=groups.tp_rank,
        tp_size=groups.tp_size,
        padded_vocab=padded_vocab,
        layers=stage_layers(config, groups.pp_rank),
        embedding=groups.is_first_stage,
        final=groups.is_last_stage,
        experts=expert_range(shape, groups.ep_rank, groups.ep_size),
        etp_rank=groups.etp_rank,
        etp_size=groups.etp_size,
    )
    chosen = () if settings.train_all else tuple(select_groups(shape, settings.targets))
    model = build_model(
        shape, config, groups, modules, max_sequence_length=settings.seq_length, padded_vocab_size=padded_vocab
    )
    phase = SketchPhase()
    targets, sketched = [], set(chosen)
    for parameter in parameters:
        if parameter.entry.group not in sketched:
            continue
        target = _build_target(parameter, model.get_parameter(parameter.entry.megatron_name), phase)
        _add_master_(target, settings, groups)
        linear = model.get_submodule(target.name.removesuffix(".weight"))
        assert isinstance(linear, SketchedColumnParallelLinear | SketchedRowParallelLinear)
        linear.bind_target(target)
        targets.append(target)
    for module in model.modules():
        if isinstance(module, SketchedMoELayer):
            module.phase = phase
    policy = Policy(
        shape=shape,
        model=model,
        parameters=parameters,
        targets=targets,
        target_groups=chosen,
        phase=phase,
        groups=groups,
        vocab=VocabShard.of_rank(shape.vocab_size, padded_vocab, groups.tp, softcap=shape.final_softcap),
        chunk_size=settings.chunk_size,
    )
    if settings.train_all or settings.train_non_targets:
        for name, weight in model.named_parameters():
            weight.requires_grad_(name not in policy.target_by_name)
    return policy


def select_groups(shape: ModelShape, patterns: Sequence[str] | None) -> list[str]:
    """Projection groups whose weights are sketched: those that one of the shell patterns names, or all for None.

    Raises:
        ValueError: a pattern that names no group, or a group that two patterns name, with what there is.
    """
    groups = list(dict.fromkeys(entry.group for entry in full_table(shape) if entry.group is not None))
    if patterns is None:
        return groups
    kinds = sorted({group.split(".", 3)[3] for group in groups})
    there_is = f"layers 0 to {shape.num_layers - 1} have {', '.join(kinds)}, for example {groups[0]}"
    chosen: dict[str, str] = {}
    for pattern in patterns:
        named = fnmatch.filter(groups, pattern)
        if not named:
            raise ValueError(
                f"logra_targets {pattern!r} names no weight: {there_is}; patterns like '*.o_proj' name many"
            )
        for group in named:
            if group in chosen:
                raise ValueError(
                    f"logra_targets names {group} twice, by {chosen[group]!r} and by {pattern!r}: {there_is}; let each "
                    "weight be named by one pattern"
                )
            chosen[group] = pattern
    return [group for group in groups if group in chosen]


def _add_master_(target: SketchTarget, settings: PolicySettings, groups: ParallelGroups) -> None:
    if settings.dtype != torch.bfloat16:
        return
    if settings.shard_master:
        replicas = groups.of_layers(expert=target.is_expert).replicas
        target.owned = own_rows(target.num_rows, dist.get_rank(replicas), dist.get_world_size(replicas))
    kind = torch.int16 if settings.master == "split" else torch.float32
    master = torch.zeros_like(target.weight[target.owned], dtype=kind)
    if settings.master == "split":
        target.remainder = master
    else:
        target.master = master


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
        is_expert=entry.expert is not None,
    )


@torch.no_grad()
def load_weights_(policy: Policy, read: ReadTensor) -> None:
    """Fill every parameter of this rank from Hugging Face tensors, one at a time; no collectives.

    A split master keeps the bits that its bf16 half loses, whatever the dtype on disk. A parameter without a master
    is rounded to the compute dtype.
    """
    named = dict(policy.model.named_parameters())
    for parameter in policy.parameters:
        weight = named[parameter.entry.megatron_name]
        if tuple(weight.shape) != parameter.shape:
            raise ValueError(
                f"{parameter.entry.megatron_name} is {tuple(weight.shape)} in Megatron but {parameter.shape} by the "
                "table of its family"
            )
        local = assemble_local(parameter.entry, parameter.row_slices, parameter.columns, read, parameter.shape)
        target = policy.target_by_name.get(parameter.entry.megatron_name)
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
        target.remainder.copy_(remainder[target.owned])
    elif target.master is not None:
        target.master.copy_(value[target.owned])
        target.weight.copy_(round_to_bf16(value.float()))
    else:
        target.weight.copy_(value)


def build_optimizer(policy: Policy, settings: LograSettings) -> LograOptimizer:
    """Flat sketches over the policy's targets and their optimizer, with this rank's reductions.

    Sketches accumulate in fp32, or fp64 for an fp64 model (which only references use).
    """
    dtype = torch.float64 if policy.model.config.params_dtype == torch.float64 else torch.float32
    segments = {
        parameter.entry.megatron_name: _segment_rows(parameter)
        for parameter in policy.parameters
        if parameter.entry.group is not None
    }
    sketched = set(policy.target_groups)
    kinds: set[PartName] = {
        "dense" if entry.expert is None else "expert" for entry in full_table(policy.shape) if entry.group in sketched
    }
    parts = sorted(kinds)
    buffer = SketchBuffer(policy.targets, segments, parts=parts, rank=settings.rank, dtype=dtype, device=policy.device)
    return LograOptimizer(buffer, settings, {part: _reductions(policy, part) for part in parts})


def check_projections(policy: Policy, optimizer: LograOptimizer) -> None:
    """Make sure that all ranks draw the same projections from the same seeds. Collective over the world.

    Raises `RuntimeError` on all ranks, naming those that differ.
    """
    settings = optimizer.settings
    widths = {
        entry.group: entry.num_columns
        for entry in full_table(policy.shape)
        if entry.group is not None and entry.num_columns is not None
    }
    require_same_projections(
        policy.groups.world,
        policy.device,
        base_seed=settings.seed,
        rank=settings.rank,
        distribution=settings.distribution,
        groups=[(group, widths[group]) for group in policy.target_groups],
    )


def check_replicas(policy: Policy) -> None:
    """Make sure that ranks that must hold the same weights do, bit for bit. Collective over the world.

    Raises `RuntimeError` on all ranks; those of the group that disagrees name the weights.
    """
    groups = policy.groups
    experts = {parameter.entry.megatron_name for parameter in policy.parameters if parameter.entry.expert is not None}
    weights = [(name, weight.detach()) for name, weight in policy.model.named_parameters()]
    for target in policy.targets:
        master = target.master if target.remainder is None else target.remainder
        if master is not None and master.shape == target.weight.shape:  # divided masters are on one replica each
            weights.append((target.name, master))
    for expert in (False, True):
        alike = [pair for pair in weights if (pair[0] in experts) == expert]
        require_same_on_replicas(alike, groups.of_layers(expert=expert).replicas, groups.world)
    replicated = {p.entry.megatron_name for p in policy.parameters if p.entry.parallel == "replicated"}
    require_same_on_replicas([pair for pair in weights if pair[0] in replicated], groups.tp, groups.world)


def _reductions(policy: Policy, part: PartName) -> PartReductions:
    shared = policy.groups.of_layers(expert=part == "expert")
    divided = any(target.owned != slice(None) for target in policy.targets)
    return PartReductions(
        sum_over_layer=lambda x: sum_over(x, shared.layer),
        is_first_of_layer=dist.get_rank(shared.layer) == 0,
        sum_over_model=lambda x: sum_over(x, shared.model),
        gather_rows=(lambda weight: gather_rows_(weight, shared.replicas)) if divided else None,
    )


def _segment_rows(parameter: LocalParameter) -> list[SegmentRows]:
    """Runs of local rows; every source has at least an empty one, so that all ranks number the segments alike."""
    heights = {name: shape[0] for name, shape in parameter.entry.hf_shapes.items()}
    empty = [SegmentRows(name, slice(0, 0), heights[name]) for name in parameter.entry.hf_names]
    held = [SegmentRows(piece.hf_name, piece.local_rows, heights[piece.hf_name]) for piece in parameter.row_slices]
    return empty + held
