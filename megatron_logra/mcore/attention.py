"""Self-attention of the layer specs: grouped queries under any tensor parallelism, causal core attention without a
`[T, T]` matrix, over a window of the sequence or all of it, also over sequences split among context-parallel ranks.

    O = softmax(cap(Q K^T * scale) + mask) V        cap(x) = c tanh(x / c) in families with soft-capping, else x
    position t sees positions t - W + 1 ... t of a layer with window W, else 0 ... t
    grouped queries: each KV head serves `heads / groups` heads

Context parallelism cuts a sequence into `2 cp` chunks; rank `r` holds chunks `r` and `2 cp - 1 - r`, so that all ranks
have the same causal work (the order of Megatron's own batches). Queries stay where they are; keys and values, which
grouped queries make small, are gathered, and each chunk of queries attends to the keys up to its own end.

What plain causal attention of a whole sequence cannot express goes in blocks of queries, each with the slice of keys
that it may see, and backward computes each block again: memory grows with block times slice. A block, like a whole
sequence, uses `scaled_dot_product_attention`. It computes the formula with ordinary differentiable operations instead
where fused kernels cannot: under soft-capping, and in the tangent pass, for which they have no derivative.

Shapes: `query_SBNd`, `key_SBKd`, `value_SBKd` with `N` local heads and `K` local KV heads; output `[S, B, N d]`; within
a block `q` queries and `k` keys. Padding stands at the right end of a sequence, so the causal mask alone keeps it from
the valid tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron_logra.mcore.transformer_config import DecoderConfig
from megatron_logra.parallel.collectives import gather_last_dim, gather_sequence

QUERY_BLOCK = 512

AttendBlock = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
"""`attend(q_BNqd, k_BKkd, v_BKkd, first_query, first_key) -> [B, N, q, d]`."""


def attention_window(config: TransformerConfig, layer_number: int) -> int | None:
    """Positions that a layer (1-based global number) sees, its own included; None: all before it.

    Megatron's `window_size` counts the positions to the left of a query.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return config.window_size[0] + 1


