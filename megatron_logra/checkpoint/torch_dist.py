"""Reads and writes blocks of tensors in the format of Megatron-Core's distributed checkpoints (`torch_dist`).

    FOLDER/.metadata         which tensors there are, of which blocks, in which files    torch.distributed.checkpoint
    FOLDER/__{rank}_0.distcp the blocks that a rank wrote
    FOLDER/metadata.json     the format's name and version
    FOLDER/integrity.json    SHA-256 of every file (`checkpoint.integrity`)

`megatron.core.dist_checkpointing` reads such a folder, and what it writes is read here. Both stand on
torch.distributed.checkpoint; this module uses it directly, because blocks may then have any extent (each reader asks
for its own), a failed write is an error on all ranks, and no helper processes are started.

Blocks are read and written one by one, so a writer may produce each only when its turn comes.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FORMAT_FILE = "metadata.json"
METADATA_FILE = ".metadata"
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_KEY = "common_state"


@dataclass(frozen=True)
class Block:
    """A box of a stored tensor.

    Attributes:
        key: name of the stored tensor.
        global_shape: shape of the stored tensor.
        offset: place of the box's first entry.
        shape: extent of the box.
        dtype: of its entries.
        data: the entries, `shape` on any device; or a function that makes them when they are to be written.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: Tensor | Callable[[], Tensor]

    def tensor(self) -> Tensor:
        """The entries."""
        return self.data if isinstance(self.data, Tensor) else self.data()


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def save_blocks(
    folder: Path,
    blocks: Iterable[Block],
    *,
    common: Mapping[str, Any],
    module_states: Mapping[str, tuple[int, ...]] | None = None,
    group: ProcessGroup | None,
) -> None:
    """Write `blocks` of all ranks into `folder`, which exists. Collective over `group`; None: one process alone.

    The folder is a checkpoint once `write_format` has named the format.

    Args:
        common: what Megatron finds beside the tensors (`iteration` and the like), equal on all ranks.
        module_states: for Megatron's modules with an extra state, the key and number along each stacked axis: an empty
            state is written for each, since Megatron asks for them.

    Raises:
        RuntimeError: on all ranks, when a rank could not write, with its message.
    """
    contents: dict[str, Any] = _group_by_key(blocks)
    is_first = group is None or torch.distributed.get_rank(group) == 0
    if is_first:
        # Non-tensors are lists of one, as in Megatron.
        contents[_object_key(_COMMON_KEY, (0,), (1,))] = [dict(common)]
        for key, counts in (module_states or {}).items():
            for position in torch.cartesian_prod(*[torch.arange(count) for count in counts]).view(-1, len(counts)):
                contents[_object_key(key, tuple(position.tolist()), counts)] = [None]
    try:
        with _without_advice():
            dcp.save(
                contents,
                storage_writer=_Writer(folder),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )
    except dcp.CheckpointException as error:
        raise RuntimeError(f"writing {folder} failed: {_reason_of(error)}") from error


def write_format(folder: Path) -> None:
    """Say that `folder` is a checkpoint of this format. Local."""
    (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")


def load_blocks(folder: Path, blocks: Sequence[Block], *, padded: frozenset[str] = frozenset()) -> None:
    """Fill the tensors of `blocks` in place from `folder`, see `StoredFolder.load`."""
    StoredFolder(folder).load(blocks, padded=padded)


def read_stored(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in a checkpoint by key. Raises ValueError when there is no such checkpoint, or a foreign one."""
    return StoredFolder(folder).tensors


class StoredFolder:
    """A checkpoint on disk, whose index is read once. No communication.

    Attributes:
        tensors: the stored tensors by key.

    Raises:
        ValueError: the folder is no such checkpoint, is of another format, or its index is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            backend = json.loads((folder / FORMAT_FILE).read_text(encoding="utf-8")).get("sharded_backend")
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{folder} is not a torch_dist checkpoint: {FORMAT_FILE} cannot be read: {error}"
            ) from error
        if backend != _FORMAT["sharded_backend"]:
            raise ValueError(f"{folder} is a checkpoint of format {backend!r}; only torch_dist is read here")
        self._reader = _Reader(folder)
        self.tensors = {
            key: StoredTensor(tuple(value.size), value.properties.dtype)
            for key, value in self._index.items()
            if isinstance(value, TensorStorageMetadata)
        }

    def load(self, blocks: Sequence[Block], *, padded: frozenset[str] = frozenset()) -> None:
        """Fill the tensors of `blocks` in place.

        Tensors whose key is in `padded` may have another first axis on disk: what is missing there becomes 0, what is
        more is left out.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype, or parts of it were never written; all such
                tensors are listed and nothing was changed. Damaged files raise it too, after a part was read.
        """
        problems = [
            f"{key} {problem}"
            for key, first in {block.key: block for block in blocks}.items()
            if (problem := self._problem(first, key in padded))
        ]
        if problems:
            raise ValueError(f"checkpoint {self.folder} does not fit this model: " + "; ".join(sorted(problems)))
        wanted = [_clip(block, self.tensors[block.key].shape) if block.key in padded else block for block in blocks]
        try:
            with _without_advice():
                dcp.load(
                    _group_by_key(block for block in wanted if 0 not in block.shape),
                    storage_reader=self._reader,
                    planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
        except (dcp.CheckpointException, OSError, RuntimeError, EOFError) as error:
            raise ValueError(f"checkpoint {self.folder} is damaged: {_reason_of(error)}") from error

    @property
    def _index(self) -> Mapping[str, Any]:
        return self._reader.read_metadata().state_dict_metadata

    def _problem(self, block: Block, is_padded: bool) -> str:
        """What is wrong with the stored tensor of a block; empty if nothing."""
        found = self.tensors.get(block.key)
        if found is None:
            return "is missing"
        if found.dtype != block.dtype:
            return f"is {found.dtype}, needed is {block.dtype}"
        if found.shape[is_padded:] != block.global_shape[is_padded:]:
            return f"has shape {list(found.shape)}, needed is {list(block.global_shape)}"
        written = sum(math.prod(chunk.sizes) for chunk in self._index[block.key].chunks)
        if written != math.prod(found.shape):
            return f"was written in part only: {written} of {math.prod(found.shape)} entries"
        return ""


class _BlockSet(Tensor):
    """The blocks of one stored tensor on this rank, in the protocol that torch.distributed.checkpoint asks for."""

    _blocks: list[Block]

    @staticmethod
    def __new__(cls, blocks: list[Block]) -> _BlockSet:
        shape = torch.Size(blocks[0].global_shape)
        made: _BlockSet = Tensor._make_wrapper_subclass(cls, shape, dtype=blocks[0].dtype)  # type: ignore[attr-defined]
        made._blocks = blocks
        return made

    def __create_write_items__(self, fqn: str, _object: Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(block.offset), index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.shape)),
                    properties=TensorProperties(dtype=block.dtype),
                    size=torch.Size(block.global_shape),
                ),
            )
            for index, block in enumerate(self._blocks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.shape)) for block in self._blocks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        numbered = self._blocks if index.index is None else self._blocks[index.index : index.index + 1]
        return next(block for block in (*numbered, *self._blocks) if block.offset == tuple(index.offset or ())).tensor()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{function} asks for the entries of a tensor that only exists in blocks")


