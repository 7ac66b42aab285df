"""Owns the count of this rank's communication: messages and bytes by collective, process group and purpose.

What is counted, on each rank of a group of p > 1 ranks (p = 1 moves nothing and counts nothing):

    collective      bytes of one call
    all_reduce      the tensor
    reduce          the tensor
    broadcast       the tensor
    all_gather      the gathered output, over all ranks (p times the input if the shards are equal)
    reduce_scatter  the whole input, before scattering
    all_to_all      the input, this rank's own chunk included
    gather          p times this rank's input, whether or not this rank is the root
    scatter         p times this rank's output, whether or not this rank is the root
    send, recv      the tensor; a message is a "send" of one rank and a "recv" of the other
    barrier         0

A coalesced call counts once, with the bytes of all its tensors. These are message sizes, no bytes on a wire: a ring
all-reduce of n bytes sends 2 (p - 1) / p n from every rank, and another algorithm another number.

Counted is what passes through torch's dispatcher: `torch.distributed` (blocking or asynchronous, batched messages, the
object collectives, which travel as several byte tensors) and its functional collectives. Not counted: backends
called directly, as kernels with communication inside do, symmetric memory, replays of a CUDA graph, and
messages that `torch.compile` itself traced (`isend`, `irecv`, `batch_p2p_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

DEFAULT_PURPOSE = "activations"
OTHER_GROUP = "other"

_purpose: ContextVar[str] = ContextVar("traffic_purpose", default=DEFAULT_PURPOSE)


@contextmanager
def purpose(name: str) -> Iterator[None]:
    """Attribute the collectives of the body to `name`; the innermost one wins.

    Put it right around the call that communicates and never around `backward()`: autograd runs the backward of CUDA
    tensors in threads of its own, which see the default purpose (`DEFAULT_PURPOSE`) instead.
    """
    token = _purpose.set(name)
    try:
        yield
    finally:
        _purpose.reset(token)


class TrafficKey(NamedTuple):
    """What a record is about; equal to the plain tuple (collective, group, purpose)."""

    collective: str
    group: str
    purpose: str


@dataclass(frozen=True)
class Record:
    """Number of calls, and their bytes as the module docstring defines them."""

    calls: int
    num_bytes: int


class _Op(NamedTuple):
    """How to read one dispatcher op: where its payload and its group stand among the arguments."""

    collective: str
    payload: int  # index of a tensor, or of a list of tensors, nested or not
    group: int  # index of the ProcessGroup, or of its name
    times: Callable[[int], int] = lambda size: 1  # what the payload's bytes are multiplied by, given the group's size


def _group_size(size: int) -> int:
    return size


def _nothing(size: int) -> int:
    return 0


# By name, so that importing this needs no op of a particular build of torch.
_OPS: Mapping[str, _Op] = MappingProxyType(
    {
        "c10d::allreduce_": _Op("all_reduce", 0, 1),
        "c10d::allreduce_coalesced_": _Op("all_reduce", 0, 1),
        "c10d::reduce_": _Op("reduce", 0, 1),
        "c10d::broadcast_": _Op("broadcast", 0, 1),
        "c10d::allgather_": _Op("all_gather", 0, 2),
        "c10d::_allgather_base_": _Op("all_gather", 0, 2),
        "c10d::allgather_coalesced_": _Op("all_gather", 0, 2),
        "c10d::allgather_into_tensor_coalesced_": _Op("all_gather", 0, 2),
        "c10d::reduce_scatter_": _Op("reduce_scatter", 1, 2),
        "c10d::_reduce_scatter_base_": _Op("reduce_scatter", 1, 2),
        "c10d::reduce_scatter_tensor_coalesced_": _Op("reduce_scatter", 1, 2),
        "c10d::alltoall_": _Op("all_to_all", 1, 2),
        "c10d::alltoall_base_": _Op("all_to_all", 1, 2),
        # Only the root holds the whole; the other side of every rank's arguments is the same on all of them.
        "c10d::gather_": _Op("gather", 1, 2, _group_size),
        "c10d::scatter_": _Op("scatter", 0, 2, _group_size),
        "c10d::send": _Op("send", 0, 1),
        "c10d::recv_": _Op("recv", 0, 1),
        "c10d::recv_any_source_": _Op("recv", 0, 1),
        "c10d::barrier": _Op("barrier", 0, 1, _nothing),
        "c10d::monitored_barrier_": _Op("barrier", 0, 1, _nothing),
        # The functional collectives call the ops above from below the dispatch mode, so they are counted here.
        "_c10d_functional::all_reduce": _Op("all_reduce", 0, 2),
        "_c10d_functional::all_reduce_": _Op("all_reduce", 0, 2),
        "_c10d_functional::all_reduce_coalesced": _Op("all_reduce", 0, 2),
        "_c10d_functional::all_reduce_coalesced_": _Op("all_reduce", 0, 2),
        "_c10d_functional::broadcast": _Op("broadcast", 0, 2),
        "_c10d_functional::broadcast_": _Op("broadcast", 0, 2),
        "_c10d_functional::all_gather_into_tensor": _Op("all_gather", 0, 2, _group_size),
        "_c10d_functional::all_gather_into_tensor_out": _Op("all_gather", 0, 2, _group_size),
        "_c10d_functional::all_gather_into_tensor_coalesced": _Op("all_gather", 0, 2, _group_size),
        "_c10d_functional::reduce_scatter_tensor": _Op("reduce_scatter", 0, 3),
        "_c10d_functional::reduce_scatter_tensor_out": _Op("reduce_scatter", 0, 3),
        "_c10d_functional::reduce_scatter_tensor_coalesced": _Op("reduce_scatter", 0, 3),
        "_c10d_functional::all_to_all_single": _Op("all_to_all", 0, 3),
    }
)


class TrafficCounter(TorchDispatchMode):
    """Counts the communication of this rank while it is entered, and changes none of it.

    Counts add up over several entries until `reset`. Counters nest in each other and in other dispatch modes
    (`FakeTensorMode` inside or outside); entering one that is already entered would count twice and raises
    `RuntimeError`. Compiled functions stay compiled, which a dispatch mode otherwise prevents.

    Every torch operation of the body takes some microseconds longer on the CPU, because all pass through here.

    Collectives in a backward are counted too. Tried: on the CPU, where autograd runs in the calling thread, and on a
    thread of autograd's pool (a backward nested beyond its depth limit), which inherits the mode but not the purpose.
    Not tried: CUDA's autograd threads, which inherit through the same thread-local state (`at::ThreadLocalState`).

    Args:
        group_names: the label of each process group, by object: two groups of the same ranks stay apart. A second
            label for the same group is ignored. Every other group is called `OTHER_GROUP`.
    """

    supports_higher_order_operators = True

    def __init__(self, group_names: Mapping[ProcessGroup, str] | Iterable[tuple[ProcessGroup, str]]) -> None:
        super().__init__()
        self.records: dict[tuple[str, str, str], Record] = {}
        self._group_names: dict[ProcessGroup, str] = {}
        self._is_entered = False
        for group, name in group_names.items() if isinstance(group_names, Mapping) else group_names:
            self._group_names.setdefault(group, name)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: torch.compile works as without this mode, which then sees the collectives of the compiled code."""
        return True

    def __enter__(self) -> TrafficCounter:
        if self._is_entered:
            raise RuntimeError("this TrafficCounter is already entered; entered again, it would count everything twice")
        super().__enter__()
        self._is_entered = True
        return self

    def __exit__(self, *exception: Any) -> None:
        self._is_entered = False
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` and count it if it communicates."""
        is_operator = isinstance(func, torch._ops.OpOverload)
        if is_operator and any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            # A wrapper such as DTensor shall unfold into plain operations first: only those show what it communicates.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        op = _OPS.get(func.name()) if is_operator else None
        if op is not None:
            self._count(op, args)
        return result

    def _count(self, op: _Op, args: Sequence[Any]) -> None:
        group = _unboxed(args[op.group])
        size = group.size()
        if size == 1:
            return
        key = TrafficKey(op.collective, self._group_names.get(group, OTHER_GROUP), _purpose.get())
        old = self.records.get(key, Record(calls=0, num_bytes=0))
        num_bytes = op.times(size) * _num_bytes(args[op.payload])
        self.records[key] = Record(calls=old.calls + 1, num_bytes=old.num_bytes + num_bytes)

    def total_bytes(
        self, *, collective: str | None = None, group: str | None = None, purpose: str | None = None
    ) -> int:
        """Bytes of the records that match; `None` matches all. Both "send" and "recv" are in a total over collectives.

        Added over ranks, such a total therefore has every point-to-point message twice.
        """
        wanted = (collective, group, purpose)
        return sum(
            record.num_bytes
            for key, record in self.records.items()
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True))
        )

    def metrics(self) -> dict[str, float]:
        """`comm/{purpose}/{group}/{collective}_bytes` for every record, and `comm/total_bytes`, for this rank."""
        values = {
            f"comm/{purpose}/{group}/{collective}_bytes": float(record.num_bytes)
            for (collective, group, purpose), record in self.records.items()
        }
        values["comm/total_bytes"] = float(self.total_bytes())
        return values

    def reset(self) -> None:
        """Forget all records."""
        self.records.clear()


def _unboxed(group: Any) -> ProcessGroup:
    """The Python object of a group that an op carries boxed or by name; the same object the caller passed."""
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return ProcessGroup.unbox(group)


def _num_bytes(tensors: Tensor | Sequence[Any]) -> int:
    """Bytes of a tensor, or of all tensors of a list, nested or not."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_num_bytes(tensor) for tensor in tensors)