class GroupedSelfAttention(SelfAttention):
    """Megatron's self-attention, with a gather of ours where TP ranks outnumber the KV heads.

    There a rank's rows of the qkv weight are a piece of a query group, and the activations are gathered over TP before
    the rank takes its heads. Megatron's gather has no tangent, and its backward does not run over gloo.

    Where layers with a window rotate by another base, both kinds of angles arrive (`mcore.rotary`); it takes its own.
    """

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """As Megatron's, with `rotary_pos_emb` `[S, kinds of layers, 1, d]`."""
        if rotary_pos_emb.shape[1] > 1:
            is_local = attention_window(self.config, self.layer_number) is not None
            # Fused kernels read the angles of a position as neighbours in memory.
            rotary_pos_emb = rotary_pos_emb[:, int(is_local), None].contiguous()
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Query `[S, B, N, d]`, key and value `[S, B, K, d]` of this rank."""
        num_groups = self.config.num_query_groups
        if num_groups >= self.world_size:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        tp, width = self.pg_collection.tp, self.hidden_size_per_attention_head
        ranks_per_group = self.world_size // num_groups
        group, member = divmod(dist.get_rank(tp), ranks_per_group)
        mixed, _ = self.linear_qkv(hidden_states)
        whole = gather_last_dim(mixed, tp)
        heads_per_group = self.config.num_attention_heads // num_groups
        heads = heads_per_group // ranks_per_group
        rows = whole.unflatten(-1, (num_groups, heads_per_group + 2, width))[:, :, group]
        query = rows[:, :, member * heads : (member + 1) * heads]
        key, value = rows[:, :, heads_per_group, None], rows[:, :, heads_per_group + 1, None]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


class CausalAttention(MegatronModule):
    """Core attention with Megatron's interface; masks other than causal, or within a causal window, are refused.

    Collectives: with context parallelism one all-gather of keys and values, one reduce-scatter in backward.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError(f"CausalAttention serves causal self-attention, not {attn_mask_type} {attention_type}")
        if attention_dropout or config.attention_dropout:
            raise ValueError(f"attention_dropout {config.attention_dropout} must be 0 for reinforcement learning")
        assert config.kv_channels is not None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.softcap = config.attention_softcap
        self.window = attention_window(config, layer_number)
        self.cp_group: ProcessGroup | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """Attend; `attention_mask` is not read, the mask is causal."""
        assert attention_bias is None and packed_seq_params is None
        attend = self._attend
        if any(forward_ad.unpack_dual(t).tangent is not None for t in (query, key, value)):
            attend = self._attend_unfused
        if self.cp_group is None:
            q_BNSd, k_BKSd, v_BKSd = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            out_BNSd = attend(q_BNSd, k_BKSd, v_BKSd, 0)
        else:
            out_BNSd = self._attend_chunks(query, key, value, attend)
        return out_BNSd.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def _attend_chunks(self, query: Tensor, key: Tensor, value: Tensor, attend: Any) -> Tensor:
        assert self.cp_group is not None
        size, rank = dist.get_world_size(self.cp_group), dist.get_rank(self.cp_group)
        gathered = gather_sequence(torch.cat([key, value], dim=-1), self.cp_group)
        chunks = gathered.chunk(2 * size, dim=0)
        # Rank r sent chunks r and 2 cp - 1 - r, one after the other.
        in_order = [chunks[2 * c] if c < size else chunks[2 * (2 * size - 1 - c) + 1] for c in range(2 * size)]
        whole_BKTe = torch.cat(in_order, dim=0).permute(1, 2, 0, 3)
        k_BKTd, v_BKTd = whole_BKTe.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs = []
        for number, chunk in zip((rank, 2 * size - 1 - rank), query.chunk(2, dim=0), strict=True):
            first = number * chunk.shape[0]
            stop = first + chunk.shape[0]
            outputs.append(attend(chunk.permute(1, 2, 0, 3), k_BKTd[:, :, :stop], v_BKTd[:, :, :stop], first))
        return torch.cat(outputs, dim=2)

    def _attend(self, q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, first: int) -> Tensor:
        """Queries at positions `first...` over all keys up to the last query."""
        if self.softcap is not None:
            return self._attend_unfused(q_BNSd, k_BKTd, v_BKTd, first)
        if first or (self.window is not None and self.window < k_BKTd.shape[2]):
            return self._attend_in_blocks(q_BNSd, k_BKTd, v_BKTd, first, self._fused_block)
        return self._fused(q_BNSd, k_BKTd, v_BKTd, is_causal=True)

    def _attend_unfused(self, q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, first: int) -> Tensor:
        return self._attend_in_blocks(q_BNSd, k_BKTd, v_BKTd, first, self._unfused_block)

    def _attend_in_blocks(
        self, q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, first: int, attend: AttendBlock
    ) -> Tensor:
        recompute = torch.is_grad_enabled() and any(t.requires_grad for t in (q_BNSd, k_BKTd, v_BKTd))
        blocks = []
        for q_BNqd in q_BNSd.split(QUERY_BLOCK, dim=2):
            stop = first + q_BNqd.shape[2]
            start = 0 if self.window is None else max(0, first + 1 - self.window)
            # Keys outside can be seen by no query of the block.
            inputs = (q_BNqd, k_BKTd[:, :, start:stop], v_BKTd[:, :, start:stop], first, start)
            if recompute:
                blocks.append(checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False))
            else:
                blocks.append(attend(*inputs))
            first = stop
        return torch.cat(blocks, dim=2)

    def _visible(self, q_BNqd: Tensor, k_BKkd: Tensor, first_query: int, first_key: int) -> Tensor:
        """Bool `[q, k]`: what each query may see."""
        rows = first_query + torch.arange(q_BNqd.shape[2], device=q_BNqd.device)[:, None]
        columns = first_key + torch.arange(k_BKkd.shape[2], device=q_BNqd.device)[None, :]
        visible_qk = columns <= rows
        return visible_qk if self.window is None else visible_qk & (columns > rows - self.window)

    def _fused_block(self, q_BNqd: Tensor, k_BKkd: Tensor, v_BKkd: Tensor, first_query: int, first_key: int) -> Tensor:
        return self._fused(q_BNqd, k_BKkd, v_BKkd, attn_mask=self._visible(q_BNqd, k_BKkd, first_query, first_key))

    def _fused(self, q_BNqd: Tensor, k_BKkd: Tensor, v_BKkd: Tensor, **mask: Any) -> Tensor:
        grouped = q_BNqd.shape[1] != k_BKkd.shape[1]
        return F.scaled_dot_product_attention(
            q_BNqd, k_BKkd, v_BKkd, scale=self.softmax_scale, enable_gqa=grouped, **mask
        )

    def _unfused_block(
        self, q_BNqd: Tensor, k_BKkd: Tensor, v_BKkd: Tensor, first_query: int, first_key: int
    ) -> Tensor:
        # Heads of a group side by side, so that its one KV head serves them by broadcasting.
        q_BKGqd = q_BNqd.unflatten(1, (k_BKkd.shape[1], -1))
        scores = (q_BKGqd @ k_BKkd[:, :, None].transpose(-1, -2)) * self.softmax_scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        hidden_qk = ~self._visible(q_BNqd, k_BKkd, first_query, first_key)
        probabilities = scores.masked_fill(hidden_qk, float("-inf")).softmax(-1)
        return (probabilities.to(v_BKkd.dtype) @ v_BKkd[:, :, None]).flatten(1, 2)
