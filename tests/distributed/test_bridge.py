"""Our tables against Megatron-Bridge's maps, and a family that only Bridge knows.

Bridge is imported by the ranks only: it brings stand-ins and patches that other tests must not see.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GemmaConfig, NemotronConfig, OlmoeConfig

from megatron_logra.arguments import parse_arguments
from megatron_logra.hf.assemble import assemble_local, scatter_rows
from megatron_logra.hf.config import ModelShape, read_model_shape
from megatron_logra.hf.families import FAMILIES
from megatron_logra.hf.rows import ParameterEntry, local_rows
from megatron_logra.hf.safetensors_io import HFReader, validate_checkpoint
from megatron_logra.hf.table import full_table, parameter_table
from megatron_logra.mcore import bridge
from megatron_logra.mcore.bridge import BridgeMap, compare_with_bridge
from megatron_logra.mcore.bridge_family import find_family, read_shape
from megatron_logra.mcore.initialize import shutdown_model_parallel
from megatron_logra.mcore.weights import read_served
from megatron_logra.run import build_run
from megatron_logra.saving import export, finish_saving, start
from megatron_logra.train_step import build_own_batches
from megatron_logra.trainer import train_iteration
from tests.distributed.layouts import Layout, build_weights, make_responses
from tests.distributed.ranks import run_ranks
from tests.end_to_end.conftest import make_inputs
from tests.end_to_end.test_run import arguments
from tests.tiny_models import CONFIGS, Float64Everywhere, save_tiny_model

# Of our families these have no class in Bridge 0.6.2.
UNKNOWN = ("phi3", "mixtral", "qwen2_moe")
BOTH = [family for family in CONFIGS if family not in UNKNOWN]
# Bridge names the norms of the branches otherwise than our layers, so it cannot load them into our model.
LOADED = [family for family in BOTH if not family.startswith("gemma")]
SPLITS = [(1, 1), (2, 2), (4, 1)]  # (TP, PP); 2 query groups, so TP 4 cuts them
LAYOUTS = [Layout(tp=2), Layout(pp=2)]
RANK = 8


def _ask_bridge(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, Any]:
    """Everything that needs Bridge, in two processes that import it once."""
    answers: dict[str, Any] = {}
    bridge._load_bridge()
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    # What it must know of our modules to load weights into them.
    AutoMapping.register_module_type("SketchedColumnParallelLinear", "column")
    AutoMapping.register_module_type("SketchedRowParallelLinear", "row")
    AutoMapping.register_module_type("Router", "replicated")
    with contextlib.redirect_stdout(io.StringIO()):
        for name in (*LOADED, "llama-tied"):
            for layout in LAYOUTS:
                answers["loaded", name, layout.tp] = _load_with_bridge(folders[name], layout)
        answers["logprobs"] = _logprobs(folders["gemma"], Layout(tp=2, sp=True))
        answers["differences"] = _train(folders["gemma-chat"])
    if rank == 0:
        for name in (*BOTH, "llama-tied", "qwen2-bf16"):
            answers["compared", name] = [
                compare_with_bridge(folders[name], read_model_shape(folders[name]), tp_size=tp, pp_size=pp)
                for tp, pp in SPLITS
            ]
            answers["factors", name] = [_compare_factors(folders[name], tp) for tp, _ in SPLITS]
        answers["command"] = {name: _run_command(folders[name]) for name in ("qwen3", "gemma")}
        answers["swapped"] = _compare_swapped(folders["llama"])
        for name in ("llama", "qwen2", "qwen3"):
            family = find_family(folders[name])[1]
            answers["rules", name] = (set(family.layer_rules), family.outer_rules)
        answers["shapes"] = {name: read_shape(folders[name]) for name in ("gemma", "renamed", "llama")}
        answers["refused"] = {name: _refusal(folders[name]) for name in ("olmoe", "nemotron", "untied", "extra", "odd")}
    return answers


def _load_with_bridge(folder: Path, layout: Layout) -> list[str]:
    """Let Bridge load the folder into our model, over real ranks; names of the parameters that get other bits."""
    policy = build_weights(folder, layout, torch.float32)
    ours = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    for weight in policy.model.chunks[0].parameters():
        weight.data.fill_(float("nan"))
    auto = bridge._load_bridge().AutoBridge.from_hf_pretrained(folder)
    policy.model.config.share_embeddings_and_output_weights = policy.shape.tie_embeddings
    auto.load_hf_weights(policy.model.chunks)
    different = [name for name, weight in policy.model.named_parameters() if not torch.equal(weight, ours[name])]
    shutdown_model_parallel()
    return different


def _logprobs(folder: Path, layout: Layout) -> list[Tensor]:
    policy = build_weights(folder, layout, torch.float64)
    responses = make_responses()
    _, batches = build_own_batches(policy, responses, [0.0] * len(responses), micro_batch_size=1)
    logprobs = [output.logprob_N for output in policy.compute_logprobs(batches, temperature=1.0)]
    shutdown_model_parallel()
    return logprobs


def _train(inputs: Path) -> list[int]:
    """Entries in which the rollout engine differs from the trainer after each of two updates sent as factors."""
    argv = [*arguments(inputs), "--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"]
    run, differences = build_run(parse_arguments([*argv, "--save", str(inputs / "run")])), []
    start(run)
    for _ in range(2):
        train_iteration(run)
        run.step += 1
        exported = run.sender.stream_weights(lambda entry: read_served(run.policy, entry), dtype=torch.bfloat16)
        served = run.engine.weights()  # type: ignore[attr-defined]
        differences.append(sum(int((served[name] != weight).sum()) for name, weight in exported))
    export(run)
    finish_saving(run)
    run.loggers.close()
    return differences


def _compare_factors(folder: Path, tp_size: int) -> tuple[int, list[str]]:
    """Random factors `[rows, R]` both ways through Bridge's map and ours; how many, and those that differ."""
    shape, maps = read_model_shape(folder), BridgeMap(folder)
    targets = [entry for entry in full_table(shape) if entry.group is not None]
    return len(targets), [entry.megatron_name for entry in targets if not _factors_agree(entry, shape, maps, tp_size)]


