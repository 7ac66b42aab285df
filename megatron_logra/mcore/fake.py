"""A training world without hardware: one rank of any layout whose tensors have shapes and no values.

Inside `fake_world` the real step runs (our modules, our optimizer, Megatron's schedules) on fake tensors, and
collectives return at once. Whatever watches allocations there sees what a real rank would allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_logra.mcore.cpu import install_cpu_support
from megatron_logra.mcore.initialize import initialize_model_parallel, shutdown_distributed
from megatron_logra.parallel.groups import ParallelGroups


@contextmanager
def fake_world(*, rank: int, world_size: int, **sizes: int | None) -> Iterator[ParallelGroups]:
    """Be rank `rank` of `world_size` for the body, on fake tensors. One at a time in a process.

    `sizes` are those of `initialize_model_parallel`.
    """
    install_cpu_support()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        groups = initialize_model_parallel(seed=0, create_gloo_process_groups=False, **sizes)  # type: ignore[arg-type]
        with _inert_random_states(), FakeTensorMode(allow_non_fake_inputs=True):
            yield groups
    finally:
        shutdown_distributed()


@contextmanager
def _inert_random_states() -> Iterator[None]:
    """Random states are byte tensors that cannot be fake; nothing in a step without dropout draws from them."""
    import megatron.core.tensor_parallel.random as megatron_random

    class InertTracker(megatron_random.CudaRNGStatesTracker):
        @contextmanager
        def fork(self, name: str = "") -> Iterator[None]:
            yield

    replaced: dict[str, Any] = {
        "_CUDA_RNG_STATE_TRACKER": InertTracker(),
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED": True,
        "_get_all_rng_states": lambda: (),
        "_set_all_rng_states": lambda *states: None,
    }
    originals = {name: getattr(megatron_random, name) for name in replaced}
    for name, value in replaced.items():
        setattr(megatron_random, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(megatron_random, name, value)
