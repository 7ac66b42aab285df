"""Exports the policy as a Hugging Face folder, which appears at its place whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_logra.hf.safetensors_io import HFWriter
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.weights import read_served
from megatron_logra.parallel.scalars import raise_on_all_ranks
from megatron_logra.sync.sender import PolicySender

HF_FOLDER = "huggingface"


def export_policy(
    folder: Path,
    source: Path,
    policy: Policy,
    sender: PolicySender,
    device: torch.device,
    *,
    write_later: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Write the policy as a Hugging Face folder with the config and tokenizer of `source`. Collective.

    The first model replica streams its weights, one bounded bucket at a time; rank 0 writes. Experts are spread over
    replicas, so with them all replicas take part.

    Args:
        write_later: takes the work of writing on rank 0, to be done when training goes on; the host then holds a copy
            of all weights until it is done. None: written before this returns.
    """
    groups = policy.groups
    takes_part = policy.shape.num_experts is not None or (groups.dp_rank == 0 and groups.cp_rank == 0)
    dtype = policy.model.config.params_dtype
    error: Exception | None = None
    if takes_part:
        stream = sender.stream_weights(lambda entry: read_served(policy, entry), dtype=dtype)
        if groups.rank == 0:
            try:
                if write_later is None:
                    _write(folder, source, sender, stream, dtype)
                else:
                    copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in stream]
                    write_later(lambda: _write(folder, source, sender, copies, dtype))
            except Exception as failure:  # a full disk, above all: the other ranks must not wait for this one
                error = failure
        # On rank 0 this is empty unless writing failed; then the others still get their collectives.
        for _ in stream:
            pass
    raise_on_all_ranks(error, groups.world, device)


def _write(
    folder: Path, source: Path, sender: PolicySender, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    with HFWriter(folder, expected_names=sender.weight_names) as writer:
        writer.copy_side_files(source, dtype=dtype)
        for name, tensor in weights:
            writer.write(name, tensor)
