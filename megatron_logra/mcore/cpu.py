"""What Megatron-Core asks of CUDA, answered on a machine that has none.

Megatron-Core creates its tensors with `device="cuda"`, reads the current device, forks CUDA random states and waits
on streams. `install_cpu_support` redirects exactly these requests to the CPU, once, for the life of the process; with
CUDA present it does nothing. No other module contains a special case for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _InertStream:
    """A stream or event on a device without asynchrony: everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _InertStream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _InertStream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _names_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class CudaRequestsOnCpu(TorchFunctionMode):
    """Torch-function mode in which a request for a CUDA device means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # Megatron sorts gradients by type strings that name the CUDA classes.
            return func(args[0]).replace("torch.", "torch.cuda.")
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if any(_names_cuda(value) for value in args):
            args = tuple(_CPU if _names_cuda(value) else value for value in args)
        return func(*args, **kwargs)


def _split_sizes_on_host(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, Tensor) else sizes


def _all_gather_unequal(
    all_gather: Callable[..., Any], outputs: list[Tensor], input: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """All-gather that also takes shards of unequal length, as NCCL does and gloo does not (experts' tokens)."""
    if _alike_everywhere(outputs):
        return all_gather(outputs, input, group=group, async_op=async_op)
    for owner, output in enumerate(outputs):
        if owner == dist.get_rank(group):
            output.copy_(input)
        dist.broadcast(output, group_src=owner, group=group)
    return None


def _reduce_scatter_unequal(
    reduce_scatter: Callable[..., Any],
    output: Tensor,
    inputs: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce-scatter that also takes chunks of unequal length; see `_all_gather_unequal`."""
    if _alike_everywhere(inputs):
        return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
    total = torch.cat([chunk.reshape(-1) for chunk in inputs])
    dist.all_reduce(total, op=op, group=group)
    first = sum(chunk.numel() for chunk in inputs[: dist.get_rank(group)])
    output.copy_(total[first : first + output.numel()].view_as(output))
    return None


def _alike_everywhere(tensors: list[Tensor]) -> bool:
    """Every rank lists the tensors of all ranks, so all ranks come to the same answer."""
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def install_cpu_support() -> bool:
    """Answer Megatron-Core's CUDA requests on the CPU when CUDA is absent; returns whether it did.

    Calling it again has no effect. It must run before the first Megatron module or process group is made.
    """
    if torch.cuda.is_available() or getattr(torch.cuda, "_answered_by_cpu", False):
        return False
    cuda: Any = torch.cuda
    cuda._answered_by_cpu = True
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda *_: None
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = cuda.Event = _InertStream
    cuda.current_stream = lambda *_, **__: _InertStream()
    cuda.stream = lambda stream: stream
    cuda.get_device_capability = lambda *_, **__: (9, 0)
    cuda.get_device_properties = lambda *_, **__: SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=0, multi_processor_count=1
    )
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_, **__: 0

    # The random-state helpers bind CUDA internals at import, out of reach of the names above.
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    # Megatron's token dispatcher turns split sizes into host lists for CUDA tensors only.
    all_to_all_single = dist.all_to_all_single

    def all_to_all_with_host_splits(
        output: Tensor, input: Tensor, output_splits: Any = None, input_splits: Any = None, **options: Any
    ) -> Any:
        output_splits = options.pop("output_split_sizes", output_splits)
        input_splits = options.pop("input_split_sizes", input_splits)
        return all_to_all_single(
            output, input, _split_sizes_on_host(output_splits), _split_sizes_on_host(input_splits), **options
        )

    dist.all_to_all_single = all_to_all_with_host_splits  # type: ignore[assignment]
    dist.all_gather = partial(_all_gather_unequal, dist.all_gather)  # type: ignore[assignment]
    dist.reduce_scatter = partial(_reduce_scatter_unequal, dist.reduce_scatter)  # type: ignore[assignment]
    CudaRequestsOnCpu().__enter__()
    return True


def device_for_rank(local_rank: int) -> torch.device:
    """Device of a training rank: its CUDA device, or the CPU where there is none."""
    if getattr(torch.cuda, "_answered_by_cpu", False) or not torch.cuda.is_available():
        return _CPU
    return torch.device("cuda", local_rank)
