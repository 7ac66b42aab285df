"""Megatron-Core's own model and its own checkpoints on both sides of a conversion, in layouts other than written."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_logra.checkpoint.convert import convert_from_hf, convert_to_hf
from megatron_logra.checkpoint.folders import checkpoint_folder
from megatron_logra.checkpoint.placement import Layout as Written
from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.mcore.policy import Policy
from megatron_logra.optim.split_master import round_to_bf16
from tests.conversion import assert_same_folder
from tests.distributed.layouts import Layout, build_weights
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import SPLIT, run_session
from tests.tiny_models import make_tiny_model, save_tiny_model


def stock_model(policy: Policy) -> Any:
    """Megatron's GPT model with its local layer spec, in the layout of `policy`, with nothing in its weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    shape = policy.shape
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts, qk_layernorm=shape.qk_layernorm, normalization="RMSNorm"
    )
    if shape.num_experts is not None:
        # Alone among Megatron's specs this one stores the norm before experts as if it were fused with a dense MLP.
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    model = GPTModel(
        policy.model.config,
        spec,
        vocab_size=policy.model.last.vocab_size,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    return model


def run_stages(model: Any, tokens: Tensor) -> Tensor | None:
    """Logits of all tokens on the last pipeline stage, gathered over the vocabulary; None on the others."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    with torch.no_grad():
        if not model.pre_process:
            hidden = torch.empty(tokens.shape[1], tokens.shape[0], model.config.hidden_size)
            dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor([hidden])
        positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
        output = model(tokens, positions, mask)
        if not model.post_process:
            dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
            return None
        return gather_from_tensor_model_parallel_region(output)


def load_run_save(
    rank: int, world_size: int, folder: Path, place: Path, layout: Layout, tokens: Tensor, save: Path
) -> Tensor | None:
    """Megatron loads a converted checkpoint into its own model, runs it, and saves it as it saves any."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    model = stock_model(build_weights(folder, layout, torch.float32))
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(place))
    assert loaded["iteration"] == 0
    model.load_state_dict(loaded["model"])
    logits = run_stages(model, tokens)
    # For its results Megatron starts a process with a queue, which a daemon, as these ranks are, may not do.
    filesystem_async.get_write_results_queue = lambda *_: queue.Queue()
    dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 0}, str(save))
    return logits


@pytest.mark.parametrize(
    ("family", "tied", "written", "loaded"),
    [
        ("llama", True, Written(4, 1), Layout(tp=2, pp=2)),
        ("qwen2", False, Written(1, 4), Layout(tp=4)),
        ("qwen3", False, Written(2, 2, 1), Layout(pp=4)),
        ("qwen3_moe", False, Written(2, 4), Layout(pp=2)),
    ],
    ids=["llama-tied", "qwen2-bias", "qwen3", "qwen3_moe"],
)
def test_megatron_loads_what_was_converted_and_what_it_saves_is_converted_back(
    tmp_path: Path, family: str, tied: bool, written: Written, loaded: Layout
) -> None:
    model = make_tiny_model(family, tie_word_embeddings=tied)
    save_tiny_model(tmp_path / "hf", family, tie_word_embeddings=tied)
    place = convert_from_hf(tmp_path / "hf", tmp_path / "converted", written)
    (tmp_path / "saved").mkdir()
    tokens = torch.randint(0, 130, (2, 9), generator=torch.Generator().manual_seed(0))
    arguments = (tmp_path / "hf", place, loaded, tokens, tmp_path / "saved")
    results = run_ranks(loaded.world_size, load_run_save, *arguments)
    with torch.no_grad():
        expected = model(tokens).logits
    given = [logits for logits in results if logits is not None]
    assert len(given) == loaded.tp
    for logits in given:
        # Both compute in fp32 with sums of at most 128 terms, in other orders: 1e-5 of the largest logit.
        torch.testing.assert_close(logits[..., :130], expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    with pytest.warns(UserWarning, match="has no integrity.json"):
        convert_to_hf(tmp_path / "saved", tmp_path / "hf", tmp_path / "back")
    assert_same_folder(tmp_path / "hf", tmp_path / "back")


def _save_run(rank: int, world_size: int, folder: Path, layout: Layout, save: Path, num_steps: int) -> None:
    run_session(rank, world_size, folder, layout, SPLIT, save=save, num_steps=num_steps)


def test_a_training_checkpoint_gives_weights_and_masters(tmp_path: Path) -> None:
    """The masters of an untrained run are the fp32 weights it was started from."""
    save_tiny_model(tmp_path / "hf", "llama", tie_word_embeddings=True)
    layout = Layout(tp=2, pp=2)
    run_ranks(4, _save_run, tmp_path / "hf", layout, tmp_path / "run", 0)
    run_ranks(4, _save_run, tmp_path / "hf", layout, tmp_path / "run", 1)
    for iteration in (0, 1):
        place = checkpoint_folder(tmp_path / "run", iteration)
        convert_to_hf(place, tmp_path / "hf", tmp_path / f"weights{iteration}")
        convert_to_hf(place, tmp_path / "hf", tmp_path / f"masters{iteration}", master=True)
    original = HFReader(tmp_path / "hf")
    readers = {name: HFReader(tmp_path / name) for name in ("weights0", "masters0", "weights1", "masters1")}
    for name in original.names:
        value = original.read(name)
        read = {folder: reader.read(name) for folder, reader in readers.items()}
        is_target = "_proj" in name
        assert torch.equal(read["masters0"], value if is_target else read["weights0"].float()), name
        for iteration in (0, 1):
            assert torch.equal(read[f"weights{iteration}"], round_to_bf16(read[f"masters{iteration}"])), name
        assert torch.equal(read["masters1"], read["masters0"]) != is_target, name
