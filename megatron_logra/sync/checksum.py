"""One checksum for a set of named weights, whatever the order in which they are visited.

    checksum = blake2b of the sorted lines "name dtype shape blake2b(bytes)"

A trainer that streams its export and an engine that walks its modules get the same string exactly when names,
dtypes, shapes and bits agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements' bytes in row-major order; copied only if on a device or not contiguous."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def weights_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Checksum of (name, tensor) pairs; ValueError if a name comes twice."""
    lines: dict[str, str] = {}
    for name, tensor in tensors:
        if name in lines:
            raise ValueError(f"{name} occurs twice among the weights to checksum")
        digest = hashlib.blake2b(tensor_bytes(tensor), digest_size=16).hexdigest()
        lines[name] = f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}"
    text = "\n".join(lines[name] for name in sorted(lines))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