class _Writer(dcp.FileSystemWriter):
    """Writes the blocks of a rank one after the other; the library's own holds the last block of every tensor."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        with (Path(self.path) / name).open("wb") as stream:
            results = [_write_item(stream, name, item, planner) for item in plan.items]
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _write_item(stream: BinaryIO, file_name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    first, data = stream.tell(), planner.resolve_data(item)
    if isinstance(data, Tensor):
        tensor = data.detach().cpu()
        # A view would be saved with all of its storage.
        torch.save(tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor, stream)
    else:
        stream.write(data.getbuffer())
    length = stream.tell() - first
    return WriteResult(item.index, length, _StorageInfo(file_name, first, length))


class _Reader(dcp.FileSystemReader):
    """Reads the index of a checkpoint once, and without running what a forged one could name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _read_index(folder / METADATA_FILE)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _read_index(path: Path) -> Metadata:
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # unpickling damaged bytes raises nearly anything
        raise ValueError(f"checkpoint index {path} cannot be read: {error}") from error
    if not isinstance(index, Metadata):
        raise ValueError(f"checkpoint index {path} holds a {type(index).__name__}, not checkpoint metadata")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles checkpoint metadata and nothing else: its own classes, torch's sizes, dtypes and layouts, paths."""

    # Megatron also puts the plans of all ranks there.
    _MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        found = None
        if (module, name) in self._NAMES:
            found = super().find_class(module, name)
        elif module in self._MODULES and "." not in name:
            candidate = super().find_class(module, name)
            found = candidate if isinstance(candidate, type) and candidate.__module__ == module else None
        elif module == "torch":
            candidate = getattr(torch, name, None)
            found = candidate if isinstance(candidate, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint index needs")
        return found


def _group_by_key(blocks: Iterable[Block]) -> dict[str, Any]:
    by_key: dict[str, list[Block]] = {}
    for block in blocks:
        by_key.setdefault(block.key, []).append(block)
    return {key: _BlockSet(held) for key, held in by_key.items()}


def _clip(block: Block, stored_shape: tuple[int, ...]) -> Block:
    """`block` of a tensor whose first axis is `stored_shape[0]` long on disk; what lies beyond is set to 0 here."""
    tensor = block.tensor()
    held = max(0, min(block.shape[0], stored_shape[0] - block.offset[0]))
    tensor[held:] = 0
    return Block(
        key=block.key,
        global_shape=stored_shape,
        offset=block.offset,
        shape=(held, *block.shape[1:]),
        dtype=block.dtype,
        data=tensor[:held],
    )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Without the library's warning that one process acts alone, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _object_key(key: str, position: tuple[int, ...], counts: tuple[int, ...]) -> str:
    """Megatron's key of one part of an object that is spread along axes."""
    return f"{key}/shard_{'.'.join(map(str, position))}_{'.'.join(map(str, counts))}"


def _reason_of(error: BaseException) -> str:
    """What went wrong, from the failures by rank that torch.distributed.checkpoint collects."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error)
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(failures.items()))
