"""The LoGRA update of one rank's targets, from accumulated sketches to merged weights (arXiv 2610.06647).

    S  = sketch, already divided by the global number of valid tokens; clipped to |S A| <= clip_grad where asked for
    D  = row_scale(S) S                        row-wise Adam, per segment (optim.row_adam)
    D <- D * update_ratio |W| / |D A|          rule `paper`: norms over all targets of the whole model
    D <- lr D                                  rules `lr` and `sgd`
    U  = round(alpha D),   W <- (1 - alpha decay) W - U A        alpha from the predicted KL; decay = lr weight_decay

`|D A|^2 = <D^T D, A A^T>` needs only R x R products. Under tensor parallelism the rows of `D` (column-parallel) or the
columns of `A` (row-parallel) of different ranks are disjoint, so summing each rank's own value over the model counts
every entry once.

`D` replaces `S` in the flat buffer, since it is a scaling of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_logra.optim.merge import merge_factor_, merge_factor_split_, round_factor, rows_of_block
from megatron_logra.optim.row_adam import compute_row_scale_
from megatron_logra.optim.schedule import LearningRateSchedule
from megatron_logra.optim.split_master import round_to_bf16
from megatron_logra.sketch.buffer import BufferPart, SketchBuffer
from megatron_logra.sketch.projection import Projection, build_projection
from megatron_logra.sketch.target import SketchTarget

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class UpdateNorms:
    """Global Frobenius norms of a proposed update, 0-d fp64 tensors equal on all ranks.

    `sketch` is `|S|` before clipping; `weight` is `|W|` over all targets; `update` is `|D A|` after scaling;
    `gradient` is `|S A|` before clipping, None without clipping.
    """

    sketch: Tensor
    weight: Tensor
    update: Tensor
    gradient: Tensor | None = None


@dataclass(frozen=True)
class MadeUpdate:
    """What a receiver of an update's factors must know of it: its projections, and what the weights were kept of."""

    projection_update: int
    keep: float


@dataclass(frozen=True)
class LograSettings:
    """Hyper-parameters, by the names of their flags without the prefix `logra_`.

    `schedule` (learning rate), `weight_decay` and `clip_grad` (0: no clipping) belong to the rules `lr` and `sgd`.
    """

    rank: int
    rule: str = "paper"
    update_ratio: float = 6e-5
    beta2: float = 0.95
    epsilon: float = 1e-8
    seed: int = 42
    distribution: str = "rademacher"
    refresh_interval: int = 1
    projection_cache: bool = False
    schedule: LearningRateSchedule | None = None
    weight_decay: float = 0.0
    clip_grad: float = 0.0

    def __post_init__(self) -> None:
        if (self.rule == "paper") == (self.schedule is not None):
            raise ValueError(f"rule {self.rule!r} {'takes no' if self.schedule else 'needs a'} learning-rate schedule")


@dataclass(frozen=True)
class PartReductions:
    """How the ranks that share one part of the buffer communicate.

    Attributes:
        sum_over_layer: sums a tensor over the ranks that share a layer (TP, or expert TP); for segment statistics.
        is_first_of_layer: True on the one rank that speaks for values replicated over those ranks.
        sum_over_model: sums a tensor over one replica of these layers (with PP, and for experts EP).
        gather_rows: completes `[O, I]` tensors in place from the rows that each replica owns (`SketchTarget.owned`);
            None when every replica keeps the whole master.
    """

    sum_over_layer: Reduce
    is_first_of_layer: bool
    sum_over_model: Reduce
    gather_rows: Callable[[Tensor], None] | None = None


