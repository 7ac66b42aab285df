"""RMS norm of the layer specs: works under sequence parallelism and in forward mode.

    y = x / sqrt(mean(x^2) + eps) * weight        statistics in fp32, as in transformers

With Megatron's `layernorm_zero_centered_gamma` (Gemma) the factor is `1 + weight`, taken in fp32 before the result is
rounded.

Megatron's wrapper around torch's norm refuses sequence parallelism, and fused norms have no forward mode. The fused
variants here (NVIDIA's Apex, Transformer Engine in `mcore.te`) therefore compute dual numbers with this formula.
"""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Normalise the last dimension; result in the dtype of `x`."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normalised * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return normalised.to(x.dtype) * weight


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; `x_SBH -> y_SBH` in the dtype of `x`. No collectives."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        initial = torch.full((hidden_size,), float(not self.zero_centered), dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(initial)
        self.eps = eps
        # Megatron sums such gradients over TP, since each rank sees its shard of the sequence only.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


class ApexRMSNorm(RMSNorm):
    """The same with the fused kernel of NVIDIA's Apex (not the package of that name on PyPI) for plain tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        # The kernel multiplies by a weight of the dtype of its result, which `1 + weight` would be rounded to.
        if self.zero_centered or forward_ad.unpack_dual(x).tangent is not None:
            return super().forward(x)
        from apex.normalization.fused_layer_norm import mixed_dtype_fused_rms_norm_affine

        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.weight.shape, self.eps)
