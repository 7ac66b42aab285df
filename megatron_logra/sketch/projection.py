"""Random projections `A_RI` that are the same bits on every device and under every sharding.

A projection is counter based: the entry of row i and column j is a function of (base_seed, update, name, i, j) alone,
so a rank draws just the columns its weight shard covers and a rollout engine redraws what the trainer used.

    key     = blake2b(f"{base_seed}:{update}:{name}", digest_size=8), little endian, split in (low 32, high 32) bits
    words   = Philox4x32-10(counter, key)                       Salmon et al., "Parallel random numbers", SC 2011
    rademacher   counter (j, i // 128, 0, 0): bit i % 32 of word (i % 128) // 32; 1 is +1/sqrt(R), 0 is -1/sqrt(R)
    gaussian     counter (j, i // 4, 1, 0): words (0, 1) make rows 4b, 4b+1 and words (2, 3) rows 4b+2, 4b+3 by
                 Box-Muller in float64, rounded to multiples of 2^-12 so that devices agree; divided by sqrt(R)

Shapes: R rank, I width (input columns of the whole weight), C the columns held here, W = ceil(R / 32) words.
"""

import hashlib
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

DISTRIBUTIONS = ("rademacher", "gaussian")
MAX_RANK = 1 << 16  # beyond it a factor's bf16 grid no longer makes merges exact (optim/merge.py)

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_WORD = 0xFFFFFFFF
_SIGN_BIT = 0x80000000
_ROWS_PER_BLOCK = 128
_NORMAL_SCALE = 2.0**-12  # |normal| < 6.8, so an int16 holds normal / 2^-12
_FLOAT32_ONE = 0x3F800000


