"""Self-attention of the layer specs: grouped queries under any tensor parallelism, causal core attention without a
`[T, T]` matrix, also over sequences that are split among context-parallel ranks.

    O = softmax(Q K^T / sqrt(d) + causal mask) V        grouped queries: each KV head serves `heads / groups` heads

Context parallelism cuts a sequence into `2 cp` chunks; rank `r` holds chunks `r` and `2 cp - 1 - r`, so that all ranks
have the same causal work (the order of Megatron's own batches). Queries stay where they are; keys and values, which
grouped queries make small, are gathered, and each chunk of queries attends to the keys up to its own end.

Ordinary passes use `scaled_dot_product_attention`. The tangent pass, where fused kernels have no derivative, computes
the same formula in blocks of queries with ordinary differentiable operations.

Shapes: `query_SBNd`, `key_SBKd`, `value_SBKd` with `N` local heads and `K` local KV heads; output `[S, B, N d]`.
Padding stands at the right end of a sequence, so the causal mask alone keeps it from the valid tokens.
"""

from __future__ import annotations

import math
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
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.parallel.collectives import gather_last_dim, gather_sequence

QUERY_BLOCK = 512


class GroupedSelfAttention(SelfAttention):
    """Megatron's self-attention, with a gather of ours where TP ranks outnumber the KV heads.

    There a rank's rows of the qkv weight are a piece of a query group, and the activations are gathered over TP before
    the rank takes its heads. Megatron's gather has no tangent, and its backward does not run over gloo.
    """

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
    """Core attention with Megatron's interface; masks other than causal are refused.

    Collectives: with context parallelism one all-gather of keys and values, one reduce-scatter in backward.
    """

    def __init__(
        self,
        config: TransformerConfig,
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
            attend = self._attend_blockwise
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
        mask = None
        if first:
            length, stop = q_BNSd.shape[2], k_BKTd.shape[2]
            mask = torch.ones(length, stop, dtype=torch.bool, device=q_BNSd.device).tril(stop - length)
        return F.scaled_dot_product_attention(
            q_BNSd,
            k_BKTd,
            v_BKTd,
            attn_mask=mask,
            is_causal=not first,
            scale=self.softmax_scale,
            enable_gqa=q_BNSd.shape[1] != k_BKTd.shape[1],
        )

    def _attend_blockwise(self, q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, first: int) -> Tensor:
        batch, heads, length, width = q_BNSd.shape
        groups = k_BKTd.shape[1]
        q = q_BNSd.reshape(batch, groups, heads // groups, length, width)
        k, v = k_BKTd.unsqueeze(2), v_BKTd.unsqueeze(2)
        blocks = [
            self._attend_block(q[..., start : start + QUERY_BLOCK, :], k, v, first + start)
            for start in range(0, length, QUERY_BLOCK)
        ]
        return torch.cat(blocks, dim=-2).reshape(batch, heads, length, -1)

    def _attend_block(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        stop = start + q.shape[-2]
        # Keys after the last query of the block cannot be attended to.
        scores = (q @ k[..., :stop, :].transpose(-1, -2)) * self.softmax_scale
        rows = torch.arange(start, stop, device=q.device)[:, None]
        future = torch.arange(stop, device=q.device)[None, :] > rows
        wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
        probabilities = scores.to(wide).masked_fill(future, float("-inf")).softmax(-1)
        return probabilities.to(v.dtype) @ v[..., :stop, :]
