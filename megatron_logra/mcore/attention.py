"""Causal core attention of the local layer spec, without a `[T, T]` matrix.

    O = softmax(Q K^T / sqrt(d) + causal mask) V        grouped queries: each KV head serves `heads / groups` heads

Ordinary passes use `scaled_dot_product_attention`. The tangent pass, where fused kernels have no derivative, computes
the same formula in blocks of queries with ordinary differentiable operations.

Shapes: `query_SBNd`, `key_SBKd`, `value_SBKd` with `N` local heads and `K` local KV heads; output `[S, B, N d]`.
Padding stands at the right end of a sequence, so the causal mask alone keeps it from the valid tokens.
"""

from __future__ import annotations

import math

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

QUERY_BLOCK = 512


class CausalAttention(MegatronModule):
    """Core attention with Megatron's interface; masks other than causal are refused. No collectives."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError(f"CausalAttention serves causal self-attention, not {attn_mask_type} {attention_type}")
        if attention_dropout or config.attention_dropout:
            raise ValueError(f"attention_dropout {config.attention_dropout} must be 0 for reinforcement learning")
        assert config.kv_channels is not None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        q_BNSd, k_BKSd, v_BKSd = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if any(forward_ad.unpack_dual(t).tangent is not None for t in (query, key, value)):
            out_BNSd = self._blockwise(q_BNSd, k_BKSd, v_BKSd)
        else:
            out_BNSd = F.scaled_dot_product_attention(
                q_BNSd,
                k_BKSd,
                v_BKSd,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=q_BNSd.shape[1] != k_BKSd.shape[1],
            )
        return out_BNSd.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def _blockwise(self, q_BNSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
        batch, heads, length, width = q_BNSd.shape
        groups = k_BKSd.shape[1]
        q = q_BNSd.reshape(batch, groups, heads // groups, length, width)
        k, v = k_BKSd.unsqueeze(2), v_BKSd.unsqueeze(2)
        blocks = [
            self._attend_block(q[..., start : start + QUERY_BLOCK, :], k, v, start)
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
