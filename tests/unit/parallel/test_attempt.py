"""Restarted ranks meet below a name of their own, whatever earlier attempts left behind."""

from __future__ import annotations

import json
import random
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from megatron_logra.parallel.attempt import fresh_store


def meet(store: Store, world_size: int, *, seed: int = 0) -> list[Store]:
    """Views that the ranks of an attempt get, each rank a thread that comes at a moment of its own."""
    rng = random.Random(seed)
    found: dict[int, Store] = {}

    def join(rank: int, delay_s: float) -> None:
        time.sleep(delay_s)
        found[rank] = fresh_store(store, rank, world_size, timeout=timedelta(seconds=20))

    threads = [threading.Thread(target=join, args=(rank, rng.uniform(0, 0.2))) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_attempt_has_a_key_space_of_its_own(world_size: int) -> None:
    store = HashStore()
    for attempt in range(3):
        views = meet(store, world_size, seed=attempt)
        assert not any(view.check(["address"]) for view in views)
        views[-1].set("address", str(attempt))
        assert {view.get("address") for view in views} == {str(attempt).encode()}


def test_an_attempt_that_died_half_way_is_not_joined() -> None:
    store = HashStore()
    left = PrefixStore("attempt", store)
    left.set("hello/0", "old0")
    left.set("hello/1", "old1")
    left.set("members", json.dumps(["old0", "old1"]))
    left.set("ack/old0/1", "")
    first, second = meet(store, 2)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_a_missing_rank_is_an_error_in_time() -> None:
    store = HashStore()
    PrefixStore("attempt", store).set("members", json.dumps(["somebody", "else"]))
    with pytest.raises(TimeoutError, match="rank 1 of 2 did not meet the other ranks within 0.3 s"):
        fresh_store(store, 1, 2, timeout=timedelta(seconds=0.3))
