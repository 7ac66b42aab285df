"""Megatron's transformer layer with norms on the two branches that are added to the residual stream.

    h = x + norm(attention(norm(x)))        y = h + norm(mlp(norm(h)))

Megatron's own layer has the inner norms only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

BiasDropoutAdd = Callable[[bool, bool], Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]]


class PostNormTransformerLayer(TransformerLayer):
    """`post_self_attn_layernorm` and `post_mlp_layernorm` are built from `post_norm`."""

    def __init__(self, config: TransformerConfig, *args: Any, post_norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
            setattr(self, name, post_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon))
        self.self_attn_bda: BiasDropoutAdd = _after_norm(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda: BiasDropoutAdd = _after_norm(self.post_mlp_layernorm, self.mlp_bda)


def _after_norm(norm: nn.Module, bias_dropout_add: BiasDropoutAdd) -> BiasDropoutAdd:
    """Normalise what is to be added; the linears of such layers have no bias that would have to be added before."""

    def build(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        add = bias_dropout_add(training, fused)

        def add_normalised(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = branch
            assert bias is None
            return add((norm(output), None), residual, dropout)

        return add_normalised

    return build
