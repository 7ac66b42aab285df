"""What config.json says of a family's attention, norms and rotary embedding, as transformers reads it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration

from megatron_logra.hf.config import ModelShape, read_model_shape
from megatron_logra.hf.rope import RopeScaling
from megatron_logra.hf.safetensors_io import HFReader, validate_checkpoint
from megatron_logra.hf.table import build_param_plan
from megatron_logra.sync.sender import target_groups
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

# Written by hand after the published models (transformers 4), without keys that do not concern the shape.
MISTRAL_V01: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
MISTRAL_NEMO = MISTRAL_V01 | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
PHI3_MINI_4K = {
    "model_type": "phi3",
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
GEMMA3_27B = {
    "model_type": "gemma3_text",
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
    "torch_dtype": "bfloat16",
    "vocab_size": 262208,
}
QWEN2_WINDOWED = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 4,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
PUBLISHED = {
    "mistral-7b-v0.1": MISTRAL_V01,
    "mistral-nemo": MISTRAL_NEMO,
    "phi-3-mini-4k": PHI3_MINI_4K,
    "gemma-2-9b": GEMMA2_9B,
    "gemma-3-27b": GEMMA3_27B,
    "qwen2-windowed": QWEN2_WINDOWED,
    "mixtral": MIXTRAL,
}


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_reads_the_same_before_and_after_transformers_wrote_it(tmp_path: Path, name: str) -> None:
    # transformers fills in every default and writes rotary settings and kinds of layers in its new form.
    old = _write(tmp_path / "old", PUBLISHED[name])
    AutoConfig.from_pretrained(old).save_pretrained(tmp_path / "new")
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in written and "rope_theta" not in written
    assert read_model_shape(old) == read_model_shape(tmp_path / "new")


def _shape(tmp_path: Path, name: str) -> ModelShape:
    return read_model_shape(_write(tmp_path / name, PUBLISHED[name]))


def test_windows_heads_caps_and_bases_of_published_models(tmp_path: Path) -> None:
    mistral, nemo = _shape(tmp_path, "mistral-7b-v0.1"), _shape(tmp_path, "mistral-nemo")
    assert (mistral.sliding_window, mistral.sliding_layers) == (4096, (True,) * 32)
    assert (nemo.sliding_window, nemo.sliding_layers, nemo.kv_channels) == (None, (), 128)
    phi = _shape(tmp_path, "phi-3-mini-4k")
    assert (phi.sliding_window, phi.layernorm_epsilon) == (2047, 1e-5)
    gemma2 = _shape(tmp_path, "gemma-2-9b")
    assert gemma2.sliding_layers == (True, False) * 21
    assert (gemma2.attention_softcap, gemma2.final_softcap, gemma2.softmax_scale) == (50.0, 30.0, 1 / 16)
    assert gemma2.tie_embeddings and gemma2.is_gemma and gemma2.local_rotary_base is None
    gemma3 = _shape(tmp_path, "gemma-3-27b")
    assert [layer for layer, is_local in enumerate(gemma3.sliding_layers) if not is_local] == list(range(5, 62, 6))
    assert (gemma3.num_layers, gemma3.tie_embeddings, gemma3.softmax_scale) == (62, True, 168**-0.5)
    assert (gemma3.rotary_base, gemma3.rope_scaling, gemma3.local_rotary_base) == (1e6, RopeScaling("linear", 8.0), 1e4)
    assert (gemma3.attention_softcap, gemma3.final_softcap) == (None, None)
    assert _shape(tmp_path, "qwen2-windowed").sliding_layers == (False,) * 4 + (True,) * 2
    mixtral = _shape(tmp_path, "mixtral")
    assert (mixtral.rotary_base, mixtral.layernorm_epsilon) == (1e6, 1e-5)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("phi-3-mini-4k", {"rope_scaling": LONGROPE}, "rope type 'longrope' is not supported: its frequencies depend on"),
    ("phi-3-mini-4k", {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 is not supported; only 1 is"),
    ("mistral-nemo", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "supported are default, linear, llama3"),
    ("mistral-nemo", {"rope_scaling": {"type": "linear"}}, "linear rope scaling lacks factor"),
    (
        "mistral-nemo",
        {"layer_types": ["full_attention", "sliding_attention"] * 20},
        "says sliding_attention of layer 1",
    ),
    ("mistral-7b-v0.1", {"sliding_window": 0}, "sliding_window = 0 must be a whole number >= 1: 32 layers use it"),
    ("gemma-2-9b", {"sliding_window": None}, "sliding_window = None must be a whole number >= 1: 21 layers use it"),
    ("gemma-2-9b", {"layer_types": ["chunked_attention"] * 42}, "layer_types holds chunked_attention"),
    ("gemma-2-9b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 42 layers"),
    ("gemma-2-9b", {"final_logit_softcapping": -30}, "final_logit_softcapping = -30 must be a number > 0"),
    ("gemma-2-9b", {"hidden_activation": "gelu"}, "gemma2 is computed with gelu_pytorch_tanh"),
    ("gemma-2-9b", {"use_bidirectional_attention": True}, "only causal attention is"),
    ("gemma-3-27b", {"attn_logit_softcapping": 50.0}, "transformers reads it and does not apply it"),
    ("gemma-3-27b", {"model_type": "gemma3"}, "it also holds a vision tower; docs/models.md"),
    ("qwen2-windowed", {"model_type": "qwen3_moe"}, "sliding windows are not supported for this family"),
]


@pytest.mark.parametrize(
    ("name", "change", "problem"), REFUSED, ids=[f"{name}-{next(iter(c))}" for name, c, _ in REFUSED]
)
def test_what_is_not_computed_is_refused(tmp_path: Path, name: str, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_model_shape(_write(tmp_path / "model", PUBLISHED[name] | change))


def test_linear_and_local_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    from megatron_logra.mcore.rotary import compute_rotary_frequencies

    model = save_tiny_model(tmp_path, "gemma3_text")
    found = compute_rotary_frequencies(read_model_shape(tmp_path), device=torch.device("cpu"))
    rotary = model.model.rotary_emb
    assert torch.equal(found, torch.stack([rotary.full_attention_inv_freq, rotary.sliding_attention_inv_freq]))


def test_rows_of_a_tensor_that_is_fused_on_disk(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "phi3")
    shape, reader = read_model_shape(tmp_path), HFReader(tmp_path)
    plan = build_param_plan(
        shape, tp_rank=1, tp_size=2, padded_vocab=130, layers=[(0, 3)], embedding=False, final=False
    )
    entries = {item.entry.megatron_name.removeprefix("decoder.layers.0."): item for item in plan}
    qkv, gate_up = entries["self_attention.linear_qkv.weight"], entries["mlp.linear_fc1.weight"]
    # 4 heads and 2 KV heads of 8 rows: the second rank has heads 2 and 3 and KV head 1.
    pieces = [(piece.hf_name, piece.hf_rows.start, piece.num_rows) for piece in qkv.row_slices]
    name = "model.layers.3.self_attn.qkv_proj.weight"
    assert pieces == [(name, 16, 16), (name, 32 + 8, 8), (name, 48 + 8, 8)]
    name = "model.layers.3.mlp.gate_up_proj.weight"
    pieces = [(piece.hf_name, piece.hf_rows.start, piece.num_rows) for piece in gate_up.row_slices]
    assert pieces == [(name, 24, 24), (name, 48 + 24, 24)]
    assert reader.shape(name) == (96, 32) == gate_up.entry.hf_shapes[name]
    # One factor for each name on disk.
    names = target_groups([[item.entry for item in plan]])
    assert sorted(names) == [
        f"model.layers.3.{part}.weight"
        for part in ("mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj")
    ]


def test_the_way_out_of_a_multimodal_folder_that_the_documentation_shows(tmp_path: Path) -> None:
    text = {**PUBLISHED["gemma-3-27b"], "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=259)
    whole = Gemma3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "gemma-3-27b-it")
    save_tiny_tokenizer(tmp_path / "gemma-3-27b-it")
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block.replace('"gemma-3', f'"{tmp_path}/gemma-3'), {})
    folder = tmp_path / "gemma-3-27b-it-text"
    shape, reader = read_model_shape(folder), HFReader(folder)
    validate_checkpoint(reader, shape)
    assert shape.tie_embeddings and (folder / "tokenizer.json").is_file()
    own = whole.model.language_model.state_dict()
    assert sorted(own) == [name.removeprefix("model.") for name in reader.names]
    assert all(torch.equal(reader.read(f"model.{name}"), weight) for name, weight in own.items())
