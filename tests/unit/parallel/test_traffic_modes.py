"""The traffic counter with fake process groups, in other modes and threads, nested, and under `torch.compile`."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_logra.parallel.traffic import DEFAULT_PURPOSE, OTHER_GROUP, Record, TrafficCounter, purpose

F32, BF16 = 4, 2  # bytes of an element


def in_new_process(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in an interpreter of its own: threads that autograd starts do not survive the forks of other tests."""

    @functools.wraps(test)
    def run() -> None:
        code = f"from {test.__module__} import {test.__name__} as test; test.__wrapped__()"
        folder = Path(__file__).parent
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    return run


@contextmanager
def fake_group(world_size: int) -> Iterator[dist.ProcessGroup]:
    """Rank 0 of a world in which collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


@in_new_process
def test_a_backward_on_another_thread_is_counted_without_the_purpose_around_it() -> None:
    """A backward nested beyond autograd's depth limit (60) goes on in a thread of its pool, as on CUDA all do."""
    threads = set()

    class NestedBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            if ctx.depth:
                with torch.enable_grad():
                    NestedBackward.apply(grad.detach().requires_grad_(), ctx.depth - 1).sum().backward()
                return grad, None
            threads.add(threading.get_ident())
            dist.all_reduce(grad.clone())
            with purpose("around the call"):
                dist.all_reduce(grad.clone())
            return grad, None

    with fake_group(4) as world, TrafficCounter({world: "world"}) as counter, purpose("around backward"):
        NestedBackward.apply(torch.ones(3, requires_grad=True), 70).sum().backward()
    assert threads and threading.get_ident() not in threads
    assert counter.records == {
        ("all_reduce", "world", DEFAULT_PURPOSE): Record(1, 3 * F32),
        ("all_reduce", "world", "around the call"): Record(1, 3 * F32),
    }


def test_purposes_nest_and_end_with_their_body() -> None:
    with fake_group(2) as world, TrafficCounter({world: "dp"}) as counter:
        with purpose("sketch"):
            dist.all_reduce(torch.ones(1))
            with pytest.raises(KeyError), purpose("weights"):
                dist.all_reduce(torch.ones(2))
                raise KeyError
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(8))
    assert counter.records == {
        ("all_reduce", "dp", "sketch"): Record(2, 5 * F32),
        ("all_reduce", "dp", "weights"): Record(1, 2 * F32),
        ("all_reduce", "dp", DEFAULT_PURPOSE): Record(1, 8 * F32),
    }


def test_totals_metrics_and_reset() -> None:
    with fake_group(4) as world:
        dp = dist.new_group([0, 1])
        counter = TrafficCounter({world: "world", dp: "dp"})
        assert counter.metrics() == {"comm/total_bytes": 0.0}
        for _ in range(2):  # counts add up over entries
            with counter:
                dist.all_gather_single(torch.empty(4), torch.ones(1))
                with purpose("sketch"):
                    dist.all_reduce(torch.ones(16), group=dp)
                    dist.barrier()
        dist.all_reduce(torch.ones(64))  # nobody counts
    assert counter.total_bytes() == 2 * (4 + 16) * F32
    assert counter.total_bytes(group="dp") == counter.total_bytes(purpose="sketch") == 2 * 16 * F32
    assert counter.total_bytes(collective="all_gather", group="world", purpose=DEFAULT_PURPOSE) == 2 * 4 * F32
    assert counter.total_bytes(collective="all_gather", group="dp") == 0
    assert counter.metrics() == {
        f"comm/{DEFAULT_PURPOSE}/world/all_gather_bytes": 2.0 * 4 * F32,
        "comm/sketch/dp/all_reduce_bytes": 2.0 * 16 * F32,
        "comm/sketch/world/barrier_bytes": 0.0,
        "comm/total_bytes": 2.0 * 20 * F32,
    }
    counter.reset()
    assert counter.records == {} and counter.total_bytes() == 0


@pytest.mark.parametrize("fake_mode_is_outside", [True, False])
def test_fake_tensors_are_counted_inside_and_outside_their_mode(fake_mode_is_outside: bool) -> None:
    with fake_group(4) as world:
        counter, fake_mode = TrafficCounter({world: "world"}), FakeTensorMode()
        first, second = (fake_mode, counter) if fake_mode_is_outside else (counter, fake_mode)
        with first, second:
            dist.all_reduce(x := torch.empty(1 << 40, dtype=torch.bfloat16))
            dist.all_gather_single(torch.empty(4 * 3), torch.empty(3))
        assert type(x).__name__ == "FakeTensor"
    assert counter.records == {
        ("all_reduce", "world", DEFAULT_PURPOSE): Record(1, BF16 << 40),
        ("all_gather", "world", DEFAULT_PURPOSE): Record(1, 4 * 3 * F32),
    }


def test_counters_nest_but_not_in_themselves() -> None:
    with fake_group(2) as world:
        outer, inner = TrafficCounter({world: "outer"}), TrafficCounter({})
        with outer:
            dist.all_reduce(torch.ones(1))
            with inner:
                dist.all_reduce(torch.ones(2))
                with pytest.raises(RuntimeError, match="already entered"), outer:
                    pass
            dist.all_reduce(torch.ones(4))
    assert outer.records == {("all_reduce", "outer", DEFAULT_PURPOSE): Record(3, 7 * F32)}
    assert inner.records == {("all_reduce", OTHER_GROUP, DEFAULT_PURPOSE): Record(1, 2 * F32)}


@in_new_process
def test_a_compiled_function_stays_compiled_and_its_collectives_are_counted() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    with fake_group(2) as world, TrafficCounter({world: "world"}) as counter:
        compiled = torch.compile(lambda x: functional.all_reduce(x + 1, "sum", world) * 2, backend=backend)
        for _ in range(2):
            compiled(torch.ones(5))
    assert len(graphs) == 1
    assert counter.records == {("all_reduce", "world", DEFAULT_PURPOSE): Record(2, 2 * 5 * F32)}
