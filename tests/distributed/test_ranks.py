"""The harness itself: results, failures and deadlocks come back, and no process stays behind."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError, run_ranks


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    offset = torch.tensor([10.0, 20.0])

    def gather_ranks(rank: int, size: int, offset_2: torch.Tensor) -> dict[str, Any]:
        own_2 = offset_2 + rank
        total_2 = own_2.clone()
        dist.all_reduce(total_2)
        threads = torch.get_num_threads()
        return {"rank": rank, "size": size, "own": own_2, "total": total_2, "threads": threads}

    results = run_ranks(world_size, gather_ranks, offset)
    assert [result["rank"] for result in results] == list(range(world_size))
    for rank, result in enumerate(results):
        assert (result["size"], result["threads"]) == (world_size, 1)
        torch.testing.assert_close(result["own"], offset + rank, rtol=0, atol=0)
        expected_2 = offset * world_size + world_size * (world_size - 1) / 2
        torch.testing.assert_close(result["total"], expected_2, rtol=0, atol=0)


def test_large_results_and_random_streams_do_not_depend_on_the_parent() -> None:
    def draw(rank: int, size: int) -> torch.Tensor:
        return torch.randn(1 << 20)

    first_2, second_2 = run_ranks(2, draw), run_ranks(2, draw)
    torch.testing.assert_close(first_2, second_2, rtol=0, atol=0)
    torch.testing.assert_close(first_2[0], first_2[1], rtol=0, atol=0)


def test_the_first_failure_is_raised_with_rank_and_cause_and_the_others_are_killed() -> None:
    def fail_on_one(rank: int, size: int) -> None:
        if rank == 1:
            raise ValueError("the reason")
        time.sleep(60)

    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 raised.*fail_on_one.*the reason") as caught:
        run_ranks(3, fail_on_one)
    assert time.monotonic() - start_s < 50  # the others would sleep for 60
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failure_is_not_hidden_by_the_connection_errors_it_causes() -> None:
    def fail_beside_a_collective(rank: int, size: int) -> None:
        if rank == 0:
            time.sleep(0.2)
            raise KeyError("the reason")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match="the reason"):
        run_ranks(2, fail_beside_a_collective)


def test_a_rank_that_dies_is_reported() -> None:
    def die(rank: int, size: int) -> None:
        if rank == 0:
            os._exit(7)
        dist.barrier()

    with pytest.raises(RankError, match="rank 0 of 2 died with exit code 7"):
        run_ranks(2, die)


def test_an_error_that_cannot_be_pickled_still_arrives() -> None:
    class LocalError(Exception):
        pass

    def fail(rank: int, size: int) -> None:
        raise LocalError("the reason")

    with pytest.raises(RankError, match="the reason"):
        run_ranks(1, fail)


def test_a_deadlock_ends_with_the_stack_of_every_rank_and_no_process_left(tmp_path: Any) -> None:
    def wait_forever(rank: int, size: int) -> None:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 0:
            dist.recv(torch.empty(1), src=1)
        time.sleep(60)

    with pytest.raises(RankError, match=r"(?s)ranks 0, 1 did not finish within 2.*rank 0:.*recv.*rank 1:"):
        run_ranks(2, wait_forever, timeout_s=2)
    assert not any(is_running(int((tmp_path / str(rank)).read_text())) for rank in range(2))
