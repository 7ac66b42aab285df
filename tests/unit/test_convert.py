"""Conversion between Hugging Face folders and Megatron checkpoints: every bit both ways, and what may be wrong."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_logra.checkpoint import convert
from megatron_logra.checkpoint.convert import convert_from_hf, convert_to_hf, find_differences
from megatron_logra.checkpoint.folders import open_partial, publish
from megatron_logra.checkpoint.placement import Layout
from megatron_logra.checkpoint.torch_dist import Block, read_stored, save_blocks, write_format
from megatron_logra.hf.config import read_model_shape
from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.hf.stored import stored_blocks
from megatron_logra.hf.table import build_param_plan
from megatron_logra.optim.split_master import split_fp32
from tests.conversion import assert_same_folder, contents, read_whole, save_model
from tests.tiny_models import CONFIGS

# The tiny models have 4 layers, 4 heads of size 16 at hidden size 32, 2 KV heads and 130 tokens: at TP 4 a KV head is
# cut in two and the vocabulary is padded, by 2 rows or, with the usual multiple of 128 a rank, to 512.
LAYOUTS: dict[str, tuple[Layout, str, bool, bool]] = {
    "tp1-pp1": (Layout(1, 1, 1), "fp32", False, False),
    "tp2-pp4-tied-mixed-sharded": (Layout(2, 4, 1), "mixed", True, True),
    "tp4-pp2-bf16-sharded": (Layout(4, 2), "bf16", False, True),
    "tp4-pp4-tied-mixed": (Layout(4, 4, 1), "mixed", True, False),
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_to_the_last_bit(tmp_path: Path, family: str, case: str) -> None:
    layout, kind, tied, sharded = LAYOUTS[case]
    save_model(tmp_path / "hf", family, kind, sharded=sharded, tie_word_embeddings=tied)
    place = convert_from_hf(tmp_path / "hf", tmp_path / "megatron", layout)
    convert_to_hf(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    assert_same_folder(tmp_path / "hf", tmp_path / "back")
    assert ("output_layer.weight" in read_stored(place)) != tied


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_stored_tensors_have_the_rows_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """As Megatron stores them: query groups one after the other, gates before ups, whatever ranks wrote them."""
    save_model(tmp_path / "hf", "qwen2")
    if tp == 2:
        monkeypatch.setattr(convert, "MAX_BLOCK_BYTES", 700)  # blocks of a few rows
    place = convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout(tp, 2, 1))
    reader, head = HFReader(tmp_path / "hf"), 8
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            q, k, v = (reader.read(f"{prefix}.self_attn.{x}_proj.{kind}") for x in "qkv")
            expected = [q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]]
            assert q.shape[0] == 4 * head and k.shape[0] == 2 * head
            stored = read_whole(place, f"decoder.layers.self_attention.linear_qkv.{kind}")
            assert torch.equal(stored[layer], torch.cat(expected))
        halves = [reader.read(f"{prefix}.mlp.{x}_proj.weight") for x in ("gate", "up")]
        assert torch.equal(read_whole(place, "decoder.layers.mlp.linear_fc1.weight")[layer], torch.cat(halves))
        down = read_whole(place, "decoder.layers.mlp.linear_fc2.weight")[layer]
        assert torch.equal(down, reader.read(f"{prefix}.mlp.down_proj.weight"))


def test_the_vocabulary_is_padded_with_zeros_and_cut_again(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "llama")
    for multiple, rows in ((1, 132), (128, 512)):
        place = convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout(4, 1, multiple))
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            stored = read_whole(place, key)
            assert stored.shape == (rows, 32) and not stored[130:].any() and stored[:130].any()


def test_layers_keep_their_global_number_in_virtual_stages(tmp_path: Path) -> None:
    """PP 3 with two chunks a rank: rank 1 holds layers 1 and 4 of six."""
    from megatron.core.transformer import TransformerConfig

    from megatron_logra.mcore.transformer_config import stage_layers

    sizes = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}
    config = TransformerConfig(
        num_layers=6, hidden_size=32, num_attention_heads=4, pipeline_dtype=torch.float32, **sizes
    )
    save_model(tmp_path / "hf", "llama", num_hidden_layers=6)
    shape, reader = read_model_shape(tmp_path / "hf"), HFReader(tmp_path / "hf")
    place = convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout(1, 3))
    whole = read_whole(place, "decoder.layers.mlp.linear_fc2.weight")
    for rank in range(3):
        layers = stage_layers(config, rank)
        assert layers == [(0, rank), (1, rank + 3)]
        plan = build_param_plan(
            shape, tp_rank=0, tp_size=1, padded_vocab=130, layers=layers, embedding=False, final=False
        )
        for parameter in plan:
            if parameter.entry.megatron_name.endswith("linear_fc2.weight"):
                (block,) = stored_blocks(parameter, shape, rank=0, size=1, layers=dict(layers), padded_vocab=130)
                assert torch.equal(whole[block.offset[0]], reader.read(parameter.entry.hf_names[0]))


def test_a_model_that_cannot_be_split_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "llama", num_hidden_layers=5)
    problems = {
        Layout(1, 2): "5 layers cannot be split over pipeline_model_parallel_size 2: 5 % 2 = 1",
        Layout(3, 1): "4 attention heads cannot be split over tensor_model_parallel_size 3: 4 % 3 = 1",
    }
    for layout, problem in problems.items():
        with pytest.raises(ValueError, match=re.escape(problem)):
            convert_from_hf(tmp_path / "hf", tmp_path / "megatron", layout)
    with pytest.raises(ValueError, match="pipeline_model_parallel_size 0 must be at least 1"):
        Layout(1, 0)
    assert not (tmp_path / "megatron").exists()
    assert find_differences(tmp_path / "hf", Layout(1, 5), tmp_path) == ([], 48)


@pytest.mark.parametrize("change", [0.0, 1.0], ids=["same", "different"])
def test_a_head_beside_tied_embeddings_is_left_out(tmp_path: Path, change: float) -> None:
    save_model(tmp_path / "hf", "llama", tie_word_embeddings=True)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in weights  # as transformers saves it: converted above
    shutil.copytree(tmp_path / "hf", tmp_path / "both")
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + change}
    save_file(both, tmp_path / "both" / "model.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_from_hf(tmp_path / "both", tmp_path / "megatron", Layout(2, 2))
    said = [str(warning.message) for warning in caught]
    assert any("lm_head.weight differs from model.embed_tokens.weight" in text for text in said) == bool(change)
    convert_to_hf(tmp_path / "megatron", tmp_path / "both", tmp_path / "back")
    assert_same_folder(tmp_path / "hf", tmp_path / "back")


def _training_checkpoint(source: Path, folder: Path) -> None:
    """Checkpoint 3 of a run: bf16 weights; of the projections split masters, of the final norm an fp32 master."""
    place, partial = convert_from_hf(source, folder / "fp32", Layout()), open_partial(folder, 3)
    blocks = []
    for key in read_stored(place):
        whole = read_whole(place, key)
        high, low = split_fp32(whole)
        parts = {"": high}
        if ".linear_" in key and "norm" not in key:
            parts["optimizer.remainder."] = low
        elif key == "decoder.final_layernorm.weight":
            parts["optimizer.master."] = whole
        for prefix, data in parts.items():
            of_layers = {prefix + key: data}
            if prefix and key.startswith("decoder.layers."):  # states are not stacked: some layers may have none
                rest = key.removeprefix("decoder.layers.")
                of_layers = {f"{prefix}decoder.layers.{number}.{rest}": one for number, one in enumerate(data)}
            for name, one in of_layers.items():
                shape = tuple(one.shape)
                blocks.append(Block(name, shape, (0,) * len(shape), shape, one.dtype, one))
    save_blocks(partial, blocks, common={"iteration": 3}, group=None)
    write_format(partial)
    publish(partial, folder, 3)


@pytest.mark.filterwarnings("ignore:.*has no integrity.json")
def test_weights_and_masters_of_a_training_checkpoint(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "llama")
    _training_checkpoint(tmp_path / "hf", tmp_path / "run")
    original = HFReader(tmp_path / "hf")
    convert_to_hf(tmp_path / "run", tmp_path / "hf", tmp_path / "weights")
    weights = HFReader(tmp_path / "weights")
    assert json.loads((tmp_path / "weights" / "config.json").read_text())["dtype"] == "bfloat16"
    convert_to_hf(tmp_path / "run", tmp_path / "hf", tmp_path / "masters", master=True)
    masters = HFReader(tmp_path / "masters")
    for name in original.names:
        value = original.read(name)
        assert torch.equal(weights.read(name), split_fp32(value)[0])
        exact = "_proj" in name or name == "model.norm.weight"
        assert torch.equal(masters.read(name), value if exact else split_fp32(value)[0].float()), name
    convert_to_hf(tmp_path / "run", tmp_path / "hf", tmp_path / "wide", dtype=torch.float32)
    assert {HFReader(tmp_path / "wide").dtype(name) for name in original.names} == {torch.float32}
    convert_from_hf(tmp_path / "hf", tmp_path / "plain", Layout())
    with pytest.raises(ValueError, match="holds no fp32 masters"):
        convert_to_hf(tmp_path / "plain", tmp_path / "hf", tmp_path / "masters", master=True)


def test_only_weights_are_read_from_the_source(tmp_path: Path) -> None:
    """The source stays as it is, and the side files come from the reference."""
    save_model(tmp_path / "hf", "qwen3")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    before = contents(tmp_path / "hf")
    place = convert_from_hf(tmp_path / "hf", tmp_path / "megatron", Layout())
    convert_to_hf(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    convert_to_hf(place, tmp_path / "hf", tmp_path / "back")  # an iter_* folder, over an earlier result
    assert_same_folder(tmp_path / "hf", tmp_path / "back")
    assert contents(tmp_path / "hf") == before
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        assert filecmp.cmp(tmp_path / "hf" / name, tmp_path / "back" / name, shallow=False)