def _factors_agree(entry: ParameterEntry, shape: ModelShape, maps: BridgeMap, tp_size: int) -> bool:
    pieces = [local_rows(entry, shape, rank, tp_size, shape.vocab_size) for rank in range(tp_size)]
    if entry.parallel == "row":  # every rank has the whole factor of a row-parallel weight
        pieces, tp_size = pieces[:1], 1
    whole = {name: torch.randn(size[0], RANK) for name, size in entry.hf_shapes.items()}
    rows = sum(piece.num_rows for piece in pieces[0])
    ours = [
        assemble_local(entry, piece, slice(None), lambda name, rows, _: whole[name][rows], (rows, RANK))
        for piece in pieces
    ]
    theirs = maps.to_megatron(entry.megatron_name, whole, entry.parallel, tp_size)
    there = all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    local = [torch.randn(rows, RANK) for _ in range(tp_size)]
    expected = {name: torch.full_like(factor, float("nan")) for name, factor in whole.items()}
    for factor, piece in zip(local, pieces, strict=True):
        for name, hf_rows, block in scatter_rows(factor, piece):
            expected[name][hf_rows] = block
    back = maps.to_hf(entry.megatron_name, local, entry.parallel)
    return there and back.keys() == expected.keys() and all(torch.equal(back[name], expected[name]) for name in back)


