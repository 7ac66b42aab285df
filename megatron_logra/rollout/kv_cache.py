"""Keys and values of a batch while it is sampled: written in place, rows copied from shared prompts, dropped rows.

A `transformers` cache made for rollouts. A prompt is computed once and its rows copied to every response of that
prompt; a new token is written into its slot (the library's own cache copies everything at every token); the row
of a finished response is taken over by the last row. Slots grow in steps, so memory follows the real length.

Shapes: keys and values `[rows, key/value heads, slots, head size]`; slot `s` of every row is the same column of
the left-padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_SLOT_GROWTH = 32


class RolloutCacheLayer(CacheLayerMixin):
    """Keys and values of one layer; `num_rows` and `length` say which part of the buffers is in use."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A first call without `copy_rows` is a prompt: its keys and values are kept as they are."""
        self.num_rows = key_states.shape[0]
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the new slots of every row in use and returns keys and values of all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if start == 0:
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        if self.length > self.keys.shape[2]:
            self._grow()
        self.keys[: self.num_rows, :, start : self.length] = key_states
        self.values[: self.num_rows, :, start : self.length] = value_states
        return self.keys[: self.num_rows, :, : self.length], self.values[: self.num_rows, :, : self.length]

    def _grow(self) -> None:
        num_slots = self.length + max(MIN_SLOT_GROWTH, self.length // 4)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(self.num_rows, old.shape[1], num_slots, old.shape[3])
            new[:, :, : old.shape[2]] = old[: self.num_rows]
            setattr(self, name, new)

    def copy_rows(self, prompts: RolloutCacheLayer, source_rows: Tensor, first_row: int, shape: Sequence[int]) -> None:
        """Copies rows of a prompt's layer to rows `first_row`, ... of this one, right-aligned in `shape[1]` slots.

        Args:
            prompts: layer filled by one forward over prompts.
            source_rows: int64, the row of `prompts` for each row to write.
            first_row: where the first goes.
            shape: (rows, slots) of the whole batch; allocated at the first call.
        """
        num_rows, length = shape
        assert prompts.keys is not None and prompts.values is not None
        for name in ("keys", "values"):
            source = getattr(prompts, name)
            if not self.is_initialized:
                buffer = source.new_zeros(num_rows, source.shape[1], length + MIN_SLOT_GROWTH, source.shape[3])
                setattr(self, name, buffer)
            target = getattr(self, name)
            rows = slice(first_row, first_row + len(source_rows))
            target[rows, :, length - source.shape[2] : length] = source.index_select(0, source_rows)
        self.num_rows, self.length, self.is_initialized = num_rows, length, True

    def move_rows(self, source_rows: Tensor, target_rows: Tensor, num_rows: int) -> None:
        """Copies whole rows within the buffers, then keeps the first `num_rows` of them."""
        assert self.keys is not None and self.values is not None
        if len(source_rows) > 0:
            for buffer in (self.keys, self.values):
                buffer[target_rows, :, : self.length] = buffer[source_rows, :, : self.length]
        self.num_rows = num_rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class RolloutCache(Cache):
    """`RolloutCacheLayer` for every layer of a model."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[RolloutCacheLayer() for _ in range(num_layers)])

    def copy_rows(self, prompts: RolloutCache, source_rows: Tensor, first_row: int, shape: Sequence[int]) -> None:
        """`RolloutCacheLayer.copy_rows` in every layer."""
        for layer, prompt_layer in zip(self.layers, prompts.layers, strict=True):
            layer.copy_rows(prompt_layer, source_rows, first_row, shape)

    def keep_rows(self, kept: Sequence[bool]) -> list[int]:
        """Drops the rows that are not kept by moving the last kept rows into their places.

        Returns the old row of every new row, for whoever keeps state beside the cache.
        """
        num_rows = sum(kept)
        order = list(range(num_rows))
        holes = [row for row in range(num_rows) if not kept[row]]
        movers = [row for row in range(num_rows, len(kept)) if kept[row]]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        device = self.layers[0].keys.device
        source_rows = torch.tensor(movers, dtype=torch.int64, device=device)
        target_rows = torch.tensor(holes, dtype=torch.int64, device=device)
        for layer in self.layers:
            layer.move_rows(source_rows, target_rows, num_rows)
        return order
