"""KL divergences between the policy before and after an update, per token and in nats.

    predicted   1/2 Var_p(u),  u = dz / temperature       second-order expansion of KL(p || p + dp) along dz
    exact       log E_p exp(c),  c = u - E_p u            with u = (new z - old z) / temperature

and `p = softmax(z / temperature)`. The vocabulary-parallel forms see the columns of one rank; columns are those of real
tokens only, padding must be cut before. Each rank reduces its own columns to their peak, mass, mean and second moment
(or growth) around that mean; one all-gather of these four numbers a token, then they are combined as the parts of a
mixture: around means, so that a common shift of all `u`, which changes nothing, costs no digits, and in one order, so
that all ranks get the same bits. Statistics are fp64, computed in token chunks that bound their temporaries.

Shapes: `logits_TV`, `tangent_TV` with the local `V` columns (0 columns are allowed); `P` ranks; results `kl_T` fp64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_CHUNK_ENTRIES = 1 << 22  # 32 MiB in fp64; about six such temporaries exist at once


def predicted_kl(logits_TV: Tensor, tangent_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Predicted KL of each token, `[T]` fp64, from whole logits and their derivative along the update."""
    return vocab_parallel_predicted_kl(logits_TV, tangent_TV, temperature=temperature, group=None)


def exact_kl(old_logits_TV: Tensor, new_logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`KL(old || new)` of each token, `[T]` fp64, from whole logits."""
    return vocab_parallel_exact_kl(old_logits_TV, new_logits_TV, temperature=temperature, group=None)


@torch.no_grad()
def vocab_parallel_predicted_kl(
    logits_TV: Tensor, tangent_TV: Tensor, *, temperature: float, group: ProcessGroup | None
) -> Tensor:
    """`predicted_kl` over a sharded vocabulary; the same bits on all ranks of `group` (None: not sharded).

    Collectives: one all-gather of `4 T` fp64 numbers a rank. Raises ValueError for shapes that differ or a temperature
    that is not above 0. Non-finite logits give non-finite results.
    """
    _check(logits_TV, tangent_TV, temperature)

    def second_moment(weights_TV: Tensor, centred_TV: Tensor) -> Tensor:
        return (weights_TV * centred_TV.square_()).sum(1)

    def change(rows: slice) -> Tensor:
        return tangent_TV[rows].double() / temperature

    share_PT, offset_PT, variance_PT = _gather_parts(logits_TV, change, second_moment, temperature, group)
    return (share_PT * (variance_PT + offset_PT.square())).sum(0) / 2


@torch.no_grad()
def vocab_parallel_exact_kl(
    old_logits_TV: Tensor, new_logits_TV: Tensor, *, temperature: float, group: ProcessGroup | None
) -> Tensor:
    """`exact_kl` over a sharded vocabulary; the same bits on all ranks of `group` (None: not sharded).

    `E exp(c) - 1 = E (exp(c) - 1 - c)`, because `E c = 0`: no term cancels, which keeps the digits of close policies.
    Collectives and errors: as in `vocab_parallel_predicted_kl`.
    """
    _check(old_logits_TV, new_logits_TV, temperature)

    def growth(weights_TV: Tensor, centred_TV: Tensor) -> Tensor:
        return (weights_TV * (torch.expm1(centred_TV) - centred_TV)).sum(1)

    def change(rows: slice) -> Tensor:
        return (new_logits_TV[rows].double() - old_logits_TV[rows].double()) / temperature

    share_PT, offset_PT, growth_PT = _gather_parts(old_logits_TV, change, growth, temperature, group)
    shifted_PT = growth_PT * offset_PT.exp() + (torch.expm1(offset_PT) - offset_PT)
    return torch.log1p((share_PT * shifted_PT).sum(0))


def _gather_parts(
    logits_TV: Tensor,
    change: Callable[[slice], Tensor],
    statistic: Callable[[Tensor, Tensor], Tensor],
    temperature: float,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What each rank's columns contribute, all fp64 `[P, T]`.

    Returns the probability of the part, its mean of `u` less the global mean, and `statistic(weights, u - own mean)`
    per unit of weight.
    """
    num_tokens, num_columns = logits_TV.shape
    parts_4T = torch.zeros(4, num_tokens, dtype=torch.float64, device=logits_TV.device)
    peak_T, mass_T, mean_T, statistic_T = parts_4T
    if num_columns == 0:
        peak_T.fill_(float("-inf"))
    else:
        chunk = max(1, _CHUNK_ENTRIES // num_columns)
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            scaled_TV = logits_TV[rows].double() / temperature
            peak_T[rows] = scaled_TV.amax(dim=1)
            weights_TV = scaled_TV.sub_(peak_T[rows, None]).exp_()
            mass_T[rows] = weights_TV.sum(1)
            change_TV = change(rows)
            mean_T[rows] = (weights_TV * change_TV).sum(1) / mass_T[rows]
            statistic_T[rows] = statistic(weights_TV, change_TV.sub_(mean_T[rows, None])) / mass_T[rows]
    peak_PT, mass_PT, mean_PT, statistic_PT = _all_gather(parts_4T, group).unbind(1)
    share_PT = (peak_PT - peak_PT.amax(dim=0)).exp() * mass_PT
    share_PT = share_PT / share_PT.sum(0)
    return share_PT, mean_PT - (share_PT * mean_PT).sum(0), statistic_PT


def _all_gather(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """`values` of all ranks, stacked in rank order."""
    if group is None or dist.get_world_size(group) == 1:
        return values[None]
    gathered = values.new_empty(dist.get_world_size(group) * values.shape[0], *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values, group=group)
    return gathered.unflatten(0, (-1, values.shape[0]))


def _check(first_TV: Tensor, second_TV: Tensor, temperature: float) -> None:
    if first_TV.shape != second_TV.shape or first_TV.dim() != 2:
        raise ValueError(f"need two [T, V] tensors of one shape, got {tuple(first_TV.shape)} {tuple(second_TV.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: a greedy policy has no KL")
