"""Megatron's own gradients and Adam for the weights that are not sketched: all of them, or norms, embeddings, biases.

Megatron's `DistributedDataParallel` keeps the gradient buffers, its optimizer the moments and fp32 copies; frozen
weights, the sketched ones among them, have neither. The loss arrives divided by the global number of valid tokens, so
gradients are summed over the ranks and not averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.dense import DenseSettings
from megatron_logra.parallel.traffic import purpose


class DenseOptimizer:
    """Gradients and Adam of every weight of the policy that requires a gradient.

    Build it when the weights are loaded: Megatron copies them.
    """

    def __init__(self, policy: Policy, settings: DenseSettings) -> None:
        """Collective over all ranks. Raises ValueError when nothing requires a gradient."""
        if not any(weight.requires_grad for _, weight in policy.model.named_parameters()):
            raise ValueError("every weight is a sketch target, so there is nothing that a dense optimizer could train")
        config = policy.model.config
        wrapper = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=settings.distributed,
            average_in_collective=False,
        )
        self.settings = settings
        self.num_updates = 0
        self._chunks = [DistributedDataParallel(config, wrapper, chunk) for chunk in policy.model.chunks]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.schedule.lr,
                min_lr=settings.schedule.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.epsilon,
                clip_grad=settings.clip_grad,
                bf16=config.params_dtype == torch.bfloat16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=settings.distributed,
            ),
            self._chunks,
            use_gloo_process_groups=False,
        )

    def zero_grad_(self) -> None:
        """Forget the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def reduce_gradients_(self) -> Tensor:
        """Make the gradients of all ranks whole; returns their norm over the whole model, fp64 0-d, before clipping."""
        with purpose("gradient"):
            finalize_model_grads(self._chunks, None)
        self._optimizer.prepare_grads()
        norm = self._optimizer.get_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float64)

    def update_(self) -> None:
        """One step of Adam with the scheduled learning rate; call it after the norm was found finite."""
        learning_rate = self.settings.schedule(self.num_updates)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)
        with purpose("gradient"):
            self._optimizer.step()
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Moments, fp32 copies and step counts of this rank."""
        return {"optimizer": self._optimizer.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of the same layout."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_updates = int(state["num_updates"])
