"""Megatron's own gradients and Adam for the weights that are not sketched: all of them, or norms, embeddings, biases.

Megatron's `DistributedDataParallel` keeps the gradient buffers, its optimizer the moments and fp32 copies; frozen
weights, the sketched ones among them, have neither. The loss arrives divided by the global number of valid tokens, so
gradients are summed over the ranks and not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
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
        self._policy = policy
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

    def named_states(self) -> Iterator[tuple[str, str, Tensor, int]]:
        """The live Adam state of this rank: parameter name, `exp_avg`, `exp_avg_sq` or `master`, values, first entry.

        Values are fp32, of any shape; they belong to consecutive entries of the parameter, read row by row, from the
        first entry on. States that do not exist before the first update are made, as zeros. `master` is the fp32 copy
        of a bf16 weight.
        """
        names = {id(parameter): name for name, parameter in self._policy.model.named_parameters()}
        for optimizer in self._optimizers():
            for parameter, main, first in _main_parameters(optimizer):
                state = optimizer.optimizer.state[main]
                for kind in ("exp_avg", "exp_avg_sq"):
                    yield names[id(parameter)], kind, state.setdefault(kind, torch.zeros_like(main.detach())), first
                if main.dtype != parameter.dtype:
                    yield names[id(parameter)], "master", main.detach(), first

    def resume_at(self, num_updates: int) -> None:
        """Go on after `num_updates` updates, once the states were loaded."""
        self.num_updates = num_updates
        for optimizer in self._optimizers():
            inner = optimizer.optimizer
            counts_by_parameter = isinstance(inner, torch.optim.AdamW)  # the fused ones count by group
            for group in inner.param_groups:
                if not counts_by_parameter:
                    group["step"] = num_updates
                    continue
                for main in group["params"]:
                    inner.state[main]["step"] = torch.tensor(float(num_updates))

    def _optimizers(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers behind the one that it returned: one for dense weights, one for experts."""
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _main_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Each parameter with what Adam updates in its place, and the first entry of the parameter that this covers."""
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            held = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, optimizer.optimizer.param_groups[group]["params"][order], held.start
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for rounded, wide in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            yield from ((parameter, main, 0) for parameter, main in zip(rounded, wide, strict=True))
        for same in optimizer.fp32_from_fp32_groups:
            yield from ((parameter, parameter, 0) for parameter in same)
    else:
        for group in optimizer.optimizer.param_groups:
            yield from ((parameter, parameter, 0) for parameter in group["params"])
