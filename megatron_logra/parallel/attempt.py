"""Finds an empty key space for a world whose ranks were restarted.

With `--rdzv-backend c10d` torchrun keeps one key-value store for all attempts, so a restarted rank may read addresses
of processes that are dead. The ranks of an attempt therefore agree on a name first, below which no key exists:

    rank r    hello/r = own token                     random, so it differs from that of every earlier attempt
    rank 0    members = [own token, token of 1, ...]  again and again, until everybody has found itself in it
    rank r    members[r] is the own token:  ack/members[0]/r
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store

_POLL_S = 0.05


def fresh_store(store: Store, rank: int, world_size: int, *, timeout: timedelta) -> Store:
    """A view of `store` without any key of an earlier attempt; called by all ranks of the world.

    Raises:
        TimeoutError: not all ranks came within `timeout`.
    """
    meeting, own = PrefixStore("attempt", store), secrets.token_hex(8)
    meeting.set_timeout(timeout)
    deadline_s = time.monotonic() + timeout.total_seconds()
    meeting.set(f"hello/{rank}", own)
    while time.monotonic() < deadline_s:
        if rank == 0:
            members = [own, *(meeting.get(f"hello/{other}").decode() for other in range(1, world_size))]
            meeting.set("members", json.dumps(members))
            if world_size == 1 or meeting.check([f"ack/{own}/{other}" for other in range(1, world_size)]):
                return PrefixStore(own, store)
        else:
            members = json.loads(meeting.get("members"))
            if len(members) == world_size and members[rank] == own:
                meeting.set(f"ack/{members[0]}/{rank}", "")
                return PrefixStore(members[0], store)
        time.sleep(_POLL_S)
    raise TimeoutError(
        f"rank {rank} of {world_size} did not meet the other ranks within {timeout.total_seconds():g} s: a rank is "
        "missing or still starting; see its output, or raise --distributed-timeout-minutes"
    )