def _run_command(folder: Path) -> tuple[int, str]:
    """Exit code and output of `verify_roundtrip.py --against-bridge`."""
    arguments = ["--hf-checkpoint", str(folder), "--tensor-model-parallel-size", "2", "--against-bridge"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.syspath_prepend(Path(__file__).parents[2] / "checkpoints_conversion")
        patch.setattr(sys, "argv", ["verify_roundtrip.py", *arguments])
        return importlib.import_module("verify_roundtrip").main(), output.getvalue()


def _compare_swapped(folder: Path) -> tuple[str, ...]:
    """What the comparison says of a table that takes the gate for the up projection."""

    def swapped(*args: Any, **options: Any) -> Iterator[ParameterEntry]:
        for entry in parameter_table(*args, **options):
            yield replace(entry, sources=entry.sources[::-1]) if entry.layout == "gate_up" else entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridge, "parameter_table", swapped)
        return compare_with_bridge(folder, read_model_shape(folder), tp_size=2).differences


def _refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        read_shape(folder)
    return str(error.value)


def _change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bridge")
    named: dict[str, tuple[str, dict[str, object]]] = {
        family: (family, {"tie_word_embeddings": family.startswith("gemma")}) for family in BOTH
    }
    named["llama-tied"] = ("llama", {"tie_word_embeddings": True})
    named["renamed"] = ("llama", {})
    named["gemma"] = named["extra"] = named["odd"] = ("gemma", {"tie_word_embeddings": True})
    named["untied"] = ("gemma", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "gemma", GemmaConfig)
        for name, (family, options) in named.items():
            save_tiny_model(root / name, family, **options)
        make_inputs(root / "gemma-chat", "gemma")
        save_tiny_model(root / "qwen2-bf16", "qwen2").bfloat16().save_pretrained(root / "qwen2-bf16")
    # A name of its own for a Llama, as some families have in transformers.
    _change_config(root / "renamed", model_type="internlm3")
    _change_config(root / "odd", use_bidirectional_attention=True)
    weights = load_file(root / "extra" / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.sinks": torch.ones(4)}, root / "extra" / "model.safetensors")
    for config in (OlmoeConfig, NemotronConfig):
        (root / config.model_type).mkdir()
        config(architectures=[f"{config.__name__.removesuffix('Config')}ForCausalLM"]).save_pretrained(
            root / config.model_type
        )
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path]) -> list[dict[str, Any]]:
    """What each of two ranks answered."""
    return run_ranks(2, _ask_bridge, folders, timeout_s=240.0)


@pytest.mark.parametrize("name", [*LOADED, "llama-tied"])
@pytest.mark.parametrize("tp", [2, 1])
def test_bridge_loads_the_same_bits_into_our_model(answers: list[dict[str, Any]], name: str, tp: int) -> None:
    assert [answer["loaded", name, tp] for answer in answers] == [[], []]


@pytest.mark.parametrize("name", [*BOTH, "llama-tied", "qwen2-bf16"])
def test_shards_of_every_rank_are_bridges(answers: list[dict[str, Any]], folders: dict[str, Path], name: str) -> None:
    table = full_table(read_model_shape(folders[name]))
    num_targets = sum(entry.group is not None for entry in table)
    tied = read_model_shape(folders[name]).tie_embeddings
    for (tp, pp), found in zip(SPLITS, answers[0]["compared", name], strict=True):
        assert found.differences == ()
        assert found.num_shards == tp * (len(table) + (tied and pp > 1))  # the head's stage has a copy of a tied one
        assert found.num_factor_maps == tp * num_targets


@pytest.mark.parametrize("name", [*BOTH, "llama-tied", "qwen2-bf16"])
def test_factors_go_the_same_way_as_weights(answers: list[dict[str, Any]], folders: dict[str, Path], name: str) -> None:
    num_targets = sum(entry.group is not None for entry in full_table(read_model_shape(folders[name])))
    assert answers[0]["factors", name] == [(num_targets, [])] * len(SPLITS)


def test_a_wrong_table_is_found_out(answers: list[dict[str, Any]]) -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(4)]
    assert answers[0]["swapped"] == tuple(
        line
        for name in names
        for line in (
            f"{name} of stage 0, rank 0 of 2",
            f"{name} of stage 0, rank 1 of 2",
            f"rows of {name} on rank 0 of 2 come from elsewhere for Megatron-Bridge",
            f"rows of {name} on rank 1 of 2 come from elsewhere for Megatron-Bridge",
        )
    )


