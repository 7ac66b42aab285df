"""Transformer Engine's norm and attention around our linears, with our formulas for the tangent pass.

Imported only when Transformer Engine is used. Its modules are the fast path for plain tensors; they have no forward
mode, so dual numbers take `mcore.norm` and `mcore.attention`. Its linears are not used: the fused ones normalise their
input inside, where a sketch cannot see it, and the plain ones would form the weight gradient.
"""

from __future__ import annotations

import torch.autograd.forward_ad as forward_ad
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformer_engine.pytorch import RMSNorm as FusedRMSNorm

from megatron_logra.mcore.attention import CausalAttention
from megatron_logra.mcore.norm import rms_norm


class TERMSNorm(FusedRMSNorm):
    """Transformer Engine's RMS norm; its parameter is called `weight`, as in `mcore.norm.RMSNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(
            hidden_size, eps=eps, sequence_parallel=config.sequence_parallel, params_dtype=config.params_dtype
        )
        self._tangent_eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if forward_ad.unpack_dual(x).tangent is not None:
            return rms_norm(x, self.weight, self._tangent_eps)
        return super().forward(x)


class TECausalAttention(TEDotProductAttention):
    """Transformer Engine's attention (fused, also under context parallelism)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        **options: object,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, pg_collection=pg_collection, **options)
        self._in_tangent = CausalAttention(
            config, layer_number, attn_mask_type, attention_type, pg_collection=pg_collection
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: object
    ) -> Tensor:
        """Attend, causally."""
        if any(forward_ad.unpack_dual(t).tangent is not None for t in (query, key, value)):
            return self._in_tangent(query, key, value)
        return super().forward(query, key, value, attention_mask, **options)
