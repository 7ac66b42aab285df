"""Which blocks a checkpoint of a model consists of, at any tensor and pipeline parallel sizes, without building it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.rows import padded_vocab_size, validate_layout
from megatron_logra.hf.stored import StoredBlock, stored_blocks
from megatron_logra.hf.table import LocalParameter, build_param_plan


@dataclass(frozen=True)
class Layout:
    """The blocks that a checkpoint consists of: those of the ranks of a Megatron run with these sizes."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    make_vocab_size_divisible_by: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} {value} must be at least 1")


WHOLE = Layout(make_vocab_size_divisible_by=1)
"""One rank, no padding: every parameter in the rows and columns that a stored tensor has."""


@dataclass(frozen=True)
class Placed:
    """A parameter of tensor-parallel rank `rank` in pipeline stage `stage`, and its blocks in the checkpoint."""

    stage: int
    rank: int
    parameter: LocalParameter
    blocks: list[StoredBlock]

    @property
    def stored_name(self) -> str:
        """Key and place along the stacked axes: `decoder.layers.mlp.linear_fc1.weight[2]`."""
        first = self.blocks[0]
        stacked = ", ".join(map(str, first.offset[: first.num_stacked]))
        return f"{first.key}[{stacked}]" if stacked else first.key


def place_parameters(shape: ModelShape, layout: Layout) -> Iterator[Placed]:
    """All that is stored of a model, each part once: of what several ranks hold alike, the first one's.

    Raises:
        ValueError: the model cannot be split this way, with the arithmetic.
    """
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    validate_layout(shape, tp_size=tp, pp_size=pp)
    padded = padded_vocab_size(shape.vocab_size, layout.make_vocab_size_divisible_by, tp)
    per_stage = shape.num_layers // pp
    for stage in range(pp):
        layers = [(local, stage * per_stage + local) for local in range(per_stage)]
        for rank in range(tp):
            for parameter in build_param_plan(
                shape,
                tp_rank=rank,
                tp_size=tp,
                padded_vocab=padded,
                layers=layers,
                embedding=stage == 0,
                final=stage == pp - 1,
                etp_rank=rank,
                etp_size=tp,
            ):
                entry = parameter.entry
                if entry.exported and (rank == 0 or entry.parallel != "replicated"):
                    blocks = stored_blocks(
                        parameter, shape, rank=rank, size=tp, layers=dict(layers), padded_vocab=padded
                    )
                    yield Placed(stage, rank, parameter, blocks)


def name_map(shape: ModelShape, layout: Layout) -> Iterator[str]:
    """A line for each parameter of a model: its stage and name there, its Hugging Face tensors, its stored name."""
    for placed in place_parameters(shape, layout):
        if placed.rank == 0:
            entry = placed.parameter.entry
            sources = ", ".join(entry.hf_names)
            yield f"stage {placed.stage}  {entry.megatron_name}  <-  {sources}  (stored: {placed.stored_name})"
