"""The parameter table both ways: row orders against explicit loops, shards of any layout back to the same folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_logra.hf.assemble import assemble_local, merge_shards
from megatron_logra.hf.config import read_model_shape
from megatron_logra.hf.loaded import checkpoint_views
from megatron_logra.hf.rope import RopeScaling
from megatron_logra.hf.rows import padded_vocab_size
from megatron_logra.hf.safetensors_io import HFReader, HFWriter, validate_checkpoint
from megatron_logra.hf.table import build_param_plan, expert_range, full_table, parameter_table
from tests.tiny_models import CONFIGS, save_tiny_model


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 4)])
def test_shards_of_every_layout_give_the_folder_back(tmp_path: Path, family: str, tied: bool, tp: int, pp: int) -> None:
    save_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    shape, reader = read_model_shape(tmp_path), HFReader(tmp_path)
    validate_checkpoint(reader, shape)
    padded = padded_vocab_size(shape.vocab_size, 1, tp)  # 130 tokens do not divide by 4
    stages = torch.arange(shape.num_layers).chunk(pp)
    whole: dict[str, Tensor] = {}
    for stage, layers in enumerate(stages):
        place = {"embedding": stage == 0, "final": stage == pp - 1}
        entries = parameter_table(shape, layers=layers.tolist(), **place)
        plans = [
            build_param_plan(
                shape,
                tp_rank=rank,
                tp_size=tp,
                etp_rank=rank,
                etp_size=tp,
                padded_vocab=padded,
                layers=list(enumerate(layers.tolist())),
                **place,
            )
            for rank in range(tp)
        ]
        for index, entry in enumerate(entries):
            shards = []
            for plan in plans:
                item = plan[index]
                assert item.entry == entry
                shards.append(assemble_local(entry, item.row_slices, item.columns, reader.read, item.shape))
            if entry.exported:
                whole |= merge_shards(entry, shape, shards, padded)
    assert sorted(whole) == reader.names
    for name in reader.names:
        assert torch.equal(whole[name], reader.read(name)), name


def test_qkv_rows_are_grouped_as_megatron_splits_them(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    shape, reader = read_model_shape(tmp_path), HFReader(tmp_path)
    head, groups, per_group = shape.kv_channels, 2, 2
    for kind, suffix in (("weight", "weight"), ("bias", "bias")):
        q, k, v = (reader.read(f"model.layers.1.self_attn.{x}_proj.{suffix}") for x in "qkv")
        rows = []
        for group in range(groups):
            for member in range(per_group):
                first = (group * per_group + member) * head
                rows += [q[first + i] for i in range(head)]
            rows += [k[group * head + i] for i in range(head)]
            rows += [v[group * head + i] for i in range(head)]
        expected = torch.stack(rows)
        for tp in (1, 2):
            for rank in range(tp):
                plan = build_param_plan(
                    shape, tp_rank=rank, tp_size=tp, padded_vocab=130, layers=[(0, 1)], embedding=False, final=False
                )
                (item,) = [p for p in plan if p.entry.megatron_name.endswith(f"linear_qkv.{kind}")]
                local = assemble_local(item.entry, item.row_slices, item.columns, reader.read, item.shape)
                assert torch.equal(local, expected.chunk(tp)[rank])


def test_names_and_groups_use_global_layer_numbers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    entries = parameter_table(read_model_shape(tmp_path), layers=[2, 3], embedding=False, final=True)
    by_name = {entry.megatron_name: entry for entry in entries}
    assert by_name["decoder.layers.1.mlp.linear_fc1.weight"].group == "model.layers.3.mlp.gate_up_proj"
    assert by_name["decoder.layers.0.self_attention.linear_qkv.weight"].group == "model.layers.2.self_attn.qkv_proj"


@pytest.mark.parametrize("place", ["old", "new"])
def test_rope_settings_in_both_places(tmp_path: Path, place: str) -> None:
    save_tiny_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config.pop("rope_parameters", None)
    config.pop("rope_theta", None)
    config |= (
        {"rope_theta": 5e5, "rope_scaling": scaling}
        if place == "old"
        else {"rope_parameters": scaling | {"rope_theta": 5e5}}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(tmp_path)
    assert shape.rotary_base == 5e5
    assert shape.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64.0)


def test_sharded_folders_are_written_whole_and_read_back(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "in", "llama")
    shape, reader = read_model_shape(tmp_path / "in"), HFReader(tmp_path / "in")
    expected = {name for entry in full_table(shape) for name in entry.hf_names}
    with HFWriter(tmp_path / "out", max_shard_bytes=30_000, expected_names=expected) as writer:
        writer.copy_side_files(tmp_path / "in")
        for name in reader.names:
            writer.write(name, reader.read(name).to(torch.bfloat16 if "mlp" in name else torch.float32))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    again = HFReader(tmp_path / "out")
    assert len(set(index["weight_map"].values())) > 1
    total = sum(again.read(name).numel() * again.read(name).element_size() for name in again.names)
    assert index["metadata"]["total_size"] == total
    validate_checkpoint(again, shape)
    for name in reader.names:
        assert again.read(name).dtype == (torch.bfloat16 if "mlp" in name else torch.float32)
    with pytest.raises(RuntimeError, match="no power"), HFWriter(tmp_path / "out") as writer:
        writer.write("model.norm.weight", torch.ones(32))
        raise RuntimeError("no power")
    assert HFReader(tmp_path / "out").names == again.names


def test_llama3_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megatron_logra.mcore.rotary import compute_rotary_frequencies

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=128, rope_parameters=scaling, max_position_embeddings=131072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    save_tiny_model(tmp_path, "llama", head_dim=128, rope_parameters=scaling)
    (found,) = compute_rotary_frequencies(read_model_shape(tmp_path), device=torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}, "dense layers among mixture-of-experts layers"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "a token cannot go to 5 of 4 experts"),
    ],
)
def test_what_a_mixture_of_experts_cannot_be_is_an_error(
    tmp_path: Path, family: str, change: dict[str, object], problem: str
) -> None:
    save_tiny_model(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_model_shape(tmp_path)


def test_experts_share_a_projection_and_keep_their_own_rows(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "mixtral")
    shape = read_model_shape(tmp_path)
    table = parameter_table(shape, layers=[1], embedding=False, final=False, experts=[2, 3])
    experts = {entry.megatron_name: entry for entry in table if entry.expert is not None}
    first = experts["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"]
    second = experts["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"]
    assert first.group == second.group == "model.layers.1.mlp.experts.gate_up_proj"
    assert first.hf_names == (
        "model.layers.1.block_sparse_moe.experts.2.w1.weight",
        "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    )
    assert (first.expert, second.expert) == (2, 3)
    assert [expert_range(shape, rank, 2) for rank in range(2)] == [range(2), range(2, 4)]
    with pytest.raises(ValueError, match=r"4 experts cannot be spread over expert_model_parallel_size 3: 4 % 3 = 1"):
        expert_range(shape, 0, 3)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_loaded_model_is_seen_by_the_names_of_its_files(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path, family)
    shape, reader = read_model_shape(tmp_path), HFReader(tmp_path)
    views = checkpoint_views({name: weight.detach() for name, weight in model.named_parameters()}, shape)
    assert sorted(views) == reader.names
    for name, view in views.items():
        assert torch.equal(view, reader.read(name)), name
        view.zero_()
    assert all(not weight.any() for weight in model.parameters())
