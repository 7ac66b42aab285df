"""Converts between Hugging Face folders and Megatron checkpoints (`torch_dist`), by one table for both ways.

    SAVE/iter_0000000/                    the weights under Megatron's names (`hf.stored`), see `checkpoint.folders`
    SAVE/iter_0000000/huggingface.json    {"dtypes": {name: dtype}}

A stored tensor holds all layers in one type, so it gets one that holds every source exactly; `huggingface.json` names
the sources that had another type, for the way back. Nothing is computed: both ways together give every bit back.

Parameters are read, written and forgotten one after the other, in blocks of at most `MAX_BLOCK_BYTES` on the way to
Megatron and whole on the way back. One process; no Megatron, no GPU. `find_other` is that of `read_model_shape`.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_logra.checkpoint.folders import checkpoint_folder, list_iterations, open_partial, publish
from megatron_logra.checkpoint.integrity import hash_files, write_manifest
from megatron_logra.checkpoint.placement import WHOLE, Layout, Placed, place_parameters
from megatron_logra.checkpoint.reader import RECORD_FILE, MegatronCheckpoint
from megatron_logra.checkpoint.torch_dist import Block, save_blocks, write_format
from megatron_logra.hf.assemble import assemble_local, take_rows
from megatron_logra.hf.config import FindFamily, ModelShape, read_model_shape
from megatron_logra.hf.safetensors_io import HFReader, HFWriter, validate_checkpoint
from megatron_logra.hf.stored import module_states
from megatron_logra.hf.table import LocalParameter
from megatron_logra.progress import Progress

ITERATION = 0
MAX_BLOCK_BYTES = 64 * 2**20


def convert_from_hf(source: Path, save: Path, layout: Layout, *, find_other: FindFamily | None = None) -> Path:
    """Write the weights of a Hugging Face folder as checkpoint 0 of `save`, and return the checkpoint's folder.

    It appears whole or not at all; an earlier conversion in `save` is replaced.

    Raises:
        ValueError: the source is damaged or does not fit its config.json or the layout, or `save` holds the checkpoints
            of a run. Nothing was written.
        RuntimeError, OSError: writing failed; nothing is left of it.
    """
    shape, reader = open_hf(source, find_other=find_other)
    _refuse_run(save)
    dtypes = _stored_dtypes(shape, reader)
    placed = list(place_parameters(shape, layout))
    others = {
        name: _dtype_name(found)
        for part in placed
        for name in part.parameter.entry.hf_names
        if (found := reader.dtype(name)) is not None and found != dtypes[part.blocks[0].key]
    }
    partial_folder = open_partial(save, ITERATION)
    try:
        with Progress("writing", 0, unit="blocks") as progress:
            blocks = [
                block for part in placed for block in _lazy_blocks(part, reader, dtypes[part.blocks[0].key], progress)
            ]
            progress.update(0, total=len(blocks))
            common = {"iteration": ITERATION, "checkpoint_version": 3.0}
            save_blocks(partial_folder, blocks, common=common, module_states=module_states(shape), group=None)
        (partial_folder / RECORD_FILE).write_text(json.dumps({"dtypes": others}, indent=1) + "\n", encoding="utf-8")
        write_format(partial_folder)
        write_manifest(partial_folder, hash_files(partial_folder.iterdir()))
        publish(partial_folder, save, ITERATION)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return checkpoint_folder(save, ITERATION)


def convert_to_hf(
    load: Path,
    reference: Path,
    save: Path,
    *,
    dtype: torch.dtype | None = None,
    master: bool = False,
    find_other: FindFamily | None = None,
) -> None:
    """Write the weights of a Megatron checkpoint as a Hugging Face folder with the side files of `reference`.

    The folder appears whole or not at all.

    Args:
        load: a checkpoint, or a folder of checkpoints, of which the newest is taken.
        reference: Hugging Face folder whose config.json describes the model; its weights are not read.
        dtype: of all weights; None: the type that each has in the checkpoint, or had before it came there.
        master: write the fp32 masters of a training run where there are any, the other weights as fp32.

    Raises:
        ValueError: the checkpoint is damaged or does not fit the reference, with all names; nothing was written.
    """
    shape = read_model_shape(reference, find_other=find_other)
    checkpoint = MegatronCheckpoint(load, shape, dtype=torch.float32 if master else dtype, master=master)
    names = checkpoint.dtypes
    declared = set(names.values()) if set(names.values()) != {shape.dtype} else set()
    with (
        HFWriter(save, expected_names=names) as writer,
        Progress("writing", len(names), unit="tensors") as progress,
    ):
        writer.copy_side_files(reference, dtype=declared.pop() if len(declared) == 1 else None)
        for name, tensor in checkpoint.read():
            writer.write(name, tensor)
            progress.advance()
            del tensor  # the next one is read before the loop lets go of this one


def find_differences(
    source: Path, layout: Layout, scratch: Path | None = None, *, find_other: FindFamily | None = None
) -> tuple[list[str], int]:
    """Convert a Hugging Face folder to Megatron and back; the tensors that differ in a bit or in type, and of how many.

    The checkpoint is written in a temporary folder (in `scratch` if that is given); tensors are compared one by one.
    """
    shape, reader = open_hf(source, find_other=find_other)
    different = []
    with tempfile.TemporaryDirectory(dir=scratch, prefix="roundtrip-") as folder:
        convert_from_hf(source, Path(folder), layout, find_other=find_other)
        checkpoint = MegatronCheckpoint(Path(folder), shape)
        with Progress("comparing", len(checkpoint.dtypes), unit="tensors") as progress:
            for name, tensor in checkpoint.read():
                if not _same_bits(tensor, reader.read(name)):
                    different.append(name)
                progress.advance()
                del tensor
    return different, len(checkpoint.dtypes)


def open_hf(folder: Path, *, find_other: FindFamily | None = None) -> tuple[ModelShape, HFReader]:
    """Shape and tensors of a Hugging Face folder that fit each other; ValueError names all that do not."""
    shape = read_model_shape(folder, find_other=find_other)
    reader = HFReader(folder)
    validate_checkpoint(reader, shape)
    return shape, reader


def _refuse_run(save: Path) -> None:
    """Checkpoint 0 becomes the newest of its folder, which must not happen among the checkpoints of a run."""
    foreign = [
        folder.name
        for folder in (checkpoint_folder(save, iteration) for iteration in list_iterations(save))
        if not (folder / RECORD_FILE).is_file()
    ]
    foreign += ["release"] if (save / "release").is_dir() else []
    if foreign or (save.exists() and not save.is_dir()):
        inside = f"holds checkpoints of a run ({', '.join(foreign)})" if foreign else "is a file"
        raise ValueError(f"{save} {inside}; give another folder for the converted checkpoint")


def _stored_dtypes(shape: ModelShape, reader: HFReader) -> dict[str, torch.dtype]:
    """By key the narrowest type that holds all sources of a stored tensor exactly."""
    dtypes: dict[str, torch.dtype] = {}
    for placed in place_parameters(shape, WHOLE):
        key = placed.blocks[0].key
        for name in placed.parameter.entry.hf_names:
            dtype = reader.dtype(name)
            assert dtype is not None
            dtypes[key] = torch.promote_types(dtypes.get(key, dtype), dtype)
    return dtypes


def _lazy_blocks(placed: Placed, reader: HFReader, dtype: torch.dtype, progress: Progress) -> Iterator[Block]:
    """The blocks of a parameter, cut by rows to at most MAX_BLOCK_BYTES, read when they are asked for."""
    width = placed.parameter.shape[1:]
    step = max(1, MAX_BLOCK_BYTES // (math.prod(width) * dtype.itemsize))
    for stored in placed.blocks:
        for first in range(stored.rows.start, stored.rows.stop, step):
            rows = slice(first, min(first + step, stored.rows.stop))
            offset = list(stored.offset)
            offset[stored.num_stacked] += first - stored.rows.start
            shape = (*(1,) * stored.num_stacked, rows.stop - rows.start, *width)
            make = partial(_assemble, placed.parameter, reader, rows=rows, shape=shape, dtype=dtype, progress=progress)
            yield Block(stored.key, stored.global_shape, tuple(offset), shape, dtype, make)


def _assemble(
    parameter: LocalParameter,
    reader: HFReader,
    *,
    rows: slice,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    progress: Progress,
) -> Tensor:
    progress.advance()
    local_shape = (rows.stop - rows.start, *parameter.shape[1:])
    pieces = take_rows(parameter.row_slices, rows)
    return assemble_local(parameter.entry, pieces, parameter.columns, reader.read, local_shape, dtype).view(shape)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
