"""Checks a whole factor packet against a receiver's weights, then merges it: `W <- keep W - U A`, all of it or nothing.

Protocol: `check_packet` looks at version, header, names, groups, shapes and values of every entry and reports what is
wrong with a `PacketRefused`; only then the first weight changes. A projection is drawn once for all weights of
its group and freed again.

Shapes: weight `[O, I]`, factor `[O, R]`, projection `[R, I]`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import groupby

import torch
from torch import Tensor

from megatron_logra.optim.merge import merge_factor_, merge_factor_split_
from megatron_logra.optim.split_master import SplitMaster
from megatron_logra.sketch.projection import DISTRIBUTIONS, MAX_RANK, build_projection
from megatron_logra.sync.packet import FACTOR_DTYPES, FactorPacket, PacketRefused

MAX_NAMES_SHOWN = 5


def check_packet(
    packet: FactorPacket, *, version: int, groups: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises unless the packet makes a new version of exactly these weights.

    Args:
        packet: complete (parts joined).
        version: the receiver's policy version.
        groups: projection group of every weight that a packet must update, by Hugging Face name.
        shapes: shape `(O, I)` of those weights, whole, not a shard.

    Raises:
        PacketRefused: with the first kind of problem found and up to five names that have it.
    """
    _check_version(packet, version)
    _check_header(packet)
    _check_names(packet, groups)
    wrong_group = [entry.name for entry in packet.entries if entry.group != groups[entry.name]]
    _refuse_if(wrong_group, "groups", "labelled with another projection group than the receiver's")
    _check_shapes(packet, shapes)
    not_finite = [entry.name for entry in packet.entries if not bool(torch.isfinite(entry.factor_OR).all())]
    _refuse_if(not_finite, "values", "NaN or infinite")


def apply_packet_(
    packet: FactorPacket,
    weights: Mapping[str, Tensor | SplitMaster],
    *,
    version: int,
    groups: Mapping[str, str],
) -> int:
    """Merges a packet into whole Hugging Face weights in place and returns the version they now have.

    Args:
        packet: complete (parts joined); factors on any device.
        weights: float32 (or float64) tensors or split masters, by Hugging Face name; at least those in `groups`.
        version, groups: as in `check_packet`.

    Raises:
        PacketRefused: the packet does not fit; no weight was changed.
    """
    shapes = {name: tuple(weights[name].shape) for name in groups}
    check_packet(packet, version=version, groups=groups, shapes=shapes)
    by_group = sorted(packet.entries, key=lambda entry: entry.group)
    staged = [(entry, entry.factor_OR.to(_device_of(weights[entry.name]))) for entry in by_group]
    for group, members in groupby(staged, key=lambda pair: pair[0].group):
        projection = None
        for entry, factor_OR in members:
            weight = weights[entry.name]
            projection = projection or build_projection(
                packet.base_seed,
                packet.update,
                group,
                packet.rank,
                packet.widths[group],
                distribution=packet.distribution,
                device=_device_of(weight),
            )
            if isinstance(weight, SplitMaster):
                merge_factor_split_(weight.weight, weight.remainder, factor_OR, projection, keep=packet.keep)
            else:
                merge_factor_(weight, factor_OR, projection, keep=packet.keep)
    return packet.version_after


def _device_of(weight: Tensor | SplitMaster) -> torch.device:
    return weight.weight.device if isinstance(weight, SplitMaster) else weight.device


def _check_version(packet: FactorPacket, version: int) -> None:
    if packet.version_before != version:
        raise PacketRefused(
            f"the packet goes from version {packet.version_before} to {packet.version_after}, "
            f"but the weights have version {version}",
            "version",
        )
    if packet.version_after <= packet.version_before:
        raise PacketRefused(
            f"the packet's versions do not rise: {packet.version_before} to {packet.version_after}", "version"
        )


def _check_header(packet: FactorPacket) -> None:
    if packet.distribution not in DISTRIBUTIONS:
        raise PacketRefused(
            f"unknown projection distribution {packet.distribution!r}; known: {', '.join(DISTRIBUTIONS)}"
        )
    if not 0.0 <= packet.keep <= 1.0:
        raise PacketRefused(f"keep {packet.keep} is outside 0..1")
    if not 1 <= packet.rank <= MAX_RANK:
        raise PacketRefused(f"rank {packet.rank} is outside 1..{MAX_RANK}")


def _check_names(packet: FactorPacket, groups: Mapping[str, str]) -> None:
    counts = Counter(entry.name for entry in packet.entries)
    _refuse_if([name for name, count in counts.items() if count > 1], "names", "there more than once")
    _refuse_if(counts.keys() - groups.keys(), "names", "unknown to the receiver")
    _refuse_if(groups.keys() - counts.keys(), "names", "missing from the packet")


def _check_shapes(packet: FactorPacket, shapes: Mapping[str, tuple[int, ...]]) -> None:
    problems = []
    for entry in packet.entries:
        num_rows, width = shapes[entry.name]
        found = (*entry.factor_OR.shape, packet.widths.get(entry.group))
        if found != (num_rows, packet.rank, width):
            problems.append(f"{entry.name} has (rows, rank, width) {found}, needs {(num_rows, packet.rank, width)}")
    _refuse_if(problems, "shapes", "of a wrong shape")
    wrong_dtype = [entry.name for entry in packet.entries if entry.factor_OR.dtype not in FACTOR_DTYPES]
    _refuse_if(wrong_dtype, "shapes", f"of a dtype that is none of {FACTOR_DTYPES}")


def _refuse_if(names: Collection[str], reason: str, what: str) -> None:
    if names:
        shown = sorted(names)[:MAX_NAMES_SHOWN]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        raise PacketRefused(f"{len(names)} factors are {what}: {', '.join(shown)}{more}", reason)
