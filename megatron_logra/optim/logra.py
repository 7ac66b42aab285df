"""The LoGRA update of one rank's targets, from accumulated sketches to merged weights (arXiv 2610.06647).

    S  = sketch, already divided by the global number of valid tokens
    D  = row_scale(S) S                        row-wise Adam, per segment (optim.row_adam)
    D <- D * update_ratio |W| / |D A|          rule `paper`: norms over all targets of the whole model
    U  = round(alpha D),   W <- W - U A        alpha from the predicted KL

`|D A|^2 = <D^T D, A A^T>` needs only R x R products. Under tensor parallelism the rows of `D` (column-parallel) or the
columns of `A` (row-parallel) of different ranks are disjoint, so summing each rank's own value over the model counts
every entry once.

`D` replaces `S` in the flat buffer, since it is a scaling of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_logra.optim.merge import merge_factor_, merge_factor_split_, round_factor
from megatron_logra.optim.row_adam import compute_row_scale_
from megatron_logra.optim.split_master import round_to_bf16
from megatron_logra.sketch.buffer import SketchBuffer
from megatron_logra.sketch.projection import Projection, build_projection
from megatron_logra.sketch.target import SketchTarget

Reduce = Callable[[Tensor], Tensor]

_ROUND_ROWS = 2048


@dataclass(frozen=True)
class UpdateNorms:
    """Global Frobenius norms of a proposed update, 0-d fp64 tensors equal on all ranks.

    `sketch` is `|S|`; `weight` is `|W|` over all targets; `update` is `|D A|` after scaling.
    """

    sketch: Tensor
    weight: Tensor
    update: Tensor


@dataclass(frozen=True)
class LograSettings:
    """Hyper-parameters, by the names of their flags without the prefix `logra_`."""

    rank: int
    rule: str = "paper"
    update_ratio: float = 6e-5
    beta2: float = 0.95
    epsilon: float = 1e-8
    seed: int = 42
    distribution: str = "rademacher"


class LograOptimizer:
    """Row moments, projections and weights of the targets of one rank.

    Args:
        buffer: the flat sketches, bound to their targets.
        settings: hyper-parameters.
        sum_over_layer: sums a tensor over the ranks that share a layer (TP); used for per-segment statistics.
        is_first_of_layer: True on the one rank that speaks for values replicated over TP.
        sum_over_model: sums a tensor over one model replica (TP x PP).
    """

    def __init__(
        self,
        buffer: SketchBuffer,
        settings: LograSettings,
        *,
        sum_over_layer: Reduce,
        is_first_of_layer: bool,
        sum_over_model: Reduce,
    ) -> None:
        self.buffer = buffer
        self.settings = settings
        self.num_updates = 0
        self.moment2 = torch.zeros(buffer.flat.shape[0], dtype=buffer.flat.dtype, device=buffer.flat.device)
        self._sum_over_layer = sum_over_layer
        self._sum_over_model = sum_over_model
        # What replicated rows add to a sum over TP: everything on one rank, nothing on the others.
        counted = buffer.segment_is_sharded | torch.tensor(is_first_of_layer, device=buffer.flat.device)
        self._segment_counts = counted.to(torch.float64)
        self.draw_projections()

    def draw_projections(self) -> None:
        """Draw this rank's columns of the projection of every group for update number `num_updates`."""
        drawn: dict[tuple[str, int, int], Projection] = {}
        for target in self.buffer.targets:
            key = (target.group, target.columns.start, target.columns.stop)
            if key not in drawn:
                drawn[key] = build_projection(
                    self.settings.seed,
                    self.num_updates,
                    target.group,
                    self.settings.rank,
                    target.width,
                    columns=target.columns,
                    distribution=self.settings.distribution,
                    device=target.weight.device,
                )
            target.projection = drawn[key]

    @torch.no_grad()
    def compute_direction_(self) -> UpdateNorms:
        """Turn the reduced sketches into the proposed update `D`, in place; the row moments advance by one step.

        Collectives: two sums over the layer, one over the model. Nothing is read on the host.
        """
        settings, flat = self.settings, self.buffer.flat
        mean_square = self.buffer.compute_mean_squares()
        row_scale = compute_row_scale_(
            mean_square,
            self.moment2,
            row_segment_O=self.buffer.row_segment,
            segment_rows_S=self.buffer.segment_rows,
            reduce_segments=self._reduce_segments,
            step=self.num_updates + 1,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            rule=settings.rule,
        )
        flat.mul_(row_scale.to(flat.dtype)[:, None])
        counts = self._segment_counts[self.buffer.row_segment]
        squares = torch.stack(
            [
                (mean_square * counts).sum() * settings.rank,
                self._weight_square(),
                self._update_square(),
            ]
        )
        sketch_norm, weight_norm, update_norm = self._sum_over_model(squares).sqrt().unbind()
        if settings.rule == "paper":
            scale = torch.where(update_norm > 0, settings.update_ratio * weight_norm / update_norm, 0.0)
            flat.mul_(scale.to(flat.dtype))
            update_norm = update_norm * scale
        return UpdateNorms(sketch=sketch_norm, weight=weight_norm, update=update_norm)

    @torch.no_grad()
    def merge_(self, alpha: float) -> Iterator[tuple[SketchTarget, Tensor]]:
        """Apply `W <- W - U A` target by target and yield each target with its factor `U` (bf16 `[O, R]`).

        fp64 weights, which only references use, take an unrounded fp64 factor. Exhaust the iterator, then call
        `finish_update`. No collectives.
        """
        for target in self.buffer.targets:
            dtype = torch.float64 if target.weight.dtype == torch.float64 else torch.bfloat16
            factor = round_factor(target.require_sketch(), alpha, self.settings.rank, dtype=dtype)
            _merge_target_(target, factor)
            yield target, factor

    def finish_update(self) -> None:
        """Count the update, clear the sketches and draw the next projections."""
        self.num_updates += 1
        self.buffer.zero_()
        self.draw_projections()

    def _reduce_segments(self, sums_KS: Tensor) -> Tensor:
        return self._sum_over_layer(sums_KS * self._segment_counts)

    def _weight_square(self) -> Tensor:
        norms = [torch.linalg.vector_norm(t.weight, dtype=_norm_dtype(t.weight)) for t in self.buffer.targets]
        return torch.stack(norms).double().square().sum()

    def _update_square(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.buffer.flat.device)
        for target in self.buffer.targets:
            direction_OR = target.require_sketch()
            gram_RR = target.require_projection().gram()
            total += ((direction_OR.t() @ direction_OR).double() * gram_RR).sum()
        return total


def _merge_target_(target: SketchTarget, factor_OR: Tensor) -> None:
    projection = target.require_projection()
    if target.remainder is not None:
        merge_factor_split_(target.weight, target.remainder, factor_OR, projection)
    elif target.master is not None:
        merge_factor_(target.master, factor_OR, projection)
        for start in range(0, target.num_rows, _ROUND_ROWS):
            rows = slice(start, start + _ROUND_ROWS)
            target.weight[rows] = round_to_bf16(target.master[rows])
    else:
        merge_factor_(target.weight, factor_OR, projection)


def _norm_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