def projection_key(base_seed: int, update: int, name: str) -> tuple[int, int]:
    """The Philox key (low 32 bits, high 32 bits) of one projection."""
    digest = hashlib.blake2b(f"{base_seed}:{update}:{name}".encode(), digest_size=8).digest()
    low, high = struct.unpack("<II", digest)
    return low, high


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words (int64 tensors in [0, 2^32) that broadcast together).

    Returns four int64 tensors in [0, 2^32). Both multipliers M exceed 2^31, so with the negative M - 2^32 a product
    of 32-bit words stays within 62 bits: x M = x (M - 2^32) + x 2^32, and no integer overflows on any device.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    multiplier0, multiplier1 = (value - (1 << 32) for value in _PHILOX_MULTIPLIERS)
    for _ in range(_PHILOX_ROUNDS):
        product0 = word0 * multiplier0
        product1 = word2 * multiplier1
        high0 = (product0 >> 32).add_(word0)
        high1 = (product1 >> 32).add_(word2)
        word0, word2 = (word1 ^ key0) ^ high1, (word3 ^ key1) ^ high0
        word1, word3 = product1.bitwise_and_(_WORD), product0.bitwise_and_(_WORD)
        key0 = (key0 + _PHILOX_KEY_STEPS[0]) & _WORD
        key1 = (key1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return word0, word1, word2, word3


def pack_projection(
    base_seed: int,
    update: int,
    name: str,
    rank: int,
    width: int,
    *,
    columns: slice = slice(None),
    device: torch.device | str = "cpu",
) -> Tensor:
    """The signs of a Rademacher projection, one bit an entry: int32 [W, C].

    Bit i % 32 of word i // 32 is row i (1 is +, 0 is -). Bits beyond row `rank` are those of a higher rank.
    """
    start, stop = _resolve_columns(rank, width, columns)
    num_blocks = -(-rank // _ROWS_PER_BLOCK)
    words = _draw_words(projection_key(base_seed, update, name), num_blocks, start, stop, 0, device)
    words_WC = words.view(4 * num_blocks, stop - start)[: -(-rank // 32)]
    return ((words_WC ^ _SIGN_BIT) - _SIGN_BIT).to(torch.int32)  # reinterpreted as signed, no overflow


def expand_signs(
    packed_WC: Tensor, rank: int, *, dtype: torch.dtype, rows: slice = slice(None), magnitude: float = 1.0
) -> Tensor:
    """Unpack bits to `+magnitude` and `-magnitude` (rounded to `dtype`): [rows, C].

    The float32 and bfloat16 bit patterns are assembled with integer operations in the output's own memory.
    """
    start, stop, _ = rows.indices(rank)
    first_word, end_word = start // 32, -(-stop // 32)
    inverted_WC = packed_WC[first_word:end_word].bitwise_not()
    local_rows = slice(start - 32 * first_word, stop - 32 * first_word)
    float32_bits = _float32_bits(magnitude)
    if dtype == torch.bfloat16:
        bfloat16_bits = (float32_bits + 0x7FFF + (float32_bits >> 16 & 1)) >> 16  # round to nearest even
        low_WC = (inverted_WC << 16 >> 16).to(torch.int16)
        high_WC = (inverted_WC >> 16).to(torch.int16)
        halves = torch.stack((low_WC, high_WC), dim=1).flatten(0, 1)
        return _place_signs(halves, 16, bfloat16_bits).view(torch.bfloat16)[local_rows]
    if dtype == torch.float32:
        return _place_signs(inverted_WC, 32, float32_bits).view(torch.float32)[local_rows]
    return _place_signs(inverted_WC, 32, _FLOAT32_ONE).view(torch.float32)[local_rows].to(dtype).mul_(magnitude)


@dataclass(frozen=True, eq=False)
class Projection:
    """The columns `columns` of one global projection `A_RI`, in its packed form.

    `packed` is int32 [W, C] of sign bits for "rademacher" and int16 [R, C] of normals in units of 2^-12 for "gaussian".
    `cached` is `unscaled` of one dtype, kept by who has the memory for it.
    Column arguments of the methods count from the first column held here.
    """

    base_seed: int
    update: int
    name: str
    rank: int
    width: int
    columns: slice
    distribution: str
    packed: Tensor
    cached: Tensor | None = None

    @property
    def num_columns(self) -> int:
        return self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        return self.packed.numel() * self.packed.element_size()

    @property
    def scale(self) -> float:
        """1 / sqrt(R): what the unscaled entries are multiplied by."""
        return 1.0 / math.sqrt(self.rank)

    def expand(self, dtype: torch.dtype, columns: slice = slice(None)) -> Tensor:
        """`A_RC` itself, rounded to `dtype`. Exact in bfloat16 only where 1/sqrt(R) is (R a power of 4)."""
        if self.distribution == "rademacher":
            return expand_signs(self.packed[:, columns], self.rank, dtype=dtype, magnitude=self.scale)
        return self.packed[:, columns].to(torch.float64).mul_(_NORMAL_SCALE * self.scale).to(dtype)

    def unscaled(self, dtype: torch.dtype, columns: slice = slice(None)) -> Tensor:
        """`sqrt(R) A_RC`: +-1, or normals on the grid 2^-12 (exact in float32 and float64)."""
        if self.cached is not None and self.cached.dtype == dtype:
            return self.cached[:, columns]
        if self.distribution == "rademacher":
            return self.signs(dtype, columns)
        return self.packed[:, columns].to(torch.promote_types(dtype, torch.float32)).mul_(_NORMAL_SCALE).to(dtype)

    def signs(self, dtype: torch.dtype, columns: slice = slice(None)) -> Tensor:
        """`sqrt(R) A_RC` of a Rademacher projection: entries +-1, exact in every dtype."""
        if self.distribution != "rademacher":
            raise ValueError(f"a {self.distribution} projection has no signs; use unscaled()")
        return expand_signs(self.packed[:, columns], self.rank, dtype=dtype)

    def gram(self, *, block_columns: int = 8192) -> Tensor:
        """`A A^T` over the columns held here: float64 [R, R].

        The Gram matrix of the whole projection is the sum over disjoint column ranges (a row-parallel weight's ranks).
        """
        dtype = torch.float32 if self.distribution == "rademacher" else torch.float64  # sums of +-1 are exact
        gram_RR = torch.zeros(self.rank, self.rank, dtype=torch.float64, device=self.packed.device)
        for start in range(0, self.num_columns, block_columns):
            tile_RC = self.unscaled(dtype, slice(start, start + block_columns))
            gram_RR += tile_RC @ tile_RC.T
        return gram_RR.div_(self.rank)


def build_projection(
    base_seed: int,
    update: int,
    name: str,
    rank: int,
    width: int,
    *,
    columns: slice = slice(None),
    distribution: str = "rademacher",
    device: torch.device | str = "cpu",
) -> Projection:
    """Draw the columns `columns` of the projection of `name` at `update`, kept packed on `device`.

    Raises ValueError for an unknown distribution, a rank outside 1..65536 or columns outside the width.
    """
    start, stop = _resolve_columns(rank, width, columns)
    resolved = slice(start, stop)
    if distribution == "rademacher":
        packed = pack_projection(base_seed, update, name, rank, width, columns=resolved, device=device)
    elif distribution == "gaussian":
        packed = _draw_normals(projection_key(base_seed, update, name), rank, start, stop, device)
    else:
        raise ValueError(f"unknown projection distribution {distribution!r}; choose one of {', '.join(DISTRIBUTIONS)}")
    return Projection(base_seed, update, name, rank, width, resolved, distribution, packed)


def make_projection(
    base_seed: int,
    update: int,
    name: str,
    rank: int,
    width: int,
    *,
    columns: slice = slice(None),
    distribution: str = "rademacher",
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`proj_RI` (or its columns `columns`) of `dtype`, scaled by 1/sqrt(R)."""
    projection = build_projection(
        base_seed, update, name, rank, width, columns=columns, distribution=distribution, device=device
    )
    return projection.expand(dtype)


def _resolve_columns(rank: int, width: int, columns: slice) -> tuple[int, int]:
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"projection rank must be in 1..{MAX_RANK}, got {rank}")
    if width < 1:
        raise ValueError(f"projection width must be at least 1, got {width}")
    start = 0 if columns.start is None else columns.start
    stop = width if columns.stop is None else columns.stop
    if columns.step not in (None, 1) or not 0 <= start < stop <= width:
        raise ValueError(f"projection columns {columns} must be a non-empty contiguous range within width {width}")
    return start, stop


def _draw_words(
    key: tuple[int, int], num_blocks: int, start: int, stop: int, stream: int, device: torch.device | str
) -> Tensor:
    """Philox words of counters (column, block, stream, 0): int64 [num_blocks, 4, C]."""
    column_1C = torch.arange(start, stop, dtype=torch.int64, device=device)[None, :]
    block_B1 = torch.arange(num_blocks, dtype=torch.int64, device=device)[:, None]
    stream_11 = torch.full((1, 1), stream, dtype=torch.int64, device=device)
    zero_11 = torch.zeros((1, 1), dtype=torch.int64, device=device)
    return torch.stack(philox4x32((column_1C, block_B1, stream_11, zero_11), key), dim=1)


def _draw_normals(key: tuple[int, int], rank: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """Standard normals in units of 2^-12: int16 [R, C], drawn in column tiles to bound the temporaries."""
    num_blocks = -(-rank // 4)
    normals_RC = torch.empty(rank, stop - start, dtype=torch.int16, device=device)
    tile = max(1, (1 << 18) // num_blocks)
    for first in range(start, stop, tile):
        last = min(first + tile, stop)
        words_B4C = _draw_words(key, num_blocks, first, last, 1, device).to(torch.float64).mul_(2.0**-32)
        radius = torch.sqrt(torch.log(words_B4C[:, 0::2] + 2.0**-33).mul_(-2.0))
        angle = words_B4C[:, 1::2] * (2.0 * math.pi)
        pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=2)
        tile_RC = pairs.view(4 * num_blocks, last - first)[:rank]
        normals_RC[:, first - start : last - start] = torch.round(tile_RC / _NORMAL_SCALE).to(torch.int16)
    return normals_RC


def _place_signs(inverted_WC: Tensor, bits_per_word: int, magnitude_bits: int) -> Tensor:
    """Move each bit to the sign position of an integer of its width, over the magnitude: [W * bits, C]."""
    shift_B1 = torch.arange(bits_per_word - 1, -1, -1, dtype=inverted_WC.dtype, device=inverted_WC.device)[:, None]
    signed = torch.bitwise_left_shift(inverted_WC[:, None, :], shift_B1)
    signed.bitwise_and_(-(1 << (bits_per_word - 1))).bitwise_or_(magnitude_bits)
    return signed.flatten(0, 1)


def _float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