class LograOptimizer:
    """Row moments, projections and weights of the targets of one rank.

    Args:
        buffer: the flat sketches, bound to their targets.
        settings: hyper-parameters.
        reductions: by name of the buffer's parts.
    """

    def __init__(self, buffer: SketchBuffer, settings: LograSettings, reductions: Mapping[str, PartReductions]) -> None:
        self.buffer = buffer
        self.settings = settings
        self.num_updates = 0
        self.last_update = MadeUpdate(0, 1.0)
        # Last predicted KL over the squared norm of its update, for the updates in between probes.
        self.kl_per_square_norm: float | None = None
        self._decay = 0.0
        device = buffer.flat.device
        self.moment2 = torch.zeros(buffer.flat.shape[0], dtype=buffer.flat.dtype, device=device)
        self.row_is_finite = torch.ones(buffer.flat.shape[0], dtype=torch.bool, device=device)
        self._reductions = reductions
        # What replicated rows add to a sum over a layer's ranks: everything on one rank, nothing on the others.
        self._segment_counts = buffer.segment_is_sharded.to(torch.float64)
        for part in buffer.parts:
            if reductions[part.name].is_first_of_layer:
                self._segment_counts[part.segments] = 1.0
        self.draw_projections()

    @property
    def projection_update(self) -> int:
        """The update number that the current projections are drawn for."""
        interval = self.settings.refresh_interval
        return self.num_updates // interval * interval

    def draw_projections(self) -> None:
        """Draw this rank's columns of the projection of every group."""
        drawn: dict[tuple[str, int, int], Projection] = {}
        for target in self.buffer.targets:
            key = (target.group, target.columns.start, target.columns.stop)
            if key not in drawn:
                projection = build_projection(
                    self.settings.seed,
                    self.projection_update,
                    target.group,
                    self.settings.rank,
                    target.width,
                    columns=target.columns,
                    distribution=self.settings.distribution,
                    device=target.weight.device,
                )
                if self.settings.projection_cache:
                    projection = replace(projection, cached=projection.unscaled(target.weight.dtype))
                drawn[key] = projection
            target.projection = drawn[key]

    @torch.no_grad()
    def compute_direction_(self) -> UpdateNorms:
        """Turn the reduced sketches into the proposed update `D`, in place; the row moments advance by one step.

        Collectives, of each part: two sums over the layer, one over the model (two with clipping). Nothing is read on
        the host.
        """
        settings, flat = self.settings, self.buffer.flat
        mean_square = self.buffer.compute_mean_squares()
        self.row_is_finite = mean_square.isfinite()
        sketch_square, weight_square = self._sum_over_model(
            lambda part: torch.stack([self._sketch_square(part, mean_square), self._weight_square(part)])
        ).unbind()
        gradient_norm = None
        if settings.clip_grad > 0:
            gradient_norm = self._update_norm()
            kept = (settings.clip_grad / gradient_norm).clamp(max=1.0).nan_to_num(nan=1.0)
            flat.mul_(kept.to(flat.dtype))
            mean_square = mean_square * kept.square()
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
        if settings.schedule is not None:
            learning_rate = settings.schedule(self.num_updates)
            flat.mul_(learning_rate)
            self._decay = learning_rate * settings.weight_decay
            for target in self.buffer.targets:
                target.decay = self._decay
        update_norm = self._update_norm()
        if settings.rule == "paper":
            scale = torch.where(update_norm > 0, settings.update_ratio * weight_square.sqrt() / update_norm, 0.0)
            flat.mul_(scale.to(flat.dtype))
            update_norm = update_norm * scale
        return UpdateNorms(
            sketch=sketch_square.sqrt(), weight=weight_square.sqrt(), update=update_norm, gradient=gradient_norm
        )

    @torch.no_grad()
    def merge_(self, alpha: float) -> Iterator[tuple[SketchTarget, Tensor]]:
        """Apply `W <- (1 - alpha decay) W - U A` target by target and yield each with its factor `U` (bf16 `[O, R]`).

        fp64 weights, which only references use, take an unrounded fp64 factor. Exhaust the iterator, then call
        `finish_update`. Collectives: none, or one of the weight's rows over the replicas that divide its master.
        """
        keep = 1.0 - alpha * self._decay
        self.last_update = MadeUpdate(self.projection_update, keep)
        for part in self.buffer.parts:
            gather_rows = self._reductions[part.name].gather_rows
            for target in part.targets:
                dtype = torch.float64 if target.weight.dtype == torch.float64 else torch.bfloat16
                factor = round_factor(target.require_sketch(), alpha, self.settings.rank, dtype=dtype)
                _merge_target_(target, factor, keep=keep)
                if gather_rows is not None:
                    gather_rows(target.weight)
                yield target, factor

    def finish_update(self) -> None:
        """Count the update, clear the sketches and draw the next projections, if these are to be replaced."""
        drawn_for = self.projection_update
        self.num_updates += 1
        self.buffer.zero_()
        if self.projection_update != drawn_for:
            self.draw_projections()

    def _reduce_segments(self, sums_KS: Tensor) -> Tensor:
        counted = sums_KS * self._segment_counts
        parts = [
            self._reductions[part.name].sum_over_layer(counted[:, part.segments].contiguous())
            for part in self.buffer.parts
            if part.targets
        ]
        return torch.cat(parts, dim=1) if parts else counted

    def _sum_over_model(self, local: Callable[[BufferPart], Tensor]) -> Tensor:
        parts = [self._reductions[part.name].sum_over_model(local(part)) for part in self.buffer.parts]
        return torch.stack(parts).sum(0)

    def _sketch_square(self, part: BufferPart, mean_square: Tensor) -> Tensor:
        counts = self._segment_counts[self.buffer.row_segment[part.rows]]
        return (mean_square[part.rows] * counts).sum() * self.settings.rank

    def _update_norm(self) -> Tensor:
        """`|D A|` of what the buffer holds, over the whole model."""
        return self._sum_over_model(self._update_square).sqrt()

    def _weight_square(self, part: BufferPart) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.buffer.flat.device)
        for target in part.targets:
            total += torch.linalg.vector_norm(target.weight, dtype=_norm_dtype(target.weight)).double().square()
        return total

    def _update_square(self, part: BufferPart) -> Tensor:
        """`|D A|^2` summed over targets, of this rank's rows and columns."""
        total = torch.zeros((), dtype=torch.float64, device=self.buffer.flat.device)
        drawn: Projection | None = None
        for target in part.targets:
            direction_OR, projection = target.require_sketch(), target.require_projection()
            if projection is not drawn:  # targets of one group follow each other
                drawn, gram_RR = projection, projection.gram()
            total += ((direction_OR.t() @ direction_OR).double() * gram_RR).sum()
        return total


def _merge_target_(target: SketchTarget, factor_OR: Tensor, *, keep: float) -> None:
    projection, weight, factor_OR = target.require_projection(), target.weight[target.owned], factor_OR[target.owned]
    if target.remainder is not None:
        merge_factor_split_(weight, target.remainder, factor_OR, projection, keep=keep)
    elif target.master is not None:
        merge_factor_(target.master, factor_OR, projection, keep=keep)
        block = rows_of_block(target.master.shape[0])
        for start in range(0, target.master.shape[0], block):
            rows = slice(start, start + block)
            weight[rows] = round_to_bf16(target.master[rows])
    else:
        merge_factor_(weight, factor_OR, projection, keep=keep)


def _norm_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
