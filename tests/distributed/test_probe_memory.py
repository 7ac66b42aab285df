"""The probe's peak memory: logits of one chunk of tokens however many tokens it has, and no attention matrix of T x T.

A rank of a 7B model's layers at TP 8 runs on tensors without values, and every allocation is watched until it is freed.
"""

from __future__ import annotations

import multiprocessing
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_logra.mcore.build import build_optimizer, build_policy
from megatron_logra.mcore.fake import fake_world
from megatron_logra.mcore.tangent import compute_predicted_kl
from megatron_logra.mcore.transformer_config import PolicySettings
from megatron_logra.optim.logra import LograSettings
from megatron_logra.train_step import ProbeSettings, _build_probe, _choose_probe
from tests.distributed.test_fake_step import LLAMA_7B_LAYERS, RANK, TP, _responses

CHUNK = 256
SHARD = 5003  # columns of the vocabulary a rank holds: a prime, which no other dimension is
# Logits and tangents in fp32, and three fp64 temporaries of their statistics: 32; room for one more.
BYTES_OF_AN_ENTRY = 40


class _LiveMemory(TorchDispatchMode):
    """Follows the memory that operations allocate until it is freed: in all, and of tensors over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[int, bool]] = {}
        self.peak_bytes = self.vocab_peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Forward mode has zeros without memory.
            if isinstance(tensor, Tensor) and not tensor._is_zerotensor():
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._live:
                    self._add(tensor, storage)
        return result

    def _add(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self._live[storage._cdata] = (storage.nbytes(), tensor.shape[-1:] in ((SHARD,), (SHARD * TP,)))
        weakref.finalize(storage, self._live.pop, storage._cdata)
        self.peak_bytes = max(self.peak_bytes, sum(size for size, _ in self._live.values()))
        self.vocab_peak_bytes = max(self.vocab_peak_bytes, sum(size for size, vocab in self._live.values() if vocab))


def _probe(num_tokens: int) -> tuple[int, int]:
    """Peak bytes of the probe of one response, and those of tensors over the vocabulary."""
    with fake_world(rank=1, world_size=TP, tensor_model_parallel_size=TP) as groups:
        settings = PolicySettings(dtype=torch.bfloat16, seq_length=4096, sequence_parallel=True, chunk_size=CHUNK)
        shape = replace(LLAMA_7B_LAYERS, num_layers=1, vocab_size=SHARD * TP)
        policy = build_policy(shape, replace(settings, make_vocab_size_divisible_by=1), groups)
        build_optimizer(policy, LograSettings(rank=RANK))
        responses = _responses(2, prompt=8, length=num_tokens - 8)
        probe = _build_probe(policy, _choose_probe(policy, responses, ProbeSettings(num_responses=1)))
        assert tuple(probe.tokens_BT.shape) == (1, num_tokens)
        with _LiveMemory() as memory:
            compute_predicted_kl(policy, probe, temperature=0.7)
        return memory.peak_bytes, memory.vocab_peak_bytes


def test_the_probe_needs_the_logits_of_one_chunk_and_memory_linear_in_its_tokens() -> None:
    with multiprocessing.get_context("fork").Pool(1, torch.set_num_threads, (1,)) as pool:
        short, short_vocab = pool.apply_async(_probe, (1024,)).get(timeout=120)
        long, long_vocab = pool.apply_async(_probe, (2048,)).get(timeout=120)
    assert short_vocab == long_vocab <= BYTES_OF_AN_ENTRY * CHUNK * SHARD
    # Attention works on blocks of queries against all keys; a T x T matrix would make it 4 times as much.
    assert long <= 2.1 * short
