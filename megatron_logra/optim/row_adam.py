"""Row-wise Adam on sketches: one second moment for each output row (arXiv 2610.06647; DESIGN: from sketch to update).

    v     <- beta2 v + (1 - beta2) mean_R(S^2)         moment2_O, update number t from 1
    root   = sqrt(v / (1 - beta2^t))
    paper    D = S / (root + max(eps mean(root), tiny)),  rescaled so that |D| = |S|;  mean and norms over the segment
    lr       D = S / (root + eps)
    sgd      D = S

Every rule scales the rows of `S`, so the work is on `[O]` vectors: `D_i = scale_i S_i`. A segment is the rows that
belong to one Hugging Face matrix; with many segments in one buffer, `row_segment_O` says which row belongs where.

Shapes: `O` rows, `R` sketch rank, `S` segments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RULES = ("paper", "lr", "sgd")


def row_adam_direction(
    sketch_OR: Tensor,
    moment2_O: Tensor,
    *,
    step: int,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    rule: str = "paper",
) -> Tensor:
    """Direction `D_OR` of one whole segment; `moment2_O` advances in place. Local, no communication.

    Args:
        sketch_OR: the sketched gradient, already divided by the number of tokens.
        moment2_O: running row moments, zeros before the first step.
        step: number of this update, from 1.

    Raises:
        ValueError: an unknown rule or a step below 1.
    """
    num_rows = sketch_OR.shape[0]
    mean_square_O = sketch_OR.to(torch.float64).square().mean(dim=1)
    scale_O = compute_row_scale_(
        mean_square_O,
        moment2_O,
        row_segment_O=torch.zeros(num_rows, dtype=torch.int64, device=sketch_OR.device),
        segment_rows_S=torch.tensor([num_rows], dtype=torch.int64, device=sketch_OR.device),
        reduce_segments=lambda sums_KS: sums_KS,
        step=step,
        beta2=beta2,
        epsilon=epsilon,
        rule=rule,
    )
    return sketch_OR * scale_O.to(sketch_OR.dtype)[:, None]


def compute_row_scale_(
    mean_square_O: Tensor,
    moment2_O: Tensor,
    *,
    row_segment_O: Tensor,
    segment_rows_S: Tensor,
    reduce_segments: Callable[[Tensor], Tensor],
    step: int,
    beta2: float,
    epsilon: float,
    rule: str,
) -> Tensor:
    """Scale of every row, fp64 `[O]`, for all segments of a buffer; `moment2_O` advances in place.

    Args:
        mean_square_O: fp64, mean over `R` of the squares of each row.
        row_segment_O: int64, segment of each row.
        segment_rows_S: int64, rows of each segment over all ranks.
        reduce_segments: makes per-segment sums `[K, S]` over local rows global (K statistics, fp64), counting rows
            that several ranks hold once; called twice by rule `paper`.

    Raises:
        ValueError: an unknown rule or a step below 1.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; choose one of {', '.join(RULES)}")
    if step < 1:
        raise ValueError(f"step must count updates from 1, got {step}")
    if rule == "sgd":
        return torch.ones_like(mean_square_O)
    moment2_O.mul_(beta2).add_(mean_square_O.to(moment2_O.dtype), alpha=1.0 - beta2)
    root_O = (moment2_O.to(torch.float64) / (1.0 - beta2**step)).sqrt()
    if rule == "lr":
        return 1.0 / (root_O + epsilon)

    def segment_sums(*values_O: Tensor) -> Tensor:
        # index_add_ would add in any order on CUDA, and data-parallel replicas would drift apart.
        num_segments = segment_rows_S.shape[0]
        zeros = [torch.zeros(num_segments, dtype=torch.float64, device=v.device) for v in values_O]
        sums = [z.index_put_((row_segment_O,), v, accumulate=True) for z, v in zip(zeros, values_O, strict=True)]
        return reduce_segments(torch.stack(sums))

    tiny = torch.finfo(torch.float32).tiny
    root_sum_S, before_S = segment_sums(root_O, mean_square_O)
    floor_S = (epsilon * root_sum_S / segment_rows_S).clamp_(min=tiny)
    scale_O = 1.0 / (root_O + floor_S[row_segment_O])
    (after_S,) = segment_sums(mean_square_O * scale_O.square())
    # A segment without gradient keeps direction 0 instead of 0/0.
    rescale_S = torch.where(after_S > 0, (before_S / after_S).sqrt(), torch.zeros_like(after_S))
    return scale_O * rescale_S[row_segment_O]
