"""Every collective against its bytes by hand, on real gloo ranks; then groups, purposes, backward and other modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # a dispatch mode imports it at its first operation; before the fork it is imported only once
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from megatron_logra.parallel.collectives import all_reduce_sum, copy_to_group, gather_sequence
from megatron_logra.parallel.traffic import DEFAULT_PURPOSE, OTHER_GROUP, Record, TrafficCounter, purpose
from tests.distributed.ranks import run_ranks

P = 3  # ranks; no power of two, and the last one has both neighbours
F32, F64, I32, BF16 = 4, 8, 4, 2  # bytes of an element


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, other ones on every rank: sums are exact in any order."""
    return (torch.arange(torch.Size(shape).numel()) % 7 + 10 * rank + 1).reshape(shape).to(dtype)


def empties(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


# Each case communicates over the world and returns what it received. Beside it: {collective: (calls, bytes)}, where
# bytes may depend on the rank.
Case = Callable[[int], list[Tensor]]
CASES: dict[str, tuple[Case, dict[str, tuple[int, int | Callable[[int], int]]]]] = {}


def case(**expected: tuple[int, int | Callable[[int], int]]) -> Callable[[Case], Case]:
    def register(fn: Case) -> Case:
        CASES[fn.__name__] = (fn, expected)
        return fn

    return register


@case(all_reduce=(1, 5 * 2 * F32))
def all_reduce(rank: int) -> list[Tensor]:
    dist.all_reduce(x := values(rank, 5, 2))
    return [x]


@case(all_reduce=(2, 5 * BF16 + 7 * F64))
def all_reduce_async(rank: int) -> list[Tensor]:
    tensors = [values(rank, 5, dtype=torch.bfloat16), values(rank, 7, dtype=torch.float64)]
    works = [dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True) for x in tensors]
    for work in works:
        assert work is not None
        work.wait()
    return tensors


@case(all_reduce=(1, (2 + 3) * F32))
def all_reduce_coalesced(rank: int) -> list[Tensor]:
    dist.all_reduce_coalesced(tensors := [values(rank, 2), values(rank, 3)])
    return tensors


@case(reduce=(1, 6 * F32))
def reduce(rank: int) -> list[Tensor]:
    dist.reduce(x := values(rank, 6), dst=1)
    return [x] if rank == 1 else []


@case(broadcast=(1, 6 * I32))
def broadcast(rank: int) -> list[Tensor]:
    dist.broadcast(x := values(rank, 2, 3, dtype=torch.int32), src=2)
    return [x]


@case(all_gather=(1, P * 4 * F32))
def all_gather(rank: int) -> list[Tensor]:
    dist.all_gather(gathered := empties(*[(4,)] * P), values(rank, 4))
    return gathered


@case(all_gather=(1, P * 4 * 2 * F32))
def all_gather_single(rank: int) -> list[Tensor]:
    dist.all_gather_single(gathered := torch.zeros(P * 4, 2), values(rank, 4, 2))
    return [gathered]


@case(all_gather=(2, P * (2 + 3) * F32 + P * (4 + 5) * F32))
def all_gather_coalesced(rank: int) -> list[Tensor]:
    gathered = [empties((2,), (3,)) for _ in range(P)]
    dist.all_gather_coalesced(gathered, [values(rank, 2), values(rank, 3)])
    whole = empties((P * 4,), (P * 5,))
    group = dist.distributed_c10d._get_default_group()
    group.allgather_into_tensor_coalesced(whole, [values(rank, 4), values(rank, 5)]).wait()
    return [x for shard in gathered for x in shard] + whole


@case(reduce_scatter=(1, P * 2 * F32))
def reduce_scatter(rank: int) -> list[Tensor]:
    dist.reduce_scatter(x := torch.zeros(2), [values(rank + i, 2) for i in range(P)])
    return [x]


@case(reduce_scatter=(1, P * 2 * 5 * F32))
def reduce_scatter_single(rank: int) -> list[Tensor]:
    dist.reduce_scatter_single(x := torch.zeros(2, 5), values(rank, P * 2, 5))
    return [x]


@case(reduce_scatter=(1, P * (2 + 3) * F32))
def reduce_scatter_coalesced(rank: int) -> list[Tensor]:
    scattered = empties((2,), (3,))
    group = dist.distributed_c10d._get_default_group()
    group.reduce_scatter_tensor_coalesced(scattered, [values(rank, P * 2), values(rank, P * 3)]).wait()
    return scattered


