"""Transformer Engine's norm and attention around our linears, with our formulas for the tangent pass.

Imported only when Transformer Engine is used. Its modules are the fast path for plain tensors; they have no forward
mode, so dual numbers take `mcore.norm` and `mcore.attention`. Its linears are not used: the fused ones normalise their
input inside, where a sketch cannot see it, and the plain ones would form the weight gradient.
"""

from __future__ import annotations

from typing import Any

import torch.autograd.forward_ad as forward_ad
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformer_engine.pytorch import RMSNorm as FusedRMSNorm

from megatron_logra.mcore.attention import CausalAttention
from megatron_logra.mcore.norm import rms_norm


class TERMSNorm(FusedRMSNorm):
    """Transformer Engine's RMS norm; its parameter is called `weight`, as in `mcore.norm.RMSNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(
            hidden_size,
            eps=eps,
            sequence_parallel=config.sequence_parallel,
            params_dtype=config.params_dtype,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
        )
        self._tangent_eps, self._zero_centered = eps, config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if forward_ad.unpack_dual(x).tangent is not None:
            return rms_norm(x, self.weight, self._tangent_eps, zero_centered=self._zero_centered)
        return super().forward(x)


class TECausalAttention(TEDotProductAttention):
    """Transformer Engine's attention (fused, also under context parallelism); it reads Megatron's `window_size`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As Megatron builds core attention."""
        super().__init__(*args, **options)
        self._in_tangent = CausalAttention(*args, **options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: object
    ) -> Tensor:
        """Attend, causally."""
        if any(forward_ad.unpack_dual(t).tangent is not None for t in (query, key, value)):
            return self._in_tangent(query, key, value)
        return super().forward(query, key, value, attention_mask, **options)
