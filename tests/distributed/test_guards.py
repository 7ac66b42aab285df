"""The checks all ranks make together: equal ranks pass, and one rank that differs makes every rank raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_logra.parallel import guards
from megatron_logra.parallel.guards import find_nonfinite, require_same_on_replicas, require_same_projections
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
GROUPS = [(f"layers.{index}.qkv", 64 + index) for index in range(6)] + [("narrow", 3)]
SETTINGS = {"base_seed": 7, "rank": 48, "distribution": "rademacher", "groups": GROUPS}
BLOCK = 1 << 20  # elements the checksum takes at once
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def error_of(check: Callable[[], Any]) -> str | None:
    """The message of the RuntimeError that `check` raises, or None."""
    try:
        check()
    except RuntimeError as error:
        return str(error)
    return None


def projection_errors(world_size: int, settings_by_case: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, list[Any]]:
    """Each rank's error, by case; a case is (rank that differs, its other settings)."""

    def check(rank: int, size: int) -> dict[str, str | None]:
        errors = {}
        for case, (other_rank, other) in settings_by_case.items():
            settings: dict[str, Any] = SETTINGS | (other if rank == other_rank else {})
            errors[case] = error_of(lambda kw=settings: require_same_projections(dist.group.WORLD, CPU, **kw))
        return errors

    results = run_ranks(world_size, check)
    return {case: [result[case] for result in results] for case in settings_by_case}


def replica_errors(
    world_size: int,
    changes: dict[str, tuple[int, Change]],
    replicas: list[list[int]] | None = None,
    make: Callable[[int], dict[str, Tensor]] | None = None,
) -> dict[str, list[Any]]:
    """Each rank's error, by case; a case is (rank whose tensors change, change)."""

    def check(rank: int, size: int) -> dict[str, str | None]:
        lists = replicas or [list(range(size))]
        groups = [dist.new_group(ranks) for ranks in lists]
        group = next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)
        errors = {}
        for case, (other_rank, change) in changes.items():
            named = (make or weights)(rank)
            if rank == other_rank:
                named = change({name: tensor.clone() for name, tensor in named.items()})
            errors[case] = error_of(lambda kw=named: require_same_on_replicas(kw.items(), group, dist.group.WORLD))
        return errors

    results = run_ranks(world_size, check)
    return {case: [result[case] for result in results] for case in changes}


def weights(rank: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "embedding": draw(40, 24, dtype=torch.bfloat16),
        "qkv": draw(24, 24, dtype=torch.bfloat16),
        "master": draw(24, 16, dtype=torch.float32),
        "moment": draw(24, 16, dtype=torch.float64),
        "empty": draw(0, 16, dtype=torch.float32),
        "step": torch.tensor(5),
    }


def with_bit_flipped(name: str, index: tuple[int, ...], bit: int) -> Change:
    def change(named: dict[str, Tensor]) -> dict[str, Tensor]:
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[named[name].element_size()]
        bits = named[name].view(integer)
        top = 8 * bits.element_size() - 1
        bits[index] ^= -(1 << bit) if bit == top else 1 << bit
        return named

    return change


def with_rows(name: str, rows: list[int], order: list[int]) -> Change:
    def change(named: dict[str, Tensor]) -> dict[str, Tensor]:
        named[name][rows] = named[name][order]
        return named

    return change


def with_elements_swapped(named: dict[str, Tensor]) -> dict[str, Tensor]:
    flat = named["qkv"].view(-1)
    flat[[5, 301]] = flat[[301, 5]]
    return named


def with_signs_flipped(named: dict[str, Tensor]) -> dict[str, Tensor]:
    named["moment"][3:5] *= -1  # an even number of changes in the top bit, which a linear sum would not see
    return named


def without_last(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(named.items())[:-1])


def renamed(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("qkv", "proj"): tensor for name, tensor in named.items()}


def reshaped(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return named | {"master": named["master"].view(16, 24)}


def assert_all_raise(errors: list[str | None], *parts: str) -> None:
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} did not raise"
        for part in parts:
            assert part in error


def test_ranks_with_equal_settings_draw_the_same_projections() -> None:
    empty: dict[str, Any] = {}
    assert projection_errors(3, {"equal": (0, empty)})["equal"] == [None] * 3