@pytest.mark.parametrize(("name", "num_tensors", "num_shards"), [("qwen3", 47, 70), ("gemma", 38, 52)])
def test_the_command_compares_with_bridge_on_request(
    answers: list[dict[str, Any]], name: str, num_tensors: int, num_shards: int
) -> None:
    status, output = answers[0]["command"][name]
    assert status == 0
    assert output.splitlines() == [
        f"{num_tensors} of {num_tensors} tensors are the same to the last bit at TP 2 x PP 1",
        f"{num_shards} shards and 32 row maps of factors were compared with Megatron-Bridge at TP 2 x PP 1: 0 differences",
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rules_made_of_bridges_maps_are_those_of_our_table(answers: list[dict[str, Any]], family: str) -> None:
    known = FAMILIES[family]
    assert answers[0]["rules", family] == (set(known.layer_rules), known.outer_rules)


def test_a_family_that_our_table_lacks_is_read_through_bridge(
    answers: list[dict[str, Any]], folders: dict[str, Path]
) -> None:
    shapes = answers[0]["shapes"]
    assert replace(shapes["renamed"], family="llama") == shapes["llama"]
    validate_checkpoint(HFReader(folders["renamed"]), shapes["renamed"])
    gemma = shapes["gemma"]
    assert gemma.is_gemma and not gemma.post_norms and gemma.activation == "gelu_tanh"
    validate_checkpoint(HFReader(folders["gemma"]), gemma)
    assert {name for entry in full_table(gemma) for name in entry.hf_names} == set(HFReader(folders["gemma"]).names)


def test_a_family_through_bridge_computes_what_transformers_does(
    answers: list[dict[str, Any]], folders: dict[str, Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["gemma"], dtype=torch.float32, attn_implementation="eager")
    model = model.double()  # after loading: a scale that it makes in the dtype of the weights is fp32, as in training
    for found, response in zip(answers[1]["logprobs"], make_responses(), strict=True):
        ids = torch.tensor([*response.prompt_ids, *response.response_ids])
        first = len(response.prompt_ids) - 1
        with torch.no_grad(), Float64Everywhere():
            logits = model(input_ids=ids[None]).logits[0, first:-1]
        expected = logits.log_softmax(-1).gather(1, ids[first + 1 :, None])[:, 0]
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)  # fp64, a few hundred products


def test_a_family_through_bridge_is_trained_and_exported(
    answers: list[dict[str, Any]], folders: dict[str, Path]
) -> None:
    # Trainer and engine merge the same factors into the same masters, row by row: equal to the last bit.
    assert [answer["differences"] for answer in answers] == [[0, 0], [0, 0]]
    before = load_file(folders["gemma-chat"] / "model" / "model.safetensors")
    after = load_file(folders["gemma-chat"] / "run" / "huggingface" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("olmoe", ["num_moe_experts = 64", "transformer_layer_spec = olmoe_layer_spec"]),
        ("nemotron", ["normalization = LayerNorm (must be RMSNorm)", "gated_linear_unit = False"]),
        ("untied", ["Megatron-Bridge has no map for output_layer.weight"]),
        ("extra", ["the folder holds self_attn.sinks, which no rule reads"]),
        ("odd", ["use_bidirectional_attention = True is not supported: only causal attention is"]),
    ],
)
def test_what_is_refused_is_named(answers: list[dict[str, Any]], name: str, problems: list[str]) -> None:
    message = answers[0]["refused"][name]
    assert re.search(
        r"model_type '\w+' is not a supported family; supported are gemma2, .*only plain decoders", message
    )
    assert [problem for problem in problems if problem not in message] == []


def test_without_bridge_the_error_says_how_to_install_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "is_installed", lambda: False)
    with pytest.raises(
        ValueError,
        match=r"model_type 'gemma' is not a supported family.*pip install --no-deps megatron-bridge==0\.6\.2",
    ):
        read_shape(folders["gemma"])
