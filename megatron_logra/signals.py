"""Lets a scheduler's signal end a run at the end of an iteration instead of at once."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class ExitSignal:
    """Notes SIGTERM instead of dying of it, from its creation on (in the main thread)."""

    def __init__(self) -> None:
        self._received = False
        signal.signal(signal.SIGTERM, self._note)

    def received(self, group: ProcessGroup, device: torch.device) -> bool:
        """Whether any rank of `group` was asked to end; the same answer on all. Collective: one number."""
        flag = torch.tensor([self._received], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._received = True
