"""What may be wrong with the source, the checkpoint or the reference of a conversion: it is said, and nothing is lost."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_logra.checkpoint.convert import convert_from_hf, convert_to_hf
from megatron_logra.checkpoint.folders import checkpoint_folder, open_partial, publish
from megatron_logra.checkpoint.placement import Layout
from megatron_logra.checkpoint.torch_dist import Block, read_stored, save_blocks, write_format
from tests.conversion import contents, read_whole, save_model


def _rename(weights: dict[str, Tensor]) -> None:
    weights["model.layers.1.mlp.up_porj.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    del weights["model.norm.weight"], weights["lm_head.weight"]


def _reshape(weights: dict[str, Tensor]) -> None:
    weights["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(16, 32)


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], None], list[str]]] = {
    "missing and misspelt": (
        _rename,
        [
            "missing tensor model.layers.1.mlp.up_proj.weight (did you mean model.layers.1.mlp.up_porj.weight?)",
            "missing tensor model.norm.weight",
            "missing tensor lm_head.weight",
        ],
    ),
    "shape": (
        _reshape,
        ["model.layers.2.self_attn.k_proj.weight has shape (16, 32) but config.json asks for (32, 32)"],
    ),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_all_weights_that_do_not_fit_the_config_are_named(tmp_path: Path, case: str) -> None:
    change, expected = BAD_WEIGHTS[case]
    save_model(tmp_path / "hf", "llama")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert not (tmp_path / "megatron").exists()


def test_weights_that_the_model_does_not_use_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "llama")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, tmp_path / "hf" / "model.safetensors")
    with pytest.warns(UserWarning, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


BAD_SHARDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, r"lacks 1 of \d+ weight files: model-00002-of-"),
    "cut": (_cut, r"model-00002-of-\d+\.safetensors is damaged or cut off"),
    "empty": (lambda path: path.write_bytes(b""), r"model-00002-of-\d+\.safetensors is damaged or cut off"),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_a_bad_shard_is_named(tmp_path: Path, case: str) -> None:
    damage, message = BAD_SHARDS[case]
    save_model(tmp_path / "hf", "llama", sharded=True)
    damage(next((tmp_path / "hf").glob("model-00002-of-*")))
    with pytest.raises(ValueError, match=message):
        convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())
    assert not (tmp_path / "megatron").exists()


Damage = dict[str, Callable[[Path], object]]
BAD_CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "cut": ({"__0_0.distcp": _cut}, "is damaged: __0_0.distcp is not what was written"),
    "flipped byte": ({"__0_0.distcp": _flip}, "is damaged: __0_0.distcp is not what was written"),
    "weights missing": ({"__0_0.distcp": Path.unlink}, r"__0_0.distcp cannot be read \(No such file"),
    "index missing": ({".metadata": Path.unlink}, r"\.metadata cannot be read"),
    "index flipped": ({".metadata": _flip}, r"\.metadata is not what was written"),
    "format missing": ({"metadata.json": Path.unlink}, "metadata.json cannot be read"),
    "both missing": (
        {"metadata.json": Path.unlink, ".metadata": Path.unlink},
        "metadata cannot be read .*metadata.json cannot be read",
    ),
    "list damaged": ({"integrity.json": _cut}, "integrity.json cannot be read"),
    # Without the list of digests, which Megatron does not write, the format itself has to show the damage.
    "no list, cut": ({"integrity.json": Path.unlink, "__0_0.distcp": _cut}, "is damaged"),
    "no list, index": ({"integrity.json": Path.unlink, ".metadata": _cut}, "cannot be read"),
    "no list, record": (
        {
            "integrity.json": Path.unlink,
            "huggingface.json": lambda path: path.write_text('{"dtypes": {"model.norm.weight": "float5"}}'),
        },
        "huggingface.json is damaged",
    ),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
@pytest.mark.filterwarnings("ignore:.*has no integrity.json")
def test_a_damaged_checkpoint_says_what_is_wrong_and_takes_nothing_away(tmp_path: Path, case: str) -> None:
    damages, message = BAD_CHECKPOINTS[case]
    save_model(tmp_path / "hf", "llama")
    place = convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout(2, 2))
    convert_to_hf(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    before = contents(tmp_path / "back")
    for name, damage in damages.items():
        damage(place / name)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        convert_to_hf(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    assert contents(tmp_path / "back") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def test_a_checkpoint_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "llama")
    place = convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())
    place.rename(checkpoint_folder(tmp_path / "megatron", 7))
    with pytest.raises(ValueError, match=r"names checkpoint '0', which is not there; found: iter_0000007"):
        convert_to_hf(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    with pytest.raises(ValueError, match="holds no Megatron checkpoint"):
        convert_to_hf(tmp_path / "hf", tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("way", ["from_hf", "to_hf"])
def test_a_conversion_that_fails_leaves_the_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    save_model(tmp_path / "hf", "llama")
    convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())
    convert_to_hf(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    before = contents(tmp_path)
    calls = 0

    def fail_at_last(*_: object, **__: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise OSError(28, "No space left on device")
        return torch.zeros(1)

    with monkeypatch.context() as patched:
        if way == "from_hf":
            patched.setattr(torch, "save", fail_at_last)
            with pytest.raises(RuntimeError, match="writing .* failed: .*No space left on device"):
                convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout(2, 2))
        else:
            patched.setattr("megatron_logra.hf.shard_file.ShardFile.append", fail_at_last)
            with pytest.raises(OSError, match="No space left on device"):
                convert_to_hf(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    assert contents(tmp_path) == before


def test_the_checkpoints_of_a_run_are_not_overtaken(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "llama")
    run = tmp_path / "run"
    publish(open_partial(run, 12), run, 12)
    with pytest.raises(ValueError, match=r"holds checkpoints of a run \(iter_0000012\); give another folder"):
        convert_from_hf(tmp_path / "hf", run, Layout())
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "12\n"
    convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())
    convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout(2, 1))  # its own are replaced


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("qwen3", {}, ["missing tensor decoder.layers.self_attention.q_layernorm.weight"]),
        ("llama", {"num_hidden_layers": 3}, ["mlp.linear_fc2.weight has shape [4, 32, 48]", "asks for [3, 32, 48]"]),
        ("llama", {"vocab_size": 300}, ["has shape [256, 32] but config.json asks for [300, 32] or more rows"]),
        ("llama", {"tie_word_embeddings": True}, ["output_layer.weight is no part of the model"]),
        (
            "llama",
            {"intermediate_size": 40},
            ["linear_fc1.weight has shape [4, 96, 32]", "linear_fc2.weight has shape"],
        ),
    ],
    ids=["family", "layers", "vocabulary", "tied", "width"],
)
def test_a_reference_of_another_model_is_refused_with_all_names(
    tmp_path: Path, family: str, overrides: dict[str, object], expected: list[str]
) -> None:
    save_model(tmp_path / "hf", "llama")
    save_model(tmp_path / "other", family, **overrides)
    convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())
    with pytest.raises(ValueError, match="does not fit the config.json of the reference") as caught:
        convert_to_hf(tmp_path / "megatron", tmp_path / "other", tmp_path / "back")
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert not (tmp_path / "back").exists()


def test_a_tensor_that_was_written_in_part_is_no_tensor(tmp_path: Path) -> None:
    half = Block("decoder.x", (4, 2), (0, 0), (2, 2), torch.float32, torch.ones(2, 2))
    save_blocks(tmp_path, [half], common={}, group=None)
    write_format(tmp_path)
    with pytest.raises(ValueError, match="decoder.x was written in part only: 4 of 8 entries"):
        read_whole(tmp_path, "decoder.x")


class _Forged:
    """An index that makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_forged_index_runs_nothing(tmp_path: Path) -> None:
    write_format(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Forged(tmp_path / "made")))
    with pytest.raises(ValueError, match=r"it names posix\.mkdir, which no checkpoint index needs"):
        read_stored(tmp_path)
    assert not (tmp_path / "made").exists()