def test_a_rank_that_draws_other_projections_is_named_on_all_ranks() -> None:
    reordered = [GROUPS[1], GROUPS[0], *GROUPS[2:]]
    middle = [*GROUPS[:3], ("layers.3.other", 67), *GROUPS[4:]]
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "seed": (1, {"base_seed": 8}),
        "rank": (1, {"rank": 47}),  # the packed words are those of rank 48
        "distribution": (1, {"distribution": "gaussian"}),
        "order": (1, {"groups": reordered}),
        "middle": (1, {"groups": middle}),
    }
    for errors in projection_errors(3, cases).values():
        assert_all_raise(errors, "rank 1 differs from ranks 0, 2", "--logra-seed", "Philox")
    tie = projection_errors(2, {"seed": cases["seed"]})["seed"]
    assert_all_raise(tie, "rank 1 differs from rank 0")


def test_a_device_that_draws_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = guards.build_projection

    def check(rank: int, size: int) -> str | None:
        def draw_wrongly(*args: Any, **kwargs: Any) -> Any:
            projection = original(*args, **kwargs)
            if rank == 2 and args[2] == "narrow" and projection.columns.start == 0:
                projection.packed[0, 2] ^= 1
            return projection

        monkeypatch.setattr(guards, "build_projection", draw_wrongly)
        return error_of(lambda: require_same_projections(dist.group.WORLD, CPU, **SETTINGS))

    assert_all_raise(run_ranks(3, check), "rank 2 differs from ranks 0, 1")


def test_a_rank_that_cannot_draw_stops_the_others() -> None:
    def check(rank: int, size: int) -> str:
        settings: dict[str, Any] = SETTINGS | ({"rank": 1 << 20} if rank == 1 else {})
        with pytest.raises((RuntimeError, ValueError)) as caught:
            require_same_projections(dist.group.WORLD, CPU, **settings)
        return str(caught.value)

    errors = run_ranks(2, check)
    assert "rank 1 failed" in errors[0]
    assert "projection rank must be in" in errors[1]


def test_equal_replicas_pass_whatever_their_strides() -> None:
    def transposed(named: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor for name, tensor in named.items()}

    errors = replica_errors(3, {"clones": (1, lambda named: named), "strides": (1, transposed)})
    assert errors == {"clones": [None] * 3, "strides": [None] * 3}


def test_every_difference_between_replicas_is_found_on_all_ranks() -> None:
    cases = {
        "embedding": (1, with_bit_flipped("embedding", (39, 23), 0)),
        "qkv": (1, with_elements_swapped),
        "master": (1, with_bit_flipped("master", (0, 0), 31)),
        "moment": (1, with_bit_flipped("moment", (7, 2), 63)),
        "step": (1, lambda named: named | {"step": named["step"] + 1}),
        "embedding permuted": (1, with_rows("embedding", [2, 9, 11], [9, 11, 2])),
        "moment signs": (1, with_signs_flipped),
        "master reshaped": (1, reshaped),
    }
    for case, errors in replica_errors(3, cases).items():
        assert_all_raise(errors, "rank 1 differs from ranks 0, 2 in 1 of 6 tensors", f"({case.split()[0]})")
        assert_all_raise(errors, "last checkpoint", "exclude the node")


def test_replicas_that_hold_other_tensors_raise_instead_of_waiting() -> None:
    cases = {
        "renamed": (0, renamed),
        "fewer": (0, without_last),
        "no checksum": (0, lambda named: named | {"qkv": named["qkv"].to(torch.complex128)}),
    }
    errors = replica_errors(2, cases)
    assert_all_raise(errors["renamed"], "rank 1 differs from rank 0 in 1 of 6 tensors")
    assert_all_raise(errors["fewer"], "1 with 5 tensors, 1 with 6 tensors", "rank 1 differs from rank 0")
    assert "complex128" in errors["no checksum"][0]
    assert "rank 0 cannot checksum" in errors["no checksum"][1]


def test_no_more_than_five_tensors_are_named() -> None:
    def make(rank: int) -> dict[str, Tensor]:
        return {f"weight{index}": torch.full((3,), float(rank)) for index in range(8)}

    errors = replica_errors(2, {"all": (1, lambda named: named)}, make=make)["all"]
    assert_all_raise(errors, "in 8 of 8 tensors (weight0, weight1, weight2, weight3, weight4, ...)")


