"""The map between rows of a Megatron parameter on one tensor-parallel rank and rows of Hugging Face tensors.

Weights and synchronisation factors have the same rows, so both use this map. The whole Megatron parameter
(all ranks) is a sequence of units, each holding one equal block of every source:

    qkv      unit = query group: [q heads of the group, k head, v head]   as Megatron's SelfAttention splits
    gate_up  unit = TP rank: [gate rows of the rank, up rows of the rank]   as Megatron's MLP halves them
    plain    one unit

A column-parallel or vocabulary-parallel rank owns rows `[rank * N / tp, (rank + 1) * N / tp)` of that
sequence. With fewer query groups than ranks this cuts groups into pieces, which is also what Megatron does:
it gathers the pieces in the forward pass, and no row exists twice. The vocabulary is padded at its end;
padding rows have no Hugging Face rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .config import ModelShape
from .rules import Layout, Parallel


@dataclass(frozen=True)
class RowSlice:
    """Rows `hf_rows` of Hugging Face tensor `hf_name` are rows `local_rows` of a rank's parameter."""

    hf_name: str
    hf_rows: slice
    local_rows: slice

    @property
    def num_rows(self) -> int:
        return self.local_rows.stop - self.local_rows.start


@dataclass(frozen=True)
class SourceRows:
    """Rows `[first_row, first_row + num_rows)` of Hugging Face tensor `hf_name`, all ranks together."""

    hf_name: str
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class ParameterEntry:
    """One Megatron parameter of a pipeline stage and the Hugging Face tensors it is made of.

    Attributes:
        megatron_name: name in the stage's GPTModel (layer numbers local to the stage).
        sources: the row blocks it is made of, in the order of a layout unit.
        parallel: `column` (rows split over TP), `row` (columns split over TP), `vocab` (rows split,
            padded), `replicated`.
        layout: order of the rows, see the module's docstring.
        group: projection group name (global layer number) if the parameter is a sketch target, else None.
        hf_shapes: shape of every Hugging Face tensor named in `sources`.
        exported: False for the second copy of tied embeddings, whose owner is the embedding entry.
        expert: number of the routed expert in its layer; None for everything else. An expert is split over the
            expert-tensor-parallel ranks, everything else over the tensor-parallel ranks.
    """

    megatron_name: str
    sources: tuple[SourceRows, ...]
    parallel: Parallel
    layout: Layout
    group: str | None
    hf_shapes: Mapping[str, tuple[int, ...]]
    exported: bool = True
    expert: int | None = None

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The Hugging Face names, each once, in source order."""
        return tuple(dict.fromkeys(source.hf_name for source in self.sources))

    @property
    def num_columns(self) -> int | None:
        """Columns of the whole parameter; None for a vector."""
        hf_shape = self.hf_shapes[self.sources[0].hf_name]
        return hf_shape[1] if len(hf_shape) == 2 else None

    def num_rows(self, padded_vocab: int) -> int:
        """Rows of the whole parameter over all TP ranks, vocabulary padding included."""
        if self.parallel == "vocab":
            return padded_vocab
        return sum(source.num_rows for source in self.sources)


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tp_size: int) -> int:
    """Smallest multiple of make_vocab_size_divisible_by x tp_size that holds the vocabulary (as Megatron)."""
    if make_vocab_size_divisible_by < 1 or tp_size < 1:
        raise ValueError(
            f"make_vocab_size_divisible_by {make_vocab_size_divisible_by} and "
            f"tensor_model_parallel_size {tp_size} must be at least 1"
        )
    multiple = make_vocab_size_divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def validate_layout(shape: ModelShape, *, tp_size: int, pp_size: int = 1) -> None:
    """Raise ValueError, with the arithmetic of every problem, if the model cannot be split evenly this way."""
    problems = []

    def check(what: str, count: int, setting: str, size: int) -> None:
        if count % size:
            problems.append(f"{count} {what} cannot be split over {setting} {size}: {count} % {size} = {count % size}")

    check("attention heads", shape.num_attention_heads, "tensor_model_parallel_size", tp_size)
    if tp_size % shape.num_query_groups:
        check("query groups (KV heads)", shape.num_query_groups, "tensor_model_parallel_size", tp_size)
    check("MLP rows (ffn_hidden_size)", shape.ffn_hidden_size, "tensor_model_parallel_size", tp_size)
    check("layers", shape.num_layers, "pipeline_model_parallel_size", pp_size)
    if problems:
        raise ValueError("; ".join(problems) + "; choose sizes that divide these counts")


def local_num_rows(entry: ParameterEntry, tp_size: int, padded_vocab: int) -> int:
    """Rows of the parameter on one rank; ValueError with the arithmetic if they do not divide."""
    total = entry.num_rows(padded_vocab)
    if entry.parallel in ("row", "replicated"):
        return total
    if total % tp_size:
        raise ValueError(
            f"{entry.megatron_name}: {total} rows cannot be split over tensor_model_parallel_size {tp_size}: "
            f"{total} % {tp_size} = {total % tp_size}"
        )
    return total // tp_size


def local_columns(entry: ParameterEntry, tp_rank: int, tp_size: int) -> slice:
    """Columns of the Hugging Face tensors that a rank holds: its share for `row`, else `slice(None)`."""
    _check_rank(tp_rank, tp_size)
    width = entry.num_columns
    if entry.parallel != "row" or width is None:
        return slice(None)
    if width % tp_size:
        raise ValueError(
            f"{entry.megatron_name}: {width} columns cannot be split over "
            f"tensor_model_parallel_size {tp_size}: {width} % {tp_size} = {width % tp_size}"
        )
    share = width // tp_size
    return slice(tp_rank * share, (tp_rank + 1) * share)


def local_shape(entry: ParameterEntry, tp_size: int, padded_vocab: int) -> tuple[int, ...]:
    """Shape of the parameter on one tensor-parallel rank."""
    rows, width = local_num_rows(entry, tp_size, padded_vocab), entry.num_columns
    if width is None:
        return (rows,)
    columns = local_columns(entry, 0, tp_size)
    return (rows, width if columns.stop is None else columns.stop - columns.start)


def local_rows(
    entry: ParameterEntry, shape: ModelShape, tp_rank: int, tp_size: int, padded_vocab: int
) -> tuple[RowSlice, ...]:
    """Where each row of the rank's parameter comes from, in ascending order of local rows.

    Vocabulary padding rows are in no slice: they are zero on load and dropped on export. A Hugging Face
    name may occur several times (once per local query group).
    """
    _check_rank(tp_rank, tp_size)
    num_local = local_num_rows(entry, tp_size, padded_vocab)
    sharded = entry.parallel in ("column", "vocab")
    first = tp_rank * num_local if sharded else 0
    num_units = _num_units(entry, shape, tp_size)
    slices, cursor = [], 0
    for unit in range(num_units):
        for source in entry.sources:
            block = source.num_rows // num_units
            begin, end = max(cursor, first), min(cursor + block, first + num_local)
            if begin < end:
                hf_first = source.first_row + unit * block + begin - cursor
                hf_rows = slice(hf_first, hf_first + end - begin)
                slices.append(RowSlice(source.hf_name, hf_rows, slice(begin - first, end - first)))
            cursor += block
    return tuple(slices)


def _num_units(entry: ParameterEntry, shape: ModelShape, tp_size: int) -> int:
    num_units = {"plain": 1, "qkv": shape.num_query_groups, "gate_up": tp_size}[entry.layout]
    for source in entry.sources:
        if source.num_rows % num_units:
            raise ValueError(
                f"{entry.megatron_name}: {source.num_rows} rows of {source.hf_name} cannot be split into "
                f"{num_units} equal blocks: {source.num_rows} % {num_units} = {source.num_rows % num_units}"
            )
    return num_units


def _check_rank(tp_rank: int, tp_size: int) -> None:
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank {tp_rank} is outside tensor_model_parallel_size {tp_size}")
