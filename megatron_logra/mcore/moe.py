"""Mixture-of-experts layer: Megatron's dispatch for training, and a dispatch of ours for the tangent pass.

    y = sum over the top-k experts e of token x:  w_e(x) E_e(x)  [+ sigmoid(g x) E_shared(x)]

Training passes go through Megatron's all-to-all dispatcher, which has no tangent. In the tangent pass, which sees a
few responses once a step, every rank gathers the tokens of the ranks it shares experts with, adds up what its own
experts make of them, and the sums are scattered back:

    gather tokens, weights over etp x ep  ->  local experts  ->  reduce-scatter over etp x ep

Both are linear maps with a tangent (`parallel.collectives`). All ranks of the group must bring equally many tokens,
which the batches of the probe do. Which experts a token goes to is taken as constant, as in every derivative of a
mixture of experts.

Shapes: `x_SBH`; `n` tokens of this rank, `E` experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_logra.parallel.collectives import gather_sequence, reduce_scatter_sequence
from megatron_logra.sketch.target import SketchPhase


class Router(TopKRouter):
    """Top-k router as transformers computes it: logits in the model's dtype, weights in fp32 or wider, no extra loss.

    Megatron's own has no tangent and rounds the weights of an fp64 model to fp32.
    """

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`x_SBH` to (weights, map), both `[n, E]`: the weight of each expert for each token, and which it goes to."""
        logits = F.linear(x, self.weight).reshape(-1, self.num_experts)
        wide = torch.promote_types(logits.dtype, torch.float32)
        chosen = logits.topk(self.topk, dim=-1).indices
        if self.config.moe_router_pre_softmax:
            weights = logits.to(wide).softmax(-1).gather(1, chosen)
        else:
            weights = logits.to(wide).gather(1, chosen).softmax(-1)
        routed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        return torch.zeros_like(logits, dtype=wide).scatter(1, chosen, weights), routed


class SketchedMoELayer(MoELayer):
    """Megatron's layer; `phase` says when the tangent pass runs."""

    phase: SketchPhase | None = None

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`[S(/tp), B, H] -> [S(/tp), B, H]`; no bias."""
        if self.phase is not None and self.phase.current == "tangent":
            return self._tangent_forward(hidden_states), None
        return super().forward(hidden_states, intermediate_tensors, padding_mask)

    def _tangent_forward(self, hidden_SBH: Tensor) -> Tensor:
        group = self.token_dispatcher.tp_ep_group
        weights_nE, routed_nE = self.router(hidden_SBH)
        tokens = gather_sequence(hidden_SBH.reshape(-1, hidden_SBH.shape[-1]), group)
        weights = gather_sequence(weights_nE, group)
        routed = gather_sequence(routed_nE.to(torch.uint8), group).bool()
        total = torch.zeros_like(tokens)
        for expert, number in zip(self.experts.local_experts, self.local_expert_indices, strict=True):
            chosen = routed[:, number].nonzero()[:, 0]
            output, _ = expert(tokens.index_select(0, chosen), weights[:, number].index_select(0, chosen))
            total = total.index_add(0, chosen, output)
        output_SBH = reduce_scatter_sequence(total, group).view_as(hidden_SBH)
        if self.shared_experts is not None:
            output_SBH = output_SBH + self.shared_experts(hidden_SBH)
        # A dual tensor that is a view would be passed through a function of Megatron's without tangent.
        return output_SBH.clone()
