"""Names the tensors of a training state so that any layout finds its own parts of them again.

    KEY                       weights, as Megatron names them (`hf.stored`)
    optimizer.remainder.KEY   16-bit halves of split masters           optimizer.master.KEY     fp32 masters
    optimizer.moment2.KEY     second moment of each row (RowAdam)      optimizer.exp_avg[_sq].KEY   Adam

Weights are stacked over layers. States have their layer's number in the key (`hf.stored.of_layer`), because only some
layers may be trained.

Every tensor is written by one rank: replicas and ranks that hold the same values leave it to the first of them, masters
and Adam states that replicas divide among themselves are written by those that keep them. Every rank reads whatever it
holds, into the tensors that training uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_logra.checkpoint.torch_dist import Block
from megatron_logra.hf.stored import StoredBlock, of_layer, stored_blocks
from megatron_logra.hf.table import LocalParameter
from megatron_logra.mcore.dense import DenseOptimizer
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.transformer_config import stage_layers
from megatron_logra.optim.logra import LograOptimizer


@dataclass(frozen=True)
class StateBlock:
    """A block with a live tensor; `is_written` on the one rank that writes it, `is_padded` for vocabulary rows."""

    block: Block
    is_written: bool
    is_padded: bool


@dataclass(frozen=True)
class _Held:
    """A parameter of this rank, its blocks, and whether this rank writes what is the same on others too.

    `first_of_replicas`: among the ranks that hold the same shard. `first_of_layer`: among the shards of the layer.
    """

    parameter: LocalParameter
    blocks: list[StoredBlock]
    first_of_replicas: bool
    first_of_layer: bool

    @property
    def writes_shared(self) -> bool:
        """Whether this rank writes what every holder of the shard has."""
        return self.first_of_replicas and self.writes_own

    @property
    def writes_own(self) -> bool:
        """Whether this rank writes what replicas divide among themselves."""
        entry = self.parameter.entry
        return entry.exported and (entry.parallel != "replicated" or self.first_of_layer)


def collect_state(
    policy: Policy, optimizer: LograOptimizer | None, dense: DenseOptimizer | None
) -> Iterator[StateBlock]:
    """All tensors of this rank that a checkpoint holds, as views of what training uses."""
    by_name = {held.parameter.entry.megatron_name: held for held in _held_parameters(policy)}
    for name, held in by_name.items():
        weight = policy.model.get_parameter(name).detach()
        yield from _whole("", held, weight, is_written=held.writes_shared)
        target = policy.target_by_name.get(name)
        if target is None:
            continue
        assert optimizer is not None
        owned = range(*target.owned.indices(target.num_rows))
        divided = len(owned) != target.num_rows
        written = held.writes_own if divided else held.writes_shared
        for kind, values in (("remainder", target.remainder), ("master", target.master)):
            if values is not None:
                yield from _rows(f"optimizer.{kind}.", held, values, owned.start, is_written=written)
        moments = optimizer.moment2[target.rows]
        # Shards of a row-parallel weight have the same rows, and so the same moments.
        written = held.writes_shared and (target.sharding == "column" or held.first_of_layer)
        yield from _row_values("optimizer.moment2.", held, moments, is_written=written)
    if dense is not None:
        for name, state, values, first in dense.named_states():
            held = by_name[name]
            written = held.writes_own if dense.settings.distributed else held.writes_shared
            yield from _range(f"optimizer.{state}.", held, values, first, is_written=written)


def _held_parameters(policy: Policy) -> Iterable[_Held]:
    groups = policy.groups
    layers = dict(stage_layers(policy.model.config, groups.pp_rank))
    for parameter in policy.parameters:
        is_expert = parameter.entry.expert is not None
        shared = groups.of_layers(expert=is_expert)
        blocks = stored_blocks(
            parameter,
            policy.shape,
            rank=dist.get_rank(shared.layer),
            size=dist.get_world_size(shared.layer),
            layers=layers,
            padded_vocab=parameter.shape[0] * groups.tp_size,  # asked for by vocabulary rows only
        )
        yield _Held(
            parameter,
            blocks,
            first_of_replicas=dist.get_rank(shared.replicas) == 0,
            first_of_layer=dist.get_rank(shared.layer) == 0,
        )


def _whole(prefix: str, held: _Held, tensor: Tensor, *, is_written: bool) -> Iterator[StateBlock]:
    """`tensor` with all rows of the parameter."""
    yield from _rows(prefix, held, tensor, 0, is_written=is_written)


def _rows(prefix: str, held: _Held, tensor: Tensor, first: int, *, is_written: bool) -> Iterator[StateBlock]:
    """`tensor` with the rows of the parameter from `first` on."""
    for stored in held.blocks:
        start, stop = max(first, stored.rows.start), min(first + tensor.shape[0], stored.rows.stop)
        if start < stop:
            part = tensor[start - first : stop - first]
            yield _block(prefix, stored, part, start - stored.rows.start, 0, is_written=is_written)


def _row_values(prefix: str, held: _Held, values: Tensor, *, is_written: bool) -> Iterator[StateBlock]:
    """`values` with one number for each row of the parameter, a matrix."""
    for stored in held.blocks:
        vector = StoredBlock(
            key=stored.key,
            global_shape=stored.global_shape[:-1],
            offset=stored.offset[:-1],
            rows=stored.rows,
            num_stacked=stored.num_stacked,
            is_padded=stored.is_padded,
        )
        yield _block(prefix, vector, values[stored.rows], 0, None, is_written=is_written)


def _range(prefix: str, held: _Held, values: Tensor, first: int, *, is_written: bool) -> Iterator[StateBlock]:
    """`values` are entries `first` and following of the parameter, read row by row: at most three boxes a block."""
    width = held.parameter.shape[1] if len(held.parameter.shape) == 2 else 1
    values = values.view(-1)
    for stored in held.blocks:
        low = max(first, stored.rows.start * width)
        high = min(first + values.numel(), stored.rows.stop * width)
        while low < high:
            row, column = divmod(low, width)
            if column == 0 and high - low >= width:
                stop = high // width * width
                box = values[low - first : stop - first].view(-1, width)
            else:
                stop = min(high, (row + 1) * width)
                box = values[low - first : stop - first].view(1, -1)
            if len(held.parameter.shape) == 1:
                box = box.view(-1)
            yield _block(prefix, stored, box, row - stored.rows.start, column, is_written=is_written)
            low = stop


def _block(
    prefix: str, stored: StoredBlock, tensor: Tensor, row: int, column: int | None, *, is_written: bool
) -> StateBlock:
    """`tensor` as the part of a stored block that begins at `row` and `column` of it.

    Weights are stacked over layers; states of optimizers are not, because some layers may have none.
    """
    stored = of_layer(stored) if prefix else stored
    offset = list(stored.offset)
    offset[stored.num_stacked] += row
    if len(offset) > stored.num_stacked + 1:
        offset[-1] += column or 0
    stacked = tensor.view((1,) * stored.num_stacked + tensor.shape)
    block = Block(
        key=prefix + stored.key,
        global_shape=stored.global_shape,
        offset=tuple(offset),
        shape=tuple(stacked.shape),
        dtype=tensor.dtype,
        data=stacked,
    )
    return StateBlock(block, is_written=is_written, is_padded=stored.is_padded)
