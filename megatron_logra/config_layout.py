"""Owns the rules of the parallel layout: which sizes fit the number of processes, each other, and a model's shape.

As in `megatron_logra.config_validation`, every broken rule gives one sentence with the value, the arithmetic and the
way out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_logra.config import Config
from megatron_logra.config_schema import flag_of, raise_problems


@dataclass(frozen=True)
class ModelSizes:
    """What a layout must divide, as counts; `num_experts` is None for a dense model."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    max_position_embeddings: int | None = None
    num_experts: int | None = None
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_size: int | None = None


def check_layout(config: Config, world_size: int) -> Iterator[str]:
    """Rules that need no model."""
    parallel = config.parallel
    if world_size < 1:
        yield f"world size {world_size} is out of range: start at least one process"
        return
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    if parallel.context_parallel_size > 1:
        names.append("context_parallel_size")
    yield from _check_world(config, world_size, names)
    if parallel.expert_model_parallel_size > 1 or parallel.expert_tensor_parallel_size is not None:
        names = ["pipeline_model_parallel_size", "expert_model_parallel_size"]
        names += ["expert_tensor_parallel_size"] if parallel.expert_tensor_parallel_size is not None else []
        yield from _check_world(config, world_size, names)
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if parallel.sequence_parallel and tensor == 1:
        yield (
            "sequence_parallel has no effect with tensor_model_parallel_size 1: "
            "give --tensor-model-parallel-size at least 2, or leave out --sequence-parallel"
        )
    for name in (
        "num_layers_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ):
        value = getattr(parallel, name)
        if value is not None and pipeline == 1:
            yield (
                f"{name} {value} has no effect with pipeline_model_parallel_size 1: give "
                f"--pipeline-model-parallel-size at least 2, or leave out {flag_of(name)}"
            )
    uneven = parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
    if parallel.num_layers_per_virtual_pipeline_stage is not None and uneven:
        yield (
            "num_layers_per_virtual_pipeline_stage needs stages with equally many layers: leave out "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    yield from _check_sequence_split(config)


def _check_world(config: Config, world_size: int, names: list[str]) -> Iterator[str]:
    sizes = [getattr(config.parallel, name) for name in names]
    product = math.prod(sizes)
    if min(sizes) > 0 and world_size % product:
        factors = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
        yield (
            f"world size {world_size} is not divisible by {factors} = {product}: {world_size} % {product} = "
            f"{world_size % product}; start a multiple of {product} processes, or split the model over a number that "
            f"divides {world_size}"
        )


def _check_sequence_split(config: Config) -> Iterator[str]:
    length, parallel = config.model.seq_length, config.parallel
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    context = parallel.context_parallel_size
    if tensor > 1 and context <= 1 and length % tensor:
        yield (
            f"seq_length {length} cannot be split over tensor_model_parallel_size {tensor} with sequence_parallel: "
            f"{length} % {tensor} = {length % tensor}; set --seq-length to a multiple of {tensor}"
        )
    if context > 1 and tensor > 0:
        multiple = context * math.lcm(2, tensor)
        if length % multiple:
            shards = f" and tensor_model_parallel_size {tensor} with sequence_parallel" if tensor > 1 else ""
            yield (
                f"seq_length {length} cannot be cut into 2 chunks for each of context_parallel_size {context}{shards}: "
                f"{length} % {multiple} = {length % multiple}; set --seq-length to a multiple of {multiple}"
            )


def check_recompute(config: Config) -> Iterator[str]:
    """Rules of recomputation that need no model."""
    training = config.training
    for name in ("recompute_method", "recompute_num_layers"):
        value = getattr(training, name)
        if training.recompute_granularity != "full" and value is not None:
            without = "without recompute_granularity" if training.recompute_granularity is None else "with selective"
            yield (
                f"{name} {value} has no effect {without}: "
                f"give --recompute-granularity full, or leave out {flag_of(name)}"
            )
        if training.recompute_granularity == "full" and value is None:
            example = "--recompute-method uniform" if name == "recompute_method" else "--recompute-num-layers 1"
            yield f"recompute_granularity full needs {name}: give for example {example}"
    known = ("core_attn", "mlp", "moe", "shared_experts")
    if training.recompute_modules and training.recompute_granularity != "selective":
        yield (
            f"recompute_modules {' '.join(training.recompute_modules)} has no effect without recompute_granularity "
            "selective: give --recompute-granularity selective, or leave out --recompute-modules"
        )
    for module in training.recompute_modules:
        if module not in known:
            yield f"recompute_modules names {module!r}: choose from {', '.join(known)}"


def validate_model_parallel(config: Config, sizes: ModelSizes) -> None:
    """Check that a model of this shape (from config.json) can be split as configured; raises ConfigError."""
    raise_problems(_check_model(config, sizes))


def _check_model(config: Config, sizes: ModelSizes) -> Iterator[str]:
    parallel = config.parallel
    tensor = parallel.tensor_model_parallel_size
    yield from _check_split(sizes.num_attention_heads, "attention heads", config, "tensor_model_parallel_size")
    groups = sizes.num_query_groups
    if tensor > 0 and groups % tensor and tensor % groups:
        yield (
            f"{groups} query groups (key/value heads) cannot be split over tensor_model_parallel_size {tensor}, which "
            f"must divide them or be a multiple of them: {groups} % {tensor} = {groups % tensor}, {tensor} % {groups} "
            f"= {tensor % groups}; set --tensor-model-parallel-size to one that does"
        )
    if sizes.num_experts is None:
        yield from _check_split(
            sizes.ffn_hidden_size, "columns of ffn_hidden_size", config, "tensor_model_parallel_size"
        )
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(parallel, name) not in (None, 1):
                yield (
                    f"{name} {getattr(parallel, name)} has no effect: the model has no experts; leave out "
                    f"{flag_of(name)}"
                )
    else:
        yield from _check_experts(config, sizes)
    yield from _check_stages(config, sizes)
    yield from _check_sequence_split(config)
    positions = sizes.max_position_embeddings
    if positions is not None and config.model.seq_length > positions:
        yield (
            f"seq_length {config.model.seq_length} is more than the {positions} positions that the "
            f"model supports (max_position_embeddings): set --seq-length to at most {positions}"
        )


def _check_experts(config: Config, sizes: ModelSizes) -> Iterator[str]:
    parallel = config.parallel
    assert sizes.num_experts is not None
    yield from _check_split(sizes.num_experts, "experts", config, "expert_model_parallel_size")
    shards = config.expert_tensor_parallel_size
    if shards > 0 and sizes.moe_ffn_hidden_size % shards:
        yield (
            f"{sizes.moe_ffn_hidden_size} columns of an expert cannot be split over expert_tensor_parallel_size "
            f"{shards}: {sizes.moe_ffn_hidden_size} % {shards} = {sizes.moe_ffn_hidden_size % shards}; give "
            "--expert-tensor-parallel-size 1"
        )
    if sizes.moe_shared_expert_size is not None:
        yield from _check_split(
            sizes.moe_shared_expert_size, "columns of the shared expert", config, "tensor_model_parallel_size"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"tensor_model_parallel_size {parallel.tensor_model_parallel_size} with a mixture of experts needs "
            "sequence_parallel (a rule of Megatron-Core): give --sequence-parallel"
        )


def _check_stages(config: Config, sizes: ModelSizes) -> Iterator[str]:
    parallel = config.parallel
    stages, layers = parallel.pipeline_model_parallel_size, sizes.num_layers
    if stages < 1:
        return
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        yield from _check_split(layers, "layers", config, "pipeline_model_parallel_size")
        smallest = layers // stages
    else:
        left = layers - (first or 0) - (last or 0)
        others = stages - (first is not None) - (last is not None)
        given = " + ".join(str(count) for count in (first, last) if count is not None)
        if left < 0 or (others == 0 and left) or (others > 0 and (left % others or left < others)):
            yield (
                f"{layers} layers less {given} in the first and last pipeline stage leaves {left} for {others} other "
                "stages, which need equally many and at least one each: change --decoder-first-pipeline-num-layers or "
                "--decoder-last-pipeline-num-layers"
            )
        counts = [first, last, left // others if others > 0 else None]
        smallest = min(count for count in counts if count is not None)
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    if chunk is not None and layers % stages == 0 and (smallest % chunk or smallest == chunk):
        yield (
            f"num_layers_per_virtual_pipeline_stage {chunk} must divide the {layers} // {stages} = {smallest} layers "
            f"of a pipeline stage into at least 2 chunks: {smallest} % {chunk} = {smallest % chunk}; set "
            "--num-layers-per-virtual-pipeline-stage to a proper divisor"
        )
    elif chunk is not None:
        smallest = chunk
    recomputed = config.training.recompute_num_layers
    if recomputed is not None and recomputed > smallest:
        yield (
            f"recompute_num_layers {recomputed} is more than the {smallest} layers of a pipeline stage: set "
            f"--recompute-num-layers to at most {smallest}"
        )


def _check_split(count: int, what: str, config: Config, name: str) -> Iterator[str]:
    size = getattr(config.parallel, name)
    if size > 0 and count % size:
        divisors = ", ".join(str(d) for d in range(1, min(count, 64) + 1) if count % d == 0)
        yield (
            f"{count} {what} cannot be split over {name} {size}: {count} % {size} = {count % size}; "
            f"set {flag_of(name)} to a divisor of {count} ({divisors}{', ...' if count > 64 else ''})"
        )