@case(all_to_all=(1, P * 2 * F32))
def all_to_all(rank: int) -> list[Tensor]:
    dist.all_to_all(received := empties(*[(2,)] * P), [values(rank + i, 2) for i in range(P)])
    return received


# Rank r sends r + 1 rows to every rank, so rank i receives 1 + 2 + ... + P rows.
@case(all_to_all=(1, lambda rank: P * (rank + 1) * 2 * F32))
def all_to_all_single_uneven(rank: int) -> list[Tensor]:
    received = torch.zeros(P * (P + 1) // 2, 2)
    splits_in, splits_out = [rank + 1] * P, [i + 1 for i in range(P)]
    dist.all_to_all_single(received, values(rank, P * (rank + 1), 2), splits_out, splits_in)
    return [received]


@case(gather=(1, P * 4 * F32))
def gather(rank: int) -> list[Tensor]:
    gathered = empties(*[(4,)] * P) if rank == 1 else None
    dist.gather(values(rank, 4), gathered, dst=1)
    return gathered or []


@case(scatter=(1, P * 4 * F32))
def scatter(rank: int) -> list[Tensor]:
    x = torch.zeros(4)
    dist.scatter(x, [values(i, 4) for i in range(P)] if rank == 1 else None, src=1)
    return [x]


@case(send=(1, lambda rank: (rank + 1) * F32), recv=(1, lambda rank: ((rank - 1) % P + 1) * F32))
def batch_isend_irecv(rank: int) -> list[Tensor]:
    after, before = (rank + 1) % P, (rank - 1) % P
    x = torch.zeros(before + 1)
    messages = [dist.P2POp(dist.isend, values(rank, rank + 1), after), dist.P2POp(dist.irecv, x, before)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [x]


@case(send=(1, lambda rank: 4 * F32 if rank else 0), recv=(P - 1, lambda rank: 0 if rank else (P - 1) * 4 * F32))
def recv_from_anyone(rank: int) -> list[Tensor]:
    if rank:
        dist.send(values(0, 4), dst=0)
        return []
    received = empties(*[(4,)] * (P - 1))
    for x in received:
        dist.recv(x)
    return received


@case(barrier=(2, 0))
def barrier(rank: int) -> list[Tensor]:
    dist.barrier()
    dist.monitored_barrier()
    return []


@case(all_reduce=(1, 4 * F32), all_gather=(1, P * 4 * F32), reduce_scatter=(1, P * 4 * F32), broadcast=(1, 4 * F32))
def functional_collectives(rank: int) -> list[Tensor]:
    world, x = dist.distributed_c10d._get_default_group(), values(rank, 4)
    return [
        functional.wait_tensor(functional.all_reduce(x, "sum", world)),
        functional.wait_tensor(functional.all_gather_tensor(x, 0, world)),
        functional.wait_tensor(functional.reduce_scatter_tensor(values(rank, P * 4), "sum", 0, world)),
        functional.wait_tensor(functional.broadcast(x, 0, world)),
    ]


@case(all_gather=(1, P * (2 + 3) * F32), reduce_scatter=(1, P * 9 * F32), all_to_all=(1, lambda r: P * (r + 1) * F32))
def functional_coalesced(rank: int) -> list[Tensor]:
    world = dist.distributed_c10d._get_default_group()
    shards = [values(rank, P * 4), values(rank, P * 5)]
    received = [
        *functional.all_gather_into_tensor_coalesced([values(rank, 2), values(rank, 3)], world),
        *functional.reduce_scatter_tensor_coalesced(shards, "sum", [0, 0], world),
        functional.all_to_all_single(values(rank, P * (rank + 1)), [1, 2, 3], [rank + 1] * P, world),
    ]
    return [functional.wait_tensor(x) for x in received]


# What compiled code calls: results in place or in a given tensor.
@case(
    all_reduce=(3, (4 + 2 * (2 + 3)) * F32),
    broadcast=(1, 4 * F32),
    all_gather=(1, P * 4 * F32),
    reduce_scatter=(1, P * 4 * F32),
)
def functional_in_place(rank: int) -> list[Tensor]:
    ops, name = torch.ops._c10d_functional, dist.distributed_c10d._get_default_group().group_name
    gathered, scattered = torch.zeros(P * 4), torch.zeros(4)
    received = [
        ops.all_reduce_(values(rank, 4), "sum", name),
        *ops.all_reduce_coalesced([values(rank, 2), values(rank, 3)], "sum", name),
        *ops.all_reduce_coalesced_([values(rank, 2), values(rank, 3)], "sum", name),
        ops.broadcast_(values(rank, 4), 0, name),
        ops.all_gather_into_tensor_out(values(rank, 4), P, name, out=gathered),
        ops.reduce_scatter_tensor_out(values(rank, P * 4), "sum", P, name, out=scattered),
    ]
    return [functional.wait_tensor(x) for x in received]


def test_every_collective_counts_its_bytes_and_receives_the_same() -> None:
    def run(rank: int, world_size: int) -> dict[str, Any]:
        records = {}
        for name, (fn, _) in CASES.items():
            received = fn(rank)
            with TrafficCounter({dist.distributed_c10d._get_default_group(): "world"}) as counter:
                received_counted = fn(rank)
            assert [x.tolist() for x in received_counted] == [x.tolist() for x in received], name
            assert all(x.any() for x in received), f"{name} received nothing"
            records[name] = counter.records
        return records

    for rank, records in enumerate(run_ranks(P, run)):
        for name, (_, expected) in CASES.items():
            assert records[name] == {
                (collective, "world", DEFAULT_PURPOSE): Record(calls, n(rank) if callable(n) else n)
                for collective, (calls, n) in expected.items()
                if not callable(n) or n(rank)  # a rank that takes no part has no record
            }, f"{name} on rank {rank}"


def test_groups_of_the_same_ranks_stay_apart_and_a_group_of_one_counts_nothing() -> None:
    def run(rank: int, world_size: int) -> Any:
        tp, dp, unnamed = (dist.new_group([0, 1]) for _ in range(3))
        alone = [dist.new_group([i]) for i in range(2)][rank]
        # As pairs a group may come twice, which a mapping excludes.
        with TrafficCounter([(tp, "tp"), (dp, "dp"), (tp, "second"), (alone, "alone")]) as counter:
            for group, length in ((tp, 1), (dp, 2), (unnamed, 4), (dist.group.WORLD, 8)):
                dist.all_reduce(torch.ones(length), group=group)
            gathered = functional.all_gather_tensor(torch.ones(16), 0, tp)
            dist.all_reduce(x := torch.ones(3), group=alone)
            dist.barrier(group=alone)
            dist.all_gather_single(y := torch.zeros(3), x, group=alone)
        assert torch.equal(x, torch.ones(3)) and torch.equal(y, x) and gathered.shape == (32,)
        return counter.records

    expected = {
        ("all_reduce", "tp", DEFAULT_PURPOSE): Record(1, 1 * F32),
        ("all_reduce", "dp", DEFAULT_PURPOSE): Record(1, 2 * F32),
        ("all_reduce", OTHER_GROUP, DEFAULT_PURPOSE): Record(2, (4 + 8) * F32),
        ("all_gather", "tp", DEFAULT_PURPOSE): Record(1, 2 * 16 * F32),
    }
    assert run_ranks(2, run) == [expected] * 2


def test_collectives_in_backward_count_with_the_purpose_around_the_call() -> None:
    class ReduceGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with purpose("gradients"):
                return all_reduce_sum(grad, dist.distributed_c10d._get_default_group())

    def run(rank: int, world_size: int) -> Any:
        world = dist.distributed_c10d._get_default_group()
        x = values(rank, 4, 5).requires_grad_()
        with TrafficCounter({world: "tp"}) as counter:
            gathered = gather_sequence(ReduceGradient.apply(copy_to_group(x, world)), world)
            assert dict(counter.records) == {("all_gather", "tp", DEFAULT_PURPOSE): Record(1, 2 * 20 * F32)}
            (gathered * (rank + 1)).sum().backward()
        # Reduce-scattered 1 + 2, then summed twice over two ranks.
        assert x.grad is not None and torch.equal(x.grad, torch.full((4, 5), 12.0))
        return counter.records

    expected = {
        ("all_gather", "tp", DEFAULT_PURPOSE): Record(1, 2 * 20 * F32),
        ("reduce_scatter", "tp", DEFAULT_PURPOSE): Record(1, 2 * 20 * F32),
        ("all_reduce", "tp", "gradients"): Record(1, 20 * F32),
        ("all_reduce", "tp", DEFAULT_PURPOSE): Record(1, 20 * F32),
    }
    assert run_ranks(2, run) == [expected] * 2
