"""The factor packet: everything a receiver needs to make policy `version_after` out of policy `version_before`.

    W <- keep W - U A   U_OR one factor a Hugging Face weight, A_RI redrawn from (base_seed, update, group, rank, width)

A packet is complete or it is refused. On the wire it is one safetensors file: the factors by Hugging Face name, and
in its metadata the header as JSON and a digest of header, names and factors, so that a damaged or relabelled packet
is recognised. No pickle.

Shapes: factor `[O, R]` with the rows of the Hugging Face weight; `width` of a group is its number of input columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from megatron_logra.sync.checksum import tensor_bytes

WIRE_FORMAT = "megatron_logra.factors.1"
FACTOR_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class PacketRefused(ValueError):
    """A receiver refused a packet and changed nothing; the sender should synchronise in full.

    `reason` is one word for logs and tests: version, header, names, groups, shapes, values or corrupt.
    """

    def __init__(self, message: str, reason: str = "header") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class FactorEntry:
    """The factor of one Hugging Face weight: bf16 `[O, R]`, or float32/float64 in references."""

    name: str
    group: str
    factor_OR: Tensor

    @property
    def num_bytes(self) -> int:
        """Size of the factor."""
        return self.factor_OR.numel() * self.factor_OR.element_size()


@dataclass(frozen=True)
class PacketHeader:
    """What all factors of an update share.

    Attributes:
        base_seed, update, rank, distribution: with a group's name and width they name its projection.
        widths: input columns of every group that occurs in the packet.
        keep: what the weights are multiplied by first; below 1 with weight decay.
        version_before: policy version the packet applies to.
        version_after: policy version it makes.
    """

    base_seed: int
    update: int
    rank: int
    distribution: str
    widths: Mapping[str, int]
    version_before: int
    version_after: int
    keep: float = 1.0


@dataclass(frozen=True)
class FactorPacket(PacketHeader):
    """The header and the factors, in any order."""

    entries: tuple[FactorEntry, ...] = ()

    @classmethod
    def from_header(cls, header: PacketHeader, entries: Iterable[FactorEntry]) -> Self:
        """A packet of these entries; `widths` is cut to the groups that occur."""
        entries = tuple(entries)
        used = {entry.group for entry in entries}
        values = {field.name: getattr(header, field.name) for field in fields(PacketHeader)}
        values["widths"] = {group: width for group, width in header.widths.items() if group in used}
        return cls(**values, entries=entries)

    @property
    def num_bytes(self) -> int:
        """Size of all factors (`sync/factor_bytes`)."""
        return sum(entry.num_bytes for entry in self.entries)

    def split(self, max_bytes: int) -> Iterator[FactorPacket]:
        """Packets of at most `max_bytes` of factors each (a larger single factor travels alone), in order.

        Each names the versions of the whole; a receiver puts them together with `join_packets` before it applies.
        """
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be >= 1, got {max_bytes}")
        part: list[FactorEntry] = []
        for entry in self.entries:
            if part and sum(one.num_bytes for one in part) + entry.num_bytes > max_bytes:
                yield FactorPacket.from_header(self, part)
                part = []
            part.append(entry)
        yield FactorPacket.from_header(self, part)

    def to_bytes(self) -> bytes:
        """The packet as one safetensors file."""
        names = [entry.name for entry in self.entries]
        if len(set(names)) < len(names):
            raise ValueError(f"a packet cannot hold a name twice: {_repeated(names)}")
        header = _encode_header(self)
        metadata = {"format": WIRE_FORMAT, "header": header, "digest": _digest(header, self.entries)}
        tensors = {entry.name: entry.factor_OR.detach().contiguous().cpu() for entry in self.entries}
        return save_safetensors(tensors, metadata=metadata)

    @staticmethod
    def from_bytes(data: bytes) -> FactorPacket:
        """Reads what `to_bytes` wrote.

        Raises:
            PacketRefused: truncated, damaged, relabelled, or not a packet at all (reason "corrupt").
        """
        try:
            tensors = load_safetensors(data)
            metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise PacketRefused(f"not a safetensors file of {len(data)} bytes: {error}", "corrupt") from error
        if metadata.get("format") != WIRE_FORMAT:
            raise PacketRefused(
                f"the packet's format is {metadata.get('format')!r}, this receiver reads {WIRE_FORMAT!r}",
                "corrupt",
            )
        header, labels = _decode_header(metadata.get("header", ""))
        if sorted(name for name, _ in labels) != sorted(tensors):
            raise PacketRefused("the packet's header lists other names than its factors have", "corrupt")
        packet = replace(header, entries=tuple(FactorEntry(name, group, tensors[name]) for name, group in labels))
        if _digest(metadata["header"], packet.entries) != metadata.get("digest"):
            raise PacketRefused("the packet's digest does not match its contents", "corrupt")
        return packet


def join_packets(parts: Iterable[FactorPacket]) -> FactorPacket:
    """One packet of all entries of several parts of the same update.

    Raises:
        PacketRefused: no part, parts of different updates or versions, or different widths of one group. What
            is missing or there twice is for `sync.apply.check_packet` to find.
    """
    parts = list(parts)
    if not parts:
        raise PacketRefused("no part of a packet arrived", "names")
    widths: dict[str, int] = {}
    for part in parts:
        for field in fields(PacketHeader):
            ours, theirs = getattr(parts[0], field.name), getattr(part, field.name)
            if field.name != "widths" and ours != theirs:
                raise PacketRefused(f"parts of different packets: {field.name} is {ours} in one, {theirs} in another")
        for group, width in part.widths.items():
            if widths.setdefault(group, width) != width:
                raise PacketRefused(f"parts of different packets: {group} is {widths[group]} and {width} columns wide")
    return replace(parts[0], widths=widths, entries=tuple(entry for part in parts for entry in part.entries))


def _repeated(names: list[str]) -> str:
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _encode_header(packet: FactorPacket) -> str:
    header = {field.name: getattr(packet, field.name) for field in fields(PacketHeader)}
    header["widths"] = dict(packet.widths)
    header["entries"] = [[entry.name, entry.group] for entry in packet.entries]
    return json.dumps(header, sort_keys=True)


def _decode_header(text: str) -> tuple[FactorPacket, list[tuple[str, str]]]:
    """The packet without its entries, and their (name, group) in order; PacketRefused if anything is amiss."""
    try:
        values: dict[str, Any] = json.loads(text)
        labels = [(str(name), str(group)) for name, group in values.pop("entries")]
        packet = FactorPacket(**values)
        numbers = [packet.base_seed, packet.update, packet.rank, packet.version_before, packet.version_after]
        if any(type(number) is not int for number in [*numbers, *packet.widths.values()]):
            raise TypeError("seed, update, rank, versions and widths must be integers")
        if not isinstance(packet.distribution, str):
            raise TypeError("distribution must be a string")
        if type(packet.keep) is not float or not 0.0 <= packet.keep <= 1.0:
            raise TypeError("keep must be a number from 0 to 1")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PacketRefused(f"the packet's header cannot be read: {error}", "corrupt") from error
    return packet, labels


def _digest(header: str, entries: Iterable[FactorEntry]) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for entry in entries:
        digest.update(f"{entry.name}:{entry.factor_OR.dtype}:{tuple(entry.factor_OR.shape)}".encode())
        digest.update(tensor_bytes(entry.factor_OR))
    return digest.hexdigest()
