"""Saves and loads what a run needs to continue, and exports the policy as a Hugging Face folder.

    SAVE/iter_0000010/rank_00000.safetensors   trained weights (with their masters) and row moments of one rank
    SAVE/iter_0000010/rank_00000.adam.pt       Adam's state of one rank, if anything is trained densely
    SAVE/iter_0000010/state.json               counters, controller, data position, layout
    SAVE/latest_checkpointed_iteration.txt     the newest whole checkpoint; moves after everybody has written
    SAVE/huggingface/                          the policy for `transformers` and rollout engines

Frozen weights come from --hf-checkpoint again. Adam's state is not kept when ranks divide it among themselves
(--use-distributed-optimizer); such a run cannot be continued. A checkpoint is written beside
its place and renamed when every rank is done: whatever is interrupted, the previous one stays whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_logra.hf.safetensors_io import HFWriter
from megatron_logra.mcore.dense import DenseOptimizer
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.weights import read_served
from megatron_logra.optim.logra import LograOptimizer
from megatron_logra.parallel.scalars import raise_on_all_ranks, run_on_all_ranks
from megatron_logra.sync.sender import PolicySender

LATEST_FILE = "latest_checkpointed_iteration.txt"
STATE_FILE = "state.json"
HF_FOLDER = "huggingface"


def save_checkpoint(
    folder: Path,
    iteration: int,
    policy: Policy,
    optimizer: LograOptimizer | None,
    dense: DenseOptimizer | None,
    state: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Write checkpoint `iteration` under `folder`; `state` is JSON data equal on all ranks. Collective.

    Raises:
        OSError: on the rank whose disk refused (`RuntimeError` elsewhere); the previous checkpoint is untouched.
    """
    groups = policy.groups
    final = folder / f"iter_{iteration:07d}"
    partial = folder / f".iter_{iteration:07d}.partial"
    run_on_all_ranks(lambda: _make_empty(partial) if groups.rank == 0 else None, groups.world, device)
    place = partial / _rank_file(groups.rank)

    def write() -> None:
        save_file(_collect_tensors(policy, optimizer), place)
        if dense is not None and not dense.settings.distributed:
            torch.save(dense.state_dict(), _adam_file(place))

    run_on_all_ranks(write, groups.world, device)
    record = {"layout": _layout(policy), "rank": _sketch_rank(optimizer), **state}

    def publish() -> None:
        if groups.rank != 0:
            return
        (partial / STATE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        pointer = folder / (LATEST_FILE + ".tmp")
        pointer.write_text(f"{iteration}\n", encoding="utf-8")
        os.replace(pointer, folder / LATEST_FILE)

    run_on_all_ranks(publish, groups.world, device)


def load_checkpoint(
    folder: Path,
    policy: Policy,
    optimizer: LograOptimizer | None,
    dense: DenseOptimizer | None,
    device: torch.device,
) -> dict[str, Any]:
    """Put the newest checkpoint of `folder` into policy and optimizers and return its `state`. Collective.

    Raises:
        ValueError: no checkpoint, another layout or sketch rank, or a damaged file; nothing was changed.
    """
    state, tensors, adam = run_on_all_ranks(
        lambda: _read_files(folder, policy, optimizer, dense), policy.groups.world, device
    )
    with torch.no_grad():
        for name, tensor in _collect_tensors(policy, optimizer).items():
            tensor.copy_(tensors[name])
    if optimizer is not None:
        optimizer.num_updates = int(state["num_updates"])
        optimizer.draw_projections()
    if dense is not None:
        dense.load_state_dict(adam)
    return state


def export_policy(folder: Path, source: Path, policy: Policy, sender: PolicySender, device: torch.device) -> None:
    """Write the policy as a Hugging Face folder with the config and tokenizer of `source`. Collective.

    The first model replica streams its weights, one bounded bucket at a time; rank 0 writes. Experts are spread over
    replicas, so with them all replicas take part. The folder appears at its place whole or not at all.
    """
    groups = policy.groups
    takes_part = policy.shape.num_experts is not None or (groups.dp_rank == 0 and groups.cp_rank == 0)
    dtype = policy.model.config.params_dtype
    error: Exception | None = None
    if takes_part:
        stream = sender.stream_weights(lambda entry: read_served(policy, entry), dtype=dtype)
        if groups.rank == 0:
            try:
                with HFWriter(folder, expected_names=sender.weight_names) as writer:
                    writer.copy_side_files(source, dtype=dtype)
                    for name, tensor in stream:
                        writer.write(name, tensor)
            except Exception as failure:  # a full disk, above all: the other ranks must not wait for this one
                error = failure
        # On rank 0 this is empty unless writing failed; then the others still get their collectives.
        for _ in stream:
            pass
    raise_on_all_ranks(error, groups.world, device)


def _collect_tensors(policy: Policy, optimizer: LograOptimizer | None) -> dict[str, Tensor]:
    """The tensors of a rank that training changes, by name; the tensors themselves."""
    tensors = {} if optimizer is None else {"moment2": optimizer.moment2}
    for name, weight in policy.model.named_parameters():
        if weight.requires_grad:
            tensors[f"weight.{name}"] = weight.detach()
    for target in policy.targets:
        tensors[f"weight.{target.name}"] = target.weight
        if target.remainder is not None:
            tensors[f"remainder.{target.name}"] = target.remainder
        if target.master is not None:
            tensors[f"master.{target.name}"] = target.master
    return tensors


def _read_files(
    folder: Path, policy: Policy, optimizer: LograOptimizer | None, dense: DenseOptimizer | None
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """State, this rank's tensors and Adam's state of the newest checkpoint, checked against what they will replace."""
    pointer = folder / LATEST_FILE
    if not pointer.is_file():
        raise ValueError(f"load {str(folder)!r} holds no checkpoint: it has no {LATEST_FILE}")
    place = folder / f"iter_{int(pointer.read_text()):07d}"
    try:
        state = json.loads((place / STATE_FILE).read_text(encoding="utf-8"))
        found = (state["layout"], state["rank"])
        expected = (_layout(policy), _sketch_rank(optimizer))
        if found != expected:
            raise ValueError(
                f"{place} was saved with layout {found[0]} and logra_rank {found[1]}, this run has {expected[0]} and "
                f"logra_rank {expected[1]}; give the same parallel sizes, --logra-rank and number of ranks"
            )
        tensors = load_file(place / _rank_file(policy.groups.rank))
        adam = {} if dense is None else _read_adam(_adam_file(place / _rank_file(policy.groups.rank)))
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"checkpoint {place} is damaged or incomplete: {error}") from error
    for name, tensor in _collect_tensors(policy, optimizer).items():
        if name not in tensors or tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
            raise ValueError(
                f"checkpoint {place} does not fit this model and precision at {name}: continue with the settings it "
                "was saved with"
            )
    return state, tensors, adam


def _read_adam(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(
            f"{file} does not exist: Adam's state was divided among the ranks (--use-distributed-optimizer) or nothing "
            "was trained densely, so the run cannot be continued with Adam"
        )
    return torch.load(file, weights_only=True)


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _layout(policy: Policy) -> dict[str, int]:
    groups = policy.groups
    return {
        "tensor": groups.tp_size,
        "pipeline": groups.pp_size,
        "chunks": len(policy.model.chunks),
        "context": groups.cp_size,
        "data": groups.dp_size,
        "expert": groups.ep_size,
        "expert_tensor": groups.etp_size,
    }


def _sketch_rank(optimizer: LograOptimizer | None) -> int | None:
    return None if optimizer is None else optimizer.settings.rank


def _adam_file(rank_file: Path) -> Path:
    return rank_file.with_suffix(".adam.pt")


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"
