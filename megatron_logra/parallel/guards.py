"""The checks that all ranks of a training world make together: same projections, same replicas, finite values.

Each is collective over `world` and ends the same way on every rank: all of them raise, or none does.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from megatron_logra.parallel.collectives import all_gather_first_dim
from megatron_logra.parallel.scalars import read_scalars, run_on_all_ranks
from megatron_logra.sketch.projection import build_projection

_COLUMNS_AT_EACH_END = 4
_GROUPS_AT_EACH_END = 2
_MAX_TENSORS_NAMED = 5
_MAX_RANKS_NAMED = 16

_BLOCK_ELEMENTS = 1 << 20  # an int64 temporary of 8 MiB, two at a time: they stay in a GPU's L2 cache
_INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# splitmix64 (Steele et al. 2014): the step between positions and the odd factors of its mix, as signed numbers.
_POSITION_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_FAILED = -1  # in the place of the number of tensors


def require_same_projections(
    world: ProcessGroup,
    device: torch.device,
    *,
    base_seed: int,
    rank: int,
    distribution: str,
    groups: Sequence[tuple[str, int]],
) -> None:
    """Check that every rank of `world` has the same settings and draws the same projections on its own device.

    `rank` is that of the sketch; `groups` are (name, width) of the projection groups of the whole model, the same list
    on every rank. Drawn are 4 columns at each end of the first and last two groups, at update 0.
    Collective: one all-reduce of an int64 and one all-gather of int64 [2] over `world`; `device` holds both.

    Raises: `RuntimeError` on all ranks when fingerprints differ; as `raise_on_all_ranks` when a rank cannot draw.
    """

    def draw() -> bytes:
        return _projection_fingerprint(device, base_seed, rank, distribution, groups)

    fingerprint = run_on_all_ranks(draw, world, device)
    # Halves, because eight unsigned bytes do not fit a signed integer.
    halves_2 = [int.from_bytes(half, "little") for half in (fingerprint[:4], fingerprint[4:])]
    gathered_P2 = all_gather_first_dim(torch.tensor([halves_2], dtype=torch.int64, device=device), world)
    described = _describe_minority([tuple(row) for row in gathered_P2.tolist()], world)
    if described is not None:
        raise RuntimeError(
            f"the ranks do not draw the same projections: {described}. Usual causes: another --logra-seed, "
            "--logra-rank, --logra-distribution or model on that rank, another version of the package, or a device "
            "that computes Philox differently"
        )


def require_same_on_replicas(named: Iterable[tuple[str, Tensor]], group: ProcessGroup, world: ProcessGroup) -> None:
    """Check that all ranks of `group` (data-parallel replicas) hold the same names, dtypes, shapes and bits.

    `named` yields (name, tensor) in the same order on all ranks of `group`; any shape, strides and dtype of 1, 2, 4 or
    8 bytes, `world` contains `group`. A group of size 1 reads no tensor. Temporaries take tens of MiB on the device.
    Collective: one all-gather of int64 [2] over `group` and one all-reduce of an int64 over `world`, then one read on
    the host. Only a group that disagrees also gathers the checksum of each tensor (int64 [N]) to name them.

    Raises: `RuntimeError` on all ranks of `world` when any group disagrees or any rank cannot read its tensors. The
    ranks of a group that disagrees name the differing ranks and tensors, the others the first rank that found it.
    """
    device = _collective_device(world)
    names: list[str] = []
    checksums_N = torch.zeros(0, dtype=torch.int64, device=device)
    failure: Exception | None = None
    if dist.get_world_size(group) > 1:
        try:
            names, checksums_N = _checksum_tensors(named, device)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            failure = error
    header_2 = torch.full((2,), _FAILED if failure else len(names), dtype=torch.int64, device=device)
    header_2[1] = _checksum_bits(checksums_N)
    headers_G2 = all_gather_first_dim(header_2[None], group)
    disagrees = (headers_G2 != headers_G2[0]).any() | (headers_G2[:, 0] == _FAILED).any()
    size = dist.get_world_size(world)
    first = size - disagrees.long() * (size - dist.get_rank(world))
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=world)
    if isinstance(first, FakeTensor):
        return  # values do not exist, as in `read_scalars`
    first_rank, mine = read_scalars(first, disagrees)
    if first_rank == size:
        return
    if not mine:
        found_by = dist.get_global_rank(world, int(first_rank))
        raise RuntimeError(f"rank {found_by} found that its data-parallel replicas differ; its own message says where")
    if failure is not None:
        raise RuntimeError(f"this rank cannot checksum its tensors: {failure}") from failure
    raise RuntimeError(_describe_replicas(names, checksums_N, headers_G2.tolist(), group))


def find_nonfinite(names: Sequence[str], is_bad: Tensor, world: ProcessGroup) -> list[str]:
    """The names that are bad on any rank, in the order of `names`; the same list on all ranks.

    `names` is equal on all ranks, `is_bad` is bool `[len(names)]` and local. Collective: one all-reduce MAX of int32
    over `world` and one read on the host; none when `names` is empty. Under `FakeTensorMode` nothing is bad.

    Raises: `ValueError` when `is_bad` has another shape, before the collective.
    """
    if is_bad.shape != (len(names),):
        raise ValueError(f"is_bad has shape {tuple(is_bad.shape)} for {len(names)} names; give one flag a name")
    if not names:
        return []
    flags_N = is_bad.to(device=_collective_device(world), dtype=torch.int32)
    dist.all_reduce(flags_N, op=dist.ReduceOp.MAX, group=world)
    if isinstance(flags_N, FakeTensor):
        return []
    return [name for name, flag in zip(names, flags_N.tolist(), strict=True) if flag]


def _projection_fingerprint(
    device: torch.device, base_seed: int, rank: int, distribution: str, groups: Sequence[tuple[str, int]]
) -> bytes:
    """Eight bytes that depend on the settings, the whole group list and what `device` draws for its two ends."""
    listing = [(str(name), int(width)) for name, width in groups]
    digest = hashlib.blake2b(repr((int(base_seed), int(rank), str(distribution), listing)).encode(), digest_size=8)
    few = len(listing) <= 2 * _GROUPS_AT_EACH_END
    for name, width in listing if few else listing[:_GROUPS_AT_EACH_END] + listing[-_GROUPS_AT_EACH_END:]:
        count = min(_COLUMNS_AT_EACH_END, width)
        for columns in (slice(0, count), slice(width - count, width)):
            drawn = build_projection(
                base_seed, 0, name, rank, width, columns=columns, distribution=distribution, device=device
            )
            digest.update(drawn.packed.cpu().numpy().tobytes())
    return digest.digest()


def _checksum_tensors(named: Iterable[tuple[str, Tensor]], device: torch.device) -> tuple[list[str], Tensor]:
    """The names, and int64 [N] on `device`: checksums of bits and positions, names, dtypes and shapes."""
    names: list[str] = []
    checksums: list[Tensor] = []
    with torch.no_grad():
        for name, tensor in named:
            label = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            label_hash = int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "little", signed=True)
            names.append(name)
            checksums.append(_checksum_bits(tensor).add_(label_hash).to(device))
    if not checksums:
        return names, torch.zeros(0, dtype=torch.int64, device=device)
    return names, torch.stack(checksums)


def _checksum_bits(tensor: Tensor) -> Tensor:
    """Int64 [] on the tensor's device: the wrapping sum over elements of mix(bits + (position + 1) * odd).

    The mix is a bijection, so one changed element is always seen; it is far from linear, so changes in several (swapped
    elements, sign bits flipped in pairs) cancel with probability 2^-64 only. Positions are row-major, whatever the
    strides.
    """
    integer = _INTEGER_OF_BYTES.get(tensor.element_size())
    if integer is None:
        raise TypeError(f"tensors of {tensor.dtype} have no checksum: {tensor.element_size()} bytes an element")
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    position = 1
    for block in _flat_blocks(tensor.detach().view(integer)):
        mixed = torch.arange(position, position + block.numel(), dtype=torch.int64, device=tensor.device)
        mixed.mul_(_POSITION_STEP).add_(block)
        _xor_shift_(mixed, 30).mul_(_MIX_MULTIPLIERS[0])
        _xor_shift_(mixed, 27).mul_(_MIX_MULTIPLIERS[1])
        total.add_(_xor_shift_(mixed, 31).sum())
        position += block.numel()
    return total


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    """Int64 `x ^= x >>> shift`; the mask makes torch's arithmetic shift a logical one, so that it is a bijection."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _flat_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in row-major order, in 1-d pieces of bounded size: views if contiguous, else copies of blocks."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(_BLOCK_ELEMENTS)
    elif tensor.numel() <= _BLOCK_ELEMENTS:
        yield tensor.reshape(-1)
    elif tensor.shape[0] == 1:
        yield from _flat_blocks(tensor[0])
    else:
        row_elements = tensor.numel() // tensor.shape[0]
        for rows in tensor.split(max(1, _BLOCK_ELEMENTS // row_elements)):
            yield from _flat_blocks(rows)


def _collective_device(group: ProcessGroup) -> torch.device:
    """Where the collectives of `group` take tensors, also on a rank that has no tensor to show it."""
    if torch.cuda.is_available() and dist.get_backend(group) not in ("gloo", "mpi", "fake"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _describe_replicas(names: list[str], checksums_N: Tensor, headers: list[list[int]], group: ProcessGroup) -> str:
    """What differs among the ranks of `group`; a collective of its own once all of them could read as many tensors."""
    counts = [count for count, _ in headers]
    failed = [index for index, count in enumerate(counts) if count == _FAILED]
    if failed:
        return f"{_list_ranks(failed, group)} cannot checksum the tensors; the message there says why"
    described = _describe_minority([tuple(header) for header in headers], group)
    if len(set(counts)) > 1:
        found = Counter(counts)
        listing = ", ".join(f"{found[count]} with {count} tensors" for count in sorted(found))
        return f"the data-parallel replicas do not hold the same tensors ({listing}): {described}"
    gathered_GN = all_gather_first_dim(checksums_N[None], group)
    differing = (gathered_GN != gathered_GN[0]).any(dim=0).nonzero().flatten().tolist()
    listing = ", ".join(names[index] for index in differing[:_MAX_TENSORS_NAMED])
    more = ", ..." if len(differing) > _MAX_TENSORS_NAMED else ""
    return (
        f"the data-parallel replicas no longer hold the same bits: {described} in {len(differing)} of {len(names)} "
        f"tensors ({listing}{more}). Usual causes: a memory error or a non-deterministic kernel on one device. Restart "
        "from the last checkpoint; if it happens again, exclude the node of that rank"
    )


def _describe_minority(values: Sequence[tuple[int, ...]], group: ProcessGroup) -> str | None:
    """Which ranks of `group` differ from the most common of `values` (one a rank); None when all are equal."""
    common, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return None
    differing = [index for index, value in enumerate(values) if value != common]
    agreeing = [index for index, value in enumerate(values) if value == common]
    verb = "differ" if len(differing) > 1 else "differs"
    return f"{_list_ranks(differing, group)} {verb} from {_list_ranks(agreeing, group)}"


def _list_ranks(indices: Sequence[int], group: ProcessGroup) -> str:
    """Such as "ranks 1, 3": the global ranks of the indices in `group`."""
    ranks = ", ".join(str(dist.get_global_rank(group, index)) for index in indices[:_MAX_RANKS_NAMED])
    more = f" and {len(indices) - _MAX_RANKS_NAMED} more" if len(indices) > _MAX_RANKS_NAMED else ""
    return f"rank{'s' if len(indices) > 1 else ''} {ranks}{more}"
