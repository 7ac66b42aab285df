"""KL divergences between the policy before and after an update, per token and in nats.

    predicted   1/2 Var_p(dz / temperature)            second-order expansion of KL(p || p + dp) along dz
    exact       sum_v p_v (log p_v - log q_v)

with `p = softmax(z / temperature)`. The vocabulary-parallel forms see the columns of one rank and reduce over `group`;
columns are those of real tokens only, padding must be cut before. Statistics are fp64. The variance is taken around
the mean (two reductions) so that a common shift of all `dz`, which changes nothing, costs no digits.

Shapes: `logits_TV`, `tangent_TV` with the local `V` columns (0 columns are allowed); results `kl_T` fp64.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def predicted_kl(logits_TV: Tensor, tangent_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Predicted KL of each token, `[T]` fp64, from whole logits and their derivative along the update."""
    return vocab_parallel_predicted_kl(logits_TV, tangent_TV, temperature=temperature, group=None)


def exact_kl(old_logits_TV: Tensor, new_logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`KL(old || new)` of each token, `[T]` fp64, from whole logits."""
    return vocab_parallel_exact_kl(old_logits_TV, new_logits_TV, temperature=temperature, group=None)


def vocab_parallel_predicted_kl(
    logits_TV: Tensor, tangent_TV: Tensor, *, temperature: float, group: ProcessGroup | None
) -> Tensor:
    """`predicted_kl` over a sharded vocabulary; equal on all ranks of `group` (None: not sharded).

    Collectives: three all-reduces of at most `2 T` numbers.
    """
    _check(logits_TV, tangent_TV, temperature)
    weights_TV, mass_T = _softmax_weights(logits_TV.double() / temperature, group)
    tangent_TV = tangent_TV.double() / temperature
    mean_T = _sum((weights_TV * tangent_TV).sum(1), group) / mass_T
    variance_T = _sum((weights_TV * (tangent_TV - mean_T[:, None]).square()).sum(1), group) / mass_T
    return variance_T / 2


def vocab_parallel_exact_kl(
    old_logits_TV: Tensor, new_logits_TV: Tensor, *, temperature: float, group: ProcessGroup | None
) -> Tensor:
    """`exact_kl` over a sharded vocabulary; equal on all ranks of `group` (None: not sharded).

    With `d = new - old` (shifted by its mean under the old policy) it is `log E_old exp(d) - E_old d`, which keeps its
    digits when the policies are close. Collectives: four all-reduces of at most `2 T` numbers.
    """
    _check(old_logits_TV, new_logits_TV, temperature)
    weights_TV, mass_T = _softmax_weights(old_logits_TV.double() / temperature, group)
    change_TV = (new_logits_TV.double() - old_logits_TV.double()) / temperature
    mean_T = _sum((weights_TV * change_TV).sum(1), group) / mass_T
    growth_T = _sum((weights_TV * torch.expm1(change_TV - mean_T[:, None])).sum(1), group) / mass_T
    return torch.log1p(growth_T)


def _softmax_weights(logits_TV: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """`exp(z - max)` of the local columns and its global sum `[T]`."""
    if logits_TV.shape[1]:
        peak_T = logits_TV.max(dim=1).values
    else:
        peak_T = logits_TV.new_full((logits_TV.shape[0],), float("-inf"))
    if group is not None:
        dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=group)
    weights_TV = (logits_TV - peak_T[:, None]).exp()
    return weights_TV, _sum(weights_TV.sum(1), group)


def _sum(values_T: Tensor, group: ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values_T, group=group)
    return values_T


def _check(first_TV: Tensor, second_TV: Tensor, temperature: float) -> None:
    if first_TV.shape != second_TV.shape or first_TV.dim() != 2:
        raise ValueError(f"need two [T, V] tensors of one shape, got {tuple(first_TV.shape)} {tuple(second_TV.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: a greedy policy has no KL")
