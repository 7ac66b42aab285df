"""Reads the Hugging Face tensors of a model out of a Megatron checkpoint, one parameter at a time.

    hf[name][hf_rows]  =  stored[key][rows]      rows by the family's table, for one tensor-parallel rank

Checkpoints of this package have a list of what belongs to them (`checkpoint.integrity`); every file is compared with it
before anything is read.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_logra.checkpoint.folders import LATEST_FILE, checkpoint_folder, list_iterations
from megatron_logra.checkpoint.integrity import MANIFEST_FILE, verify_share
from megatron_logra.checkpoint.placement import WHOLE, Placed, place_parameters
from megatron_logra.checkpoint.torch_dist import FORMAT_FILE, METADATA_FILE, Block, StoredFolder
from megatron_logra.hf.assemble import merge_shards
from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.stored import of_layer
from megatron_logra.optim.split_master import join_split

RECORD_FILE = "huggingface.json"
_MODEL_PARTS = ("embedding.", "decoder.", "output_layer.")
_MASTER, _REMAINDER = "optimizer.master.", "optimizer.remainder."


class MegatronCheckpoint:
    """A Megatron checkpoint, checked file by file and name by name against the model it should hold.

    Args:
        load: a checkpoint, or a folder of checkpoints, of which the newest is taken.
        dtype, master: see `convert_to_hf`.

    Attributes:
        folder: of the checkpoint.
        dtypes: the type of each Hugging Face tensor, by name.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it does not hold this model.
    """

    def __init__(
        self, load: Path, shape: ModelShape, *, dtype: torch.dtype | None = None, master: bool = False
    ) -> None:
        self.folder = find_checkpoint(load)
        self._shape, self._master = shape, master
        if (self.folder / MANIFEST_FILE).is_file():
            verify_share(self.folder, 0, 1)
        else:
            warnings.warn(
                f"{self.folder} has no {MANIFEST_FILE} (Megatron writes none by default): that its files are whole "
                "cannot be checked",
                stacklevel=2,
            )
        self._stored = StoredFolder(self.folder)
        self._placed = list(place_parameters(shape, WHOLE))
        self._check_names()
        recorded = _read_record(self.folder)
        self.dtypes = {
            name: dtype or recorded.get(name) or self._stored.tensors[placed.blocks[0].key].dtype
            for placed in self._placed
            for name in placed.parameter.entry.hf_names
        }

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Every Hugging Face tensor by name, on the CPU; they may be views of memory that is used once."""
        for placed in self._placed:
            yield from self._read_one(placed)

    def name_map(self) -> Iterator[str]:
        """A line for each Hugging Face tensor: where it stands in the checkpoint."""
        for placed in self._placed:
            for name in placed.parameter.entry.hf_names:
                yield f"{name}  <-  {placed.stored_name}"

    def _read_one(self, placed: Placed) -> Iterator[tuple[str, Tensor]]:
        entry = placed.parameter.entry
        whole = merge_shards(entry, self._shape, [self._read_parameter(placed)], self._shape.vocab_size)
        for name in list(whole):
            yield name, whole.pop(name).to(self.dtypes[name])

    def _read_parameter(self, placed: Placed) -> Tensor:
        key = of_layer(placed.blocks[0]).key
        if self._master and _MASTER + key in self._stored.tensors:
            return self._read_stored(placed, _MASTER)
        weight = self._read_stored(placed, "")
        if self._master and _REMAINDER + key in self._stored.tensors:
            return _join_by_rows(weight, self._read_stored(placed, _REMAINDER))
        return weight

    def _read_stored(self, placed: Placed, prefix: str) -> Tensor:
        held = [of_layer(stored) for stored in placed.blocks] if prefix else placed.blocks
        dtype = self._stored.tensors[prefix + held[0].key].dtype
        local = torch.empty(placed.parameter.shape, dtype=dtype)
        blocks = [
            Block(
                key=prefix + stored.key,
                global_shape=stored.global_shape,
                offset=stored.offset,
                shape=(*(1,) * stored.num_stacked, *local[stored.rows].shape),
                dtype=dtype,
                data=local[stored.rows].view(*(1,) * stored.num_stacked, *local[stored.rows].shape),
            )
            for stored in held
        ]
        padded = frozenset(prefix + stored.key for stored in held if stored.is_padded)
        self._stored.load(blocks, padded=padded)
        return local

    def _check_names(self) -> None:
        tensors = self._stored.tensors
        wanted = {block.key: block for placed in self._placed for block in placed.blocks}
        problems = []
        for key, block in wanted.items():
            found, size = tensors.get(key), block.global_shape
            if found is None:
                problems.append(f"missing tensor {key}")
            elif found.shape[block.is_padded :] != size[block.is_padded :] or found.shape[0] < size[0]:
                needed = f"{list(size)}{' or more rows' if block.is_padded else ''}"
                problems.append(f"{key} has shape {list(found.shape)} but config.json asks for {needed}")
            elif not found.dtype.is_floating_point or found.dtype.itemsize == 1:
                problems.append(f"{key} is {found.dtype}, which is not supported (quantised?)")
        problems += [
            f"{key} is no part of the model" for key in tensors if key.startswith(_MODEL_PARTS) and key not in wanted
        ]
        if problems:
            raise ValueError(
                f"{self.folder} does not fit the config.json of the reference:\n  " + "\n  ".join(problems)
            )
        if self._master and not any(key.startswith((_MASTER, _REMAINDER)) for key in tensors):
            raise ValueError(f"{self.folder} holds no fp32 masters ({_MASTER}* or {_REMAINDER}*); export its weights")


def find_checkpoint(load: Path) -> Path:
    """The checkpoint that `load` is, or the newest one in it. Raises ValueError when there is none."""
    if (load / FORMAT_FILE).is_file() or (load / METADATA_FILE).is_file():
        return load
    pointer = load / LATEST_FILE
    if not pointer.is_file():
        raise ValueError(
            f"{load} holds no Megatron checkpoint: it has neither {LATEST_FILE} nor the {FORMAT_FILE} of a checkpoint"
        )
    text = pointer.read_text(encoding="utf-8").strip()
    folder = load / text if text == "release" else checkpoint_folder(load, int(text)) if text.isdecimal() else None
    if folder is None or not folder.is_dir():
        found = ", ".join(checkpoint_folder(load, iteration).name for iteration in list_iterations(load)) or "none"
        raise ValueError(f"{pointer} names checkpoint {text!r}, which is not there; found: {found}")
    return folder


def _read_record(folder: Path) -> Mapping[str, torch.dtype]:
    path = folder / RECORD_FILE
    if not path.is_file():
        return {}
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["dtypes"]
        dtypes = {name: getattr(torch, text) for name, text in names.items()}
        if not all(isinstance(dtype, torch.dtype) for dtype in dtypes.values()):
            raise TypeError(f"{sorted(set(names.values()))} are not all types")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return dtypes


def _join_by_rows(weight: Tensor, remainder: Tensor, rows_at_once: int = 1024) -> Tensor:
    """The fp32 values of a split master, without temporaries of its size."""
    whole = torch.empty(weight.shape, dtype=torch.float32)
    for row in range(0, len(weight), rows_at_once):
        rows = slice(row, row + rows_at_once)
        whole[rows] = join_split(weight[rows], remainder[rows])
    return whole
