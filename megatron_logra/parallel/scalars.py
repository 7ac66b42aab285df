"""The one place where a training step reads device values on the host, and where ranks agree about failure.

A step needs a handful of numbers on the host (norms, predicted KL, token counts). Reading them here and nowhere else
keeps the rest of the step free of synchronisation, and lets a whole step run under `FakeTensorMode`, where values do
not exist: there every scalar reads as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup


def read_scalars(*values: Tensor) -> tuple[float, ...]:
    """Host copies of 0-d tensors, in one device synchronisation; 1.0 for each fake tensor."""
    if any(isinstance(value, FakeTensor) for value in values):
        return (1.0,) * len(values)
    return tuple(torch.stack([value.detach().to(torch.float64) for value in values]).tolist())


def require_finite(named: dict[str, float], *, where: Callable[[], str] = str) -> None:
    """Raise `FloatingPointError` when a value is not finite.

    The values must already be equal on all ranks (results of a reduction), so that all ranks raise or none does.
    `where` is then asked, on all ranks, for a sentence about where that comes from, or nothing.
    """
    bad = {name: value for name, value in named.items() if not math.isfinite(value)}
    if bad:
        listing = ", ".join(f"{name} = {value}" for name, value in bad.items())
        source = where()
        raise FloatingPointError(
            f"non-finite values in this step, nothing was applied: {listing}. {source}{' ' if source else ''}Lower "
            "--logra-update-ratio or --kl-budget, check the rewards and advantages of this step, or train in a wider "
            "dtype"
        )


def raise_on_all_ranks(error: Exception | None, group: ProcessGroup, device: torch.device) -> None:
    """Collective: when any rank of `group` brings an error, every rank raises one.

    The rank that failed raises its own error; the others a `RuntimeError` that names the first failed rank. Call it
    after local work that can fail, before the next collective, so that nobody waits for a rank that left.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = torch.tensor([rank if error is not None else size], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    if error is not None:
        raise error
    if int(first.item()) < size:
        failed = dist.get_global_rank(group, int(first.item()))
        raise RuntimeError(f"rank {failed} failed; its own message says why (see its output above or below)")


def run_on_all_ranks[Result](action: Callable[[], Result], group: ProcessGroup, device: torch.device) -> Result:
    """Do local work that can fail, and go on only when it succeeded on every rank of `group`. Collective.

    Raises: as `raise_on_all_ranks`.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as failure:  # whatever it is, the other ranks must not wait for this one
        error = failure
    raise_on_all_ranks(error, group, device)
    return result
