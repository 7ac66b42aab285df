"""What is known of one sketched weight on one rank, and the phase that all of them are in.

    accumulate   backward adds  S_OR += dY_TO^T P_TR  with  P_TR = X_TI A_RI^T
    score        backward adds  -<dY^T P, D>  to one number, the score of the proposed update
    tangent      forward mode carries  dY_TO = ... - P_TR D_OR^T  for the proposed update  W -> W - D A
    off          an ordinary linear layer

Shapes are local to the rank: `O` rows and `I` columns of its weight shard, `R` sketch rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from megatron_logra.sketch.projection import Projection

Phase = Literal["off", "accumulate", "score", "tangent"]
Sharding = Literal["column", "row"]


class SketchPhase:
    """The phase shared by all targets of a model; changed only through `during`.

    `score` is the fp64 0-d number that backward adds to in the phase of that name. `failure` says why the last tangent
    pass could not carry its tangent through this rank's layers, None if it could.
    """

    def __init__(self) -> None:
        self.current: Phase = "off"
        self.score: Tensor | None = None
        self.failure: Exception | None = None

    @property
    def records(self) -> bool:
        """Whether a backward pass needs the projected input."""
        return self.current in ("accumulate", "score")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter `phase` for the body and restore the previous one, whatever happens."""
        previous, self.current = self.current, phase
        try:
            yield
        finally:
            self.current = previous


@dataclass
class SketchTarget:
    """One sketched weight shard.

    Attributes:
        name: Megatron parameter name within this rank's model.
        group: projection group name, with the global layer number; it seeds the projection.
        sharding: `column` when TP splits the rows (outputs), `row` when it splits the columns (inputs).
        weight: the local shard `[O, I]`, updated in place.
        columns: columns of the global projection that this shard reads.
        width: columns of the global projection.
        is_expert: the weight belongs to a routed expert, which other groups of ranks share than dense layers.
        rows: rows of the flat sketch buffer.
        owned: rows whose master this rank keeps: all of them, or its share when replicas divide the master.
        remainder: int16 `[owned, I]`, second half of a split master, or None.
        master: fp32 `[owned, I]` copy that updates go to before `weight` is rounded from it, or None. With neither,
            `weight` is its own master.
        decay: part of the weight that the proposed update removes: the update is `W -> (1 - decay) W - D A`.
        sketch: fp32 view `[O, R]` into the flat buffer; after the optimizer ran it holds the direction `D`.
        projection: the projection of the current update, this rank's columns.
    """

    name: str
    group: str
    sharding: Sharding
    weight: Tensor
    columns: slice
    width: int
    phase: SketchPhase
    is_expert: bool = False
    rows: slice = field(default_factory=lambda: slice(0, 0))
    owned: slice = field(default_factory=lambda: slice(None))
    remainder: Tensor | None = None
    master: Tensor | None = None
    decay: float = 0.0
    sketch: Tensor | None = None
    projection: Projection | None = None

    @property
    def num_rows(self) -> int:
        """Local output rows."""
        return self.weight.shape[0]

    def require_sketch(self) -> Tensor:
        """The sketch view; it exists once the flat buffer was built."""
        assert self.sketch is not None, f"{self.name} has no sketch buffer"
        return self.sketch

    def require_projection(self) -> Projection:
        """The current projection; it exists once the optimizer drew one."""
        assert self.projection is not None, f"{self.name} has no projection"
        return self.projection
