"""Reads and writes Hugging Face folders of safetensors, tensor by tensor.

`HFReader` knows names, shapes and types from the file headers and reads only the rows and columns asked for.
`HFWriter` streams tensors to disk as they come (no shard is ever held in memory) into a hidden folder beside
the target, which takes the target's place in one step at the end.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .atomic import replace_folder, restore_interrupted, sync_folder
from .config import ModelShape
from .shard_file import DTYPE_NAMES, ShardFile
from .table import full_table

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
)
"""Name patterns of the files that belong to a checkpoint beside its weights."""
_SIDE_FOLDERS = ("additional_chat_templates",)

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a file header says of one tensor; `dtype` is None for a type this package does not read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    file: Path


class HFReader:
    """A Hugging Face folder of one `model.safetensors` or of shards with an index.

    Opening it reads every file's header.

    Raises:
        ValueError: missing folder, no safetensors weights, a missing or damaged shard, an index that names a tensor its
            file does not hold.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        weight_map = _find_weight_files(self.folder)
        self._files: dict[Path, Any] = {path: _open_file(path) for path in weight_map}
        self._infos: dict[str, TensorInfo] = {}
        lost = []
        for path, indexed_names in weight_map.items():
            held = set(self._files[path].keys())
            lost += [f"{name} (in {path.name})" for name in indexed_names if name not in held]
            for name in held:
                view = self._files[path].get_slice(name)
                self._infos[name] = TensorInfo(tuple(view.get_shape()), _DTYPES.get(view.get_dtype()), path)
        if lost:
            raise ValueError(f"{self.folder / INDEX_FILE} names tensors its files lack: {', '.join(lost)}")

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Shape, type and file of a tensor, without reading it."""
        if name not in self._infos:
            raise ValueError(f"{self.folder} has no tensor {name}{_suggest(name, self._infos)}")
        return self._infos[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype | None:
        """Type of a tensor, without reading it; None if it is none that torch computes with here."""
        return self.info(name).dtype

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """That block of a tensor on the CPU, in the type it has on disk. `columns` must be all for a vector."""
        info = self.info(name)
        if info.dtype is None:
            raise ValueError(f"{info.file}: {name} is of a type that is not supported (quantised weights?)")
        if not info.shape:
            return self._files[info.file].get_tensor(name)
        view = self._files[info.file].get_slice(name)
        block: Tensor = view[rows] if len(info.shape) == 1 else view[rows, columns]
        return block


def _find_weight_files(folder: Path) -> dict[Path, list[str]]:
    """Weight files of a folder with the names its index expects in each (none for a single file)."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a Hugging Face model folder")
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: []}
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        others = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.safetensors")
        )
        found = f"; found only {', '.join(others)}" if others else ""
        raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}")
    try:
        weight_map: Mapping[str, str] = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{index_path} is not a valid index: {error!r}") from error
    files: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        files.setdefault(folder / file_name, []).append(name)
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing)}")
    return files


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut off: {error}; fetch it again") from error


def _suggest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
    return f" (did you mean {close[0]}?)" if close else ""


def validate_checkpoint(reader: HFReader, shape: ModelShape) -> None:
    """Check that a folder holds exactly the tensors the model needs, with the sizes config.json gives.

    Names that are not needed are reported as one warning. With tied embeddings a stored head is not needed;
    if it differs from the embedding, a warning says that the embedding is used.

    Raises:
        ValueError: every missing name, wrong shape and unusable type, in one message.
    """
    expected = {name: size for entry in full_table(shape) for name, size in entry.hf_shapes.items()}
    surplus = [name for name in reader.names if name not in expected]
    problems = []
    for name, size in expected.items():
        if name not in reader:
            problems.append(f"missing tensor {name}{_suggest(name, surplus)}")
            continue
        info = reader.info(name)
        if info.shape != size:
            problems.append(f"{name} has shape {info.shape} but config.json asks for {size}")
        if info.dtype is None or not info.dtype.is_floating_point:
            problems.append(f"{name} in {info.file.name} is not of a floating-point type (quantised?)")
    if problems:
        raise ValueError(f"{reader.folder} does not fit its config.json:\n  " + "\n  ".join(problems))
    _warn_of_surplus(reader, shape, surplus)


def _warn_of_surplus(reader: HFReader, shape: ModelShape, surplus: list[str]) -> None:
    embedding, _, head = (rule.sources[0].name for rule in shape.table.outer_rules)
    if shape.tie_embeddings and head in surplus:
        surplus = [name for name in surplus if name != head]
        if not _equal_tensors(reader, embedding, head):
            warnings.warn(
                f"{reader.folder}: embeddings are tied but {head} differs from {embedding}; {embedding} is used",
                stacklevel=3,
            )
    # Old Llama folders store the rotary frequencies, which follow from config.json.
    surplus = [name for name in surplus if not name.endswith("rotary_emb.inv_freq")]
    if surplus:
        shown = ", ".join(surplus[:10]) + (f" and {len(surplus) - 10} more" if len(surplus) > 10 else "")
        warnings.warn(f"{reader.folder} holds tensors the model does not use: {shown}", stacklevel=3)


