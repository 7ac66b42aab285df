"""Writes one safetensors file tensor by tensor, without holding it in memory.

File format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}` that may
end in spaces, then the tensors without gaps. The header is only known at the end, so room for it is kept free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

# Room for the header of a file under construction: about 2,000 tensors; a shard that fills it is closed.
_HEADER_BYTES = 256 * 1024
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardFile:
    """One safetensors file under construction: the header's room is kept free and filled in at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, object]] = {}
        self.data_bytes = 0
        self.num_elements = 0
        self._header_bytes = len(_encode_header({}))
        self._file = path.open("wb")
        self._file.seek(8 + _HEADER_BYTES)

    def fits(self, name: str, tensor: Tensor, max_bytes: float) -> bool:
        """Whether the tensor may go into this file: size, room in the header, and alignment to its element size."""
        header = self._header_bytes + len(_encode_header({name: self._entry(tensor)}))
        return not self.entries or (
            self.data_bytes + tensor.nbytes <= max_bytes
            and header <= _HEADER_BYTES
            and self.data_bytes % tensor.element_size() == 0
        )

    def append(self, name: str, tensor: Tensor) -> None:
        entry = self._entry(tensor)
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.write(raw.numpy().data)
        self.entries[name] = entry
        self.data_bytes += tensor.nbytes
        self.num_elements += tensor.numel()
        self._header_bytes += len(_encode_header({name: entry}))

    def close(self) -> None:
        header = _encode_header(self.entries).ljust(_HEADER_BYTES)
        self._file.seek(0)
        self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        self._file.close()

    def _entry(self, tensor: Tensor) -> dict[str, object]:
        end = self.data_bytes + tensor.nbytes
        return {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.data_bytes, end],
        }


def _encode_header(entries: Mapping[str, Mapping[str, object]]) -> bytes:
    return json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
