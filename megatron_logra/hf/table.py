"""Builds the parameter table of a pipeline stage from its family's rules.

An entry exists for every Megatron parameter of the stage. Local layer numbers appear in Megatron names,
global ones in Hugging Face names and in projection group names, so nothing downstream depends on the
pipeline split.

With tied embeddings a stage that has the language-model head but not the embedding holds a second copy of
the embedding in `output_layer.weight`; it is loaded from the same Hugging Face tensor and never exported. A
stage with both has no `output_layer.weight` at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .config import ModelShape
from .rows import ParameterEntry, RowSlice, SourceRows, local_columns, local_rows, local_shape
from .rules import Rule


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of one (tensor, pipeline) rank with everything needed to load, export or synchronise it.

    `columns` are the Hugging Face columns this rank holds; `shape` is the shape of the local tensor.
    """

    entry: ParameterEntry
    row_slices: tuple[RowSlice, ...]
    columns: slice
    shape: tuple[int, ...]


def parameter_table(
    shape: ModelShape,
    *,
    layers: Iterable[int],
    embedding: bool,
    final: bool,
    local_layer_offset: int = 0,
    experts: Iterable[int] | None = None,
) -> list[ParameterEntry]:
    """Entries of one stage (or virtual stage).

    Args:
        shape: the model.
        layers: global, 0-based layer numbers of the stage, in order.
        embedding: the stage holds the word embedding (Megatron's `pre_process`).
        final: the stage holds the final norm and the head (Megatron's `post_process`).
        local_layer_offset: local number of the first layer.
        experts: numbers of the routed experts that the rank holds of every layer, in order; None for all.
    """
    numbered = [(local_layer_offset + position, layer) for position, layer in enumerate(layers)]
    return _stage_entries(shape, numbered, embedding=embedding, final=final, experts=experts)


def expert_range(shape: ModelShape, ep_rank: int, ep_size: int) -> range:
    """Numbers of the experts that a rank holds of every layer; empty for a dense model.

    Raises ValueError, with the arithmetic, when the experts cannot be spread evenly.
    """
    if shape.num_experts is None:
        return range(0)
    if shape.num_experts % ep_size:
        raise ValueError(
            f"{shape.num_experts} experts cannot be spread over expert_model_parallel_size {ep_size}: "
            f"{shape.num_experts} % {ep_size} = {shape.num_experts % ep_size}"
        )
    share = shape.num_experts // ep_size
    return range(ep_rank * share, (ep_rank + 1) * share)


def full_table(shape: ModelShape) -> list[ParameterEntry]:
    """Entries of the whole model as one stage; their Hugging Face names are exactly those of a checkpoint."""
    return parameter_table(shape, layers=range(shape.num_layers), embedding=True, final=True)


def build_param_plan(
    shape: ModelShape,
    *,
    tp_rank: int,
    tp_size: int,
    padded_vocab: int,
    layers: Iterable[tuple[int, int]],
    embedding: bool,
    final: bool,
    experts: Iterable[int] | None = None,
    etp_rank: int = 0,
    etp_size: int = 1,
) -> list[LocalParameter]:
    """What one rank holds: entries of its stage with the row and column maps of its tensor-parallel shard.

    Args:
        layers: (local number, global number) of every layer of the stage, both 0-based.
        experts: numbers of the routed experts that the rank holds of every layer; None for all.
        etp_rank, etp_size: shard of those experts (expert tensor parallelism).

    Raises:
        ValueError: a parameter that cannot be split over tp_size, with the arithmetic.
    """
    parameters = []
    for entry in _stage_entries(shape, layers, embedding=embedding, final=final, experts=experts):
        rank, size = (tp_rank, tp_size) if entry.expert is None else (etp_rank, etp_size)
        parameters.append(
            LocalParameter(
                entry=entry,
                row_slices=local_rows(entry, shape, rank, size, padded_vocab),
                columns=local_columns(entry, rank, size),
                shape=local_shape(entry, size, padded_vocab),
            )
        )
    return parameters


def _stage_entries(
    shape: ModelShape,
    layers: Iterable[tuple[int, int]],
    *,
    embedding: bool,
    final: bool,
    experts: Iterable[int] | None,
) -> list[ParameterEntry]:
    family = shape.table
    word_embedding, final_norm, head = family.outer_rules
    held = list(range(shape.num_experts or 0) if experts is None else experts)
    entries = []
    if embedding:
        entries.append(_build_entry(shape, word_embedding))
    for local, layer in layers:
        if not 0 <= layer < shape.num_layers:
            raise ValueError(f"layer {layer} does not exist: the model has {shape.num_layers} layers")
        prefixes = (f"decoder.layers.{local}.", f"model.layers.{layer}.")
        for rule in family.layer_rules:
            if rule.is_expert:
                entries += [_build_entry(shape, rule, *prefixes, (at, expert)) for at, expert in enumerate(held)]
            else:
                entries.append(_build_entry(shape, rule, *prefixes))
    if final:
        entries.append(_build_entry(shape, final_norm))
        if not shape.tie_embeddings:
            entries.append(_build_entry(shape, head))
        elif not embedding:
            tied = replace(head, sources=word_embedding.sources)
            entries.append(replace(_build_entry(shape, tied), exported=False))
    return entries


def _build_entry(
    shape: ModelShape,
    rule: Rule,
    megatron_prefix: str = "",
    hf_prefix: str = "",
    expert: tuple[int, int] | None = None,
) -> ParameterEntry:
    """Entry of a rule; `expert` is (local number, number in the layer) for a rule of routed experts."""
    local_expert, global_expert = (None, None) if expert is None else expert
    sources, hf_rows, hf_columns = [], dict[str, int](), dict[str, tuple[int, ...]]()
    for source in rule.sources:
        name, rows = hf_prefix + source.name.format(expert=global_expert), shape.size_of(source.rows)
        first = sum(shape.size_of(symbol) for symbol in source.skip)
        sources.append(SourceRows(name, first, rows))
        # A tensor stored fused on disk appears in several sources; its height is where the last block ends.
        hf_rows[name] = max(hf_rows.get(name, 0), first + rows)
        hf_columns[name] = (shape.size_of(source.columns),) if source.columns else ()
    return ParameterEntry(
        megatron_name=megatron_prefix + rule.megatron_name.format(local_expert=local_expert),
        sources=tuple(sources),
        parallel=rule.parallel,
        layout=rule.layout,
        group=None if rule.group is None else hf_prefix + rule.group,
        hf_shapes={name: (rows, *hf_columns[name]) for name, rows in hf_rows.items()},
        expert=global_expert,
    )