def _equal_tensors(reader: HFReader, first: str, second: str, rows_at_once: int = 4096) -> bool:
    if reader.shape(first) != reader.shape(second):
        return False
    blocks = (slice(row, row + rows_at_once) for row in range(0, reader.shape(first)[0], rows_at_once))
    return all(torch.equal(reader.read(first, rows), reader.read(second, rows)) for rows in blocks)


class HFWriter:
    """Writes a Hugging Face folder tensor by tensor; it appears at its place whole, at `close`, or not at all.

    Use as a context manager: an exception inside discards what was written and leaves an older folder as it
    was.

    Args:
        folder: where the folder shall be; an older checkpoint there is replaced, anything else is refused.
        max_shard_bytes: tensor bytes after which a new file is begun; one file alone is named `model.safetensors`.
        expected_names: if given, `close` refuses a checkpoint that lacks one of them, and `write` any other name.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_shard_bytes: float = 5e9,
        expected_names: Collection[str] | None = None,
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        self._max_shard_bytes = max_shard_bytes
        self._expected_names = None if expected_names is None else frozenset(expected_names)
        restore_interrupted(self.folder)
        _refuse_foreign_folder(self.folder)
        self._partial = self.folder.with_name(f".{self.folder.name}.partial")
        if self._partial.exists():
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)
        self._shards: list[ShardFile] = []

    def write(self, name: str, tensor: Tensor) -> None:
        """Append one tensor in its own type; the data is on its way to disk when this returns."""
        if any(name in shard.entries for shard in self._shards):
            raise ValueError(f"tensor {name} is written twice")
        if self._expected_names is not None and name not in self._expected_names:
            raise ValueError(f"tensor {name} does not belong to this checkpoint")
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"tensor {name} has type {tensor.dtype}, which cannot be written")
        if not self._shards or not self._shards[-1].fits(name, tensor, self._max_shard_bytes):
            if self._shards:
                self._shards[-1].close()
            number = len(self._shards) + 1
            self._shards.append(ShardFile(self._partial / f"shard-{number:05d}.safetensors"))
        self._shards[-1].append(name, tensor)

    def copy_side_files(self, source: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Copy config, generation config, tokenizer and chat template from another folder.

        `dtype`, if given, is what config.json will say of the weights' type.
        """
        source = Path(os.path.realpath(source))
        if source == self.folder:
            raise ValueError(f"{source} would be replaced by its own successor; save to another folder")
        for path in sorted(source.iterdir()):
            if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in SIDE_FILES):
                shutil.copyfile(path, self._partial / path.name)
            elif path.is_dir() and path.name in _SIDE_FOLDERS:
                shutil.copytree(path, self._partial / path.name, dirs_exist_ok=True)
        if dtype is not None:
            _set_config_dtype(self._partial / "config.json", dtype)

    def close(self) -> None:
        """Finish the files, write the index and put the folder in its place."""
        if not self._shards:
            raise ValueError(f"no tensor was written for {self.folder}")
        missing = sorted((self._expected_names or frozenset()) - {n for s in self._shards for n in s.entries})
        if missing:
            raise ValueError(f"{self.folder} would lack tensors: {', '.join(missing)}")
        self._shards[-1].close()
        self._name_shards()
        for path in self._partial.iterdir():
            if path.suffix == ".json":
                _sync_file(path)
        sync_folder(self._partial)
        replace_folder(self._partial, self.folder)

    def abort(self) -> None:
        """Discard everything written so far."""
        for shard in self._shards:
            shard.discard()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _name_shards(self) -> None:
        if len(self._shards) == 1:
            self._shards[0].path.rename(self._partial / SINGLE_FILE)
            return
        weight_map = {}
        for number, shard in enumerate(self._shards, start=1):
            file_name = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            shard.path.rename(self._partial / file_name)
            weight_map.update(dict.fromkeys(shard.entries, file_name))
        index = {
            "metadata": {
                "total_size": sum(shard.data_bytes for shard in self._shards),
                "total_parameters": sum(shard.num_elements for shard in self._shards),
            },
            "weight_map": dict(sorted(weight_map.items())),
        }
        (self._partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


def _refuse_foreign_folder(folder: Path) -> None:
    """An existing folder is replaced as a whole, so it must be a checkpoint and nothing else."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give another place for the checkpoint")
    names = {path.name for path in folder.iterdir()}
    folders = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in _SIDE_FOLDERS)
    if names and (folders or not names & {SINGLE_FILE, INDEX_FILE}):
        inside = ", ".join(folders or sorted(names)[:5])
        raise ValueError(f"{folder} is not a plain Hugging Face checkpoint (it holds {inside}); not replaced")


def _set_config_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