def test_tensors_of_many_blocks_are_compared_across_their_blocks() -> None:
    def make(rank: int) -> dict[str, Tensor]:
        wide = torch.arange(2 * BLOCK + 6, dtype=torch.int64).view(2, -1).to(torch.int16).view(torch.bfloat16)
        return {"wide": wide.mT.contiguous().mT if rank == 1 else wide, "narrow": wide.view(-1, 2)}

    cases = {
        "equal": (0, lambda named: named),
        "wide": (0, with_bit_flipped("wide", (1, BLOCK + 2), 4)),
        "narrow": (0, with_rows("narrow", [4, BLOCK // 2 + 9], [BLOCK // 2 + 9, 4])),
    }
    errors = replica_errors(2, cases, make=make)
    assert errors.pop("equal") == [None, None]
    for name, messages in errors.items():
        assert_all_raise(messages, f"in 1 of 2 tensors ({name})")


def test_only_the_group_that_disagrees_says_where() -> None:
    def make(rank: int) -> dict[str, Tensor]:
        return {"shard": torch.arange(6.0) + rank % 2}  # replicas {0, 2} and {1, 3} hold other shards

    cases = {"equal": (3, lambda named: named), "flip": (3, with_bit_flipped("shard", (4,), 1))}
    errors = replica_errors(4, cases, replicas=[[0, 2], [1, 3]], make=make)
    assert errors["equal"] == [None] * 4
    for rank in (1, 3):
        assert_all_raise([errors["flip"][rank]], "rank 3 differs from rank 1", "(shard)")
    for rank in (0, 2):
        assert_all_raise([errors["flip"][rank]], "rank 1 found that its data-parallel replicas differ")


def test_groups_of_one_rank_have_nothing_to_compare() -> None:
    def make(rank: int) -> dict[str, Tensor]:
        return {f"stage{rank}": torch.full((2 + rank,), float(rank))}

    cases = {"other": (0, lambda named: named)}
    assert replica_errors(2, cases, replicas=[[0], [1]], make=make)["other"] == [None, None]
    assert replica_errors(1, cases, make=make)["other"] == [None]


def test_nonfinite_names_of_all_ranks_are_merged_in_order() -> None:
    names = ["kl", "grad_norm", "sketch", "loss"]

    def find(rank: int, size: int) -> tuple[list[str], list[str], list[str], Tensor]:
        world = dist.group.WORLD
        is_bad = torch.tensor([[False, False, True, False], [True, False, True, False], [False] * 4][rank])
        bad = find_nonfinite(names, is_bad, world)
        fine = find_nonfinite(names, torch.zeros(4, dtype=torch.bool), world)
        return bad, fine, find_nonfinite([], torch.zeros(0, dtype=torch.bool), world), is_bad

    for rank, (bad, fine, nothing, is_bad) in enumerate(run_ranks(3, find)):
        assert (bad, fine, nothing) == (["kl", "sketch"], [], [])
        assert int(is_bad.sum()) == [1, 2, 0][rank]  # the caller's flags stay local


def test_one_flag_a_name_is_required() -> None:
    def find(rank: int, size: int) -> None:
        with pytest.raises(ValueError, match="for 2 names"):
            find_nonfinite(["kl", "loss"], torch.zeros(3, dtype=torch.bool), dist.group.WORLD)

    run_ranks(1, find)


def test_nothing_is_read_under_fake_tensors() -> None:
    def check(rank: int, size: int) -> list[str]:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        world = dist.group.WORLD
        with FakeTensorMode():
            require_same_on_replicas({"w": torch.randn(4, 4), "v": torch.randn(4)}.items(), world, world)
            found = find_nonfinite(["a", "b"], torch.randn(2) > 0, world)
        dist.destroy_process_group()
        return found

    assert run_ranks(1, check) == [[]]


def test_the_checksum_mixes_bits_and_positions_like_splitmix64() -> None:
    """Sums in wrapping 64-bit arithmetic, recomputed with Python's integers."""
    wrap = (1 << 64) - 1

    def mix(bits: int, position: int) -> int:
        x = (bits + position * 0x9E3779B97F4A7C15) & wrap
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & wrap
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & wrap
        return x ^ x >> 31

    tensor = torch.tensor([[1.5, -2.0, 0.0], [-0.0, float("nan"), 1e-3]], dtype=torch.bfloat16)
    bits = tensor.view(torch.int16).flatten().tolist()
    expected = sum(mix(value, position) for position, value in enumerate(bits, start=1)) & wrap
    assert int(guards._checksum_bits(tensor).item()) & wrap == expected
