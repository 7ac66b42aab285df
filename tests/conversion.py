"""What the tests of conversion share: models in several types and files, comparisons to the last bit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from torch import Tensor

from megatron_logra.checkpoint.torch_dist import Block, load_blocks, read_stored
from megatron_logra.hf.safetensors_io import HFReader, HFWriter
from tests.tiny_models import save_tiny_model

TYPES = (torch.bfloat16, torch.float32, torch.float16)


def save_model(folder: Path, family: str, kind: str = "fp32", *, sharded: bool = False, **overrides: object) -> None:
    """A tiny model as a Hugging Face folder with weights of one type, or of three in turn."""
    plain = folder.with_name(f".{folder.name}.fp32")
    save_tiny_model(plain, family, **overrides)
    reader = HFReader(plain)
    with HFWriter(folder, max_shard_bytes=40_000 if sharded else 5e9) as writer:
        writer.copy_side_files(plain, dtype=torch.bfloat16 if kind == "bf16" else None)
        for number, name in enumerate(reader.names):
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": TYPES[number % 3]}[kind]
            writer.write(name, reader.read(name).to(dtype))
    assert (folder / "model.safetensors").exists() != sharded
    shutil.rmtree(plain)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_folder(first: Path, second: Path) -> None:
    """The same tensors, to the last bit and in the same types, and the same config."""
    one, other = HFReader(first), HFReader(second)
    assert one.names == other.names
    for name in one.names:
        assert one.dtype(name) == other.dtype(name), name
        assert torch.equal(bits(one.read(name)), bits(other.read(name))), name
    assert json.loads((first / "config.json").read_text()) == json.loads((second / "config.json").read_text())


def read_whole(place: Path, key: str) -> Tensor:
    found = read_stored(place)[key]
    whole = torch.full(found.shape, math.nan, dtype=found.dtype)
    load_blocks(place, [Block(key, found.shape, (0,) * len(found.shape), found.shape, found.dtype, whole)])
    return whole


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
