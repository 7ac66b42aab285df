"""Training checkpoints: the same state bit for bit in every layout, metrics that go on, and Megatron reading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_logra.checkpoint.folders import checkpoint_folder
from megatron_logra.checkpoint.torch_dist import Block, load_blocks, read_stored
from megatron_logra.checkpoint.training import CheckpointWriter, Trained, load_checkpoint
from megatron_logra.hf.config import read_model_shape
from megatron_logra.kl.controller import KLController
from megatron_logra.mcore.build import build_optimizer
from megatron_logra.mcore.dense import DenseOptimizer
from megatron_logra.optim.dense import DenseSettings
from megatron_logra.optim.logra import LograSettings
from megatron_logra.optim.schedule import LearningRateSchedule
from megatron_logra.train_step import ProbeSettings, UpdateSettings
from tests.distributed.layouts import Layout, build_weights, take_step
from tests.distributed.ranks import RankError, run_ranks
from tests.tiny_models import make_tiny_model, save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny_model(root / "tied", "llama", tie_word_embeddings=True)
    save_tiny_model(root / "biased", "qwen2")
    save_tiny_model(root / "moe", "qwen3_moe")
    return {path.name: path for path in root.iterdir()}


def run_session(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    setting: dict[str, Any],
    *,
    load: Path | None = None,
    save: Path | None = None,
    num_steps: int = 0,
    in_background: bool = False,
    logra_rank: int = 8,
) -> list[dict[str, float]]:
    """A part of a run: continue from `load`, make steps, save; the metrics of each step."""
    options, dtype = dict(setting), setting.get("dtype", torch.float32)
    adam, distributed = options.pop("adam", False), options.pop("distributed", False)
    options.pop("dtype", None)
    policy = build_weights(folder, layout, dtype, train_all=adam, **options)
    schedule = LearningRateSchedule(lr=1e-3)
    trained = Trained(
        policy,
        None if adam else build_optimizer(policy, LograSettings(rank=logra_rank, update_ratio=1e-3)),
        DenseOptimizer(policy, DenseSettings(schedule=schedule, distributed=distributed))
        if adam or options.get("train_non_targets")
        else None,
    )
    controller = KLController(budget=1e-3, budget_final=1e-4, schedule_steps=10)
    if load is not None:
        controller.load_state_dict(load_checkpoint(load, trained, CPU)["controller"])
    metrics = []
    for _ in range(num_steps):
        outcome = take_step(
            policy,
            trained.optimizer,
            controller=None if adam else controller,
            settings=UpdateSettings(micro_batch_size=layout.micro_batch_size, temperature=0.8),
            probe=ProbeSettings(num_responses=4 // layout.dp),
            measure=True,
            dense=trained.dense,
        )
        metrics.append(outcome.metrics)
    if save is not None:
        counting = trained.optimizer or trained.dense
        assert counting is not None
        writer = CheckpointWriter(save, in_background=in_background)
        state = {"num_updates": counting.num_updates, "controller": controller.state_dict()}
        writer.save(counting.num_updates, trained, state)
        if in_background:  # what is saved is the state of this moment, whatever happens to it while it is written
            for _, weight in policy.model.named_parameters():
                weight.detach().zero_()
        writer.finish()
    return metrics


def contents(place: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    whole = {key: torch.zeros(stored.shape, dtype=stored.dtype) for key, stored in read_stored(place).items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in whole.items()}
    blocks = [
        Block(key, shapes[key], (0,) * len(shapes[key]), shapes[key], tensor.dtype, tensor)
        for key, tensor in whole.items()
    ]
    load_blocks(place, blocks)
    return whole


def assert_same_contents(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        vocabulary = (
            130 if "word_embeddings" in key or "output_layer" in key else tensor.shape[0]
        )  # the rest is padding
        assert torch.equal(tensor[:vocabulary], second[key][:vocabulary]), key


SPLIT = {"dtype": torch.bfloat16, "master": "split"}
SHARED_SPLIT = SPLIT | {"shard_master": True}
NON_TARGETS = SPLIT | {"train_non_targets": True}
SOME_LAYERS = NON_TARGETS | {"targets": ("*.o_proj", "model.layers.[12].mlp.*")}
ADAM = {"adam": True}
ADAM_BF16 = ADAM | {"dtype": torch.bfloat16}
ADAM_SHARED = ADAM_BF16 | {"distributed": True}
SAVED: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "dense": ("tied", Layout(tp=2, pp=2), SPLIT),
    "fp32 master": ("biased", Layout(tp=2, dp=2), {"dtype": torch.bfloat16, "master": "fp32"}),
    "experts": ("moe", Layout(tp=2, dp=2, ep=2, etp=2, sp=True), SPLIT),
    "non-targets": ("biased", Layout(tp=2, pp=2, sp=True), NON_TARGETS),
    "some layers": ("biased", Layout(tp=2), SOME_LAYERS),
    "adam": ("tied", Layout(tp=2, dp=2), ADAM_SHARED),
    "adam fp32": ("moe", Layout(tp=2, pp=2, sp=True), ADAM),
}
LOADED: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "tp1": ("dense", Layout(), SPLIT),
    "tp4-sp": ("dense", Layout(tp=4, sp=True), SPLIT),
    "pp4": ("dense", Layout(pp=4), SPLIT),
    "dp4, divided": ("dense", Layout(dp=4), SHARED_SPLIT),
    "pp2-vpp2-dp2, divided": ("dense", Layout(pp=2, dp=2, vpp=2, micro_batch_size=2), SHARED_SPLIT),
    "tp2-cp2": ("dense", Layout(tp=2, cp=2, sp=True), SPLIT),
    "fp32 master, divided": (
        "fp32 master",
        Layout(dp=2, pp=2),
        {"dtype": torch.bfloat16, "master": "fp32", "shard_master": True},
    ),
    "experts on one rank": ("experts", Layout(), SPLIT),
    "experts over ep4": ("experts", Layout(dp=4, ep=4), SHARED_SPLIT),
    "non-targets tp4": ("non-targets", Layout(tp=4), NON_TARGETS),
    "non-targets, divided": ("non-targets", Layout(dp=2), NON_TARGETS | {"distributed": True}),
    "some layers pp2": ("some layers", Layout(pp=2), SOME_LAYERS),
    "adam tp1": ("adam", Layout(), ADAM_BF16),
    "adam dp4, divided": ("adam", Layout(dp=4), ADAM_SHARED),
    "adam pp2-tp2, divided": ("adam", Layout(tp=2, pp=2), ADAM_SHARED),
    "adam experts dp2, divided": ("adam fp32", Layout(dp=2, ep=2), ADAM | {"distributed": True}),
}


@pytest.fixture(scope="module")
def saved(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves each state of SAVED once, after two updates."""
    places: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in places:
            places[name] = tmp_path_factory.mktemp("saved")
            family, layout, setting = SAVED[name]
            keywords = {"save": places[name], "num_steps": 2}
            run_ranks(layout.world_size, _session, folders[family], layout, setting, keywords)
        return places[name]

    return get


def _session(
    rank: int, world_size: int, folder: Path, layout: Layout, setting: dict[str, Any], keywords: dict[str, Any]
) -> list[dict[str, float]]:
    return run_session(rank, world_size, folder, layout, setting, **keywords)


@pytest.mark.parametrize("name", LOADED)
def test_a_state_is_the_same_in_every_layout(folders: dict[str, Path], saved: Any, tmp_path: Path, name: str) -> None:
    """Loaded in another layout and saved from there, every tensor is what it was, to the last bit."""
    source, layout, setting = LOADED[name]
    keywords = {"load": saved(source), "save": tmp_path}
    run_ranks(layout.world_size, _session, folders[SAVED[source][0]], layout, setting, keywords)
    before, after = (contents(checkpoint_folder(place, 2)) for place in (saved(source), tmp_path))
    assert_same_contents(before, after)
    weights = before["decoder.layers.self_attention.linear_qkv.weight"]
    assert weights.float().abs().min() < weights.float().abs().max()
    kinds = {key.split(".")[1] for key in before if key.startswith("optimizer.")}
    expected = {"exp_avg", "exp_avg_sq"} if setting.get("adam") else {"moment2"}
    assert expected <= kinds


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance", "layouts"),
    [
        ("tied", torch.float64, 1e-10, (Layout(tp=2, pp=2), Layout(dp=2, sp=False), Layout(tp=4, sp=True))),
        ("biased", torch.float32, 1e-5, (Layout(tp=2, dp=2), Layout(pp=4), Layout(tp=2, pp=2))),
        ("moe", torch.float64, 1e-10, (Layout(tp=2, dp=2, ep=2, etp=2, sp=True), Layout(pp=2), Layout(dp=2, ep=2))),
    ],
    ids=["tied-fp64", "biased-fp32", "moe-fp64"],
)
def test_a_run_that_changes_its_layout_goes_on_as_if_it_had_not(
    folders: dict[str, Path],
    tmp_path: Path,
    family: str,
    dtype: torch.dtype,
    tolerance: float,
    layouts: tuple[Layout, Layout, Layout],
) -> None:
    """Five steps at one layout, against one step, then two and two more at others."""
    setting, (first, second, third) = {"dtype": dtype}, layouts
    arguments = (folders[family], first, setting, {"num_steps": 5})
    expected = run_ranks(first.world_size, _session, *arguments)[0]
    parts = [
        (first, {"num_steps": 1, "save": tmp_path}),
        (second, {"num_steps": 2, "load": tmp_path, "save": tmp_path}),
        (third, {"num_steps": 2, "load": tmp_path}),
    ]
    found = [
        metrics
        for layout, keywords in parts
        for metrics in run_ranks(layout.world_size, _session, folders[family], layout, setting, keywords)[0]
    ]
    for step, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        for metric in (
            "logra/sketch_norm",
            "logra/predicted_kl",
            "logra/alpha",
            "logra/actual_kl",
            "logra/effective_budget",
        ):
            # The actual KL in fp32 is a difference of logits: about 1e-4 of itself at these KLs.
            allowed = 1e-3 if metric == "logra/actual_kl" and dtype == torch.float32 else tolerance
            assert got[metric] == pytest.approx(wanted[metric], rel=allowed), (step, metric)


def test_background_saves_hold_the_state_of_their_moment(folders: dict[str, Path], saved: Any, tmp_path: Path) -> None:
    _, layout, setting = SAVED["dense"]
    keywords = {"load": saved("dense"), "save": tmp_path, "in_background": True}
    run_ranks(layout.world_size, _session, folders["tied"], layout, setting, keywords)
    assert_same_contents(contents(checkpoint_folder(saved("dense"), 2)), contents(checkpoint_folder(tmp_path, 2)))


@pytest.mark.parametrize(
    ("setting", "logra_rank", "message"),
    [
        (SPLIT, 4, r"--logra-rank 8 in the checkpoint and 4 in this run"),
        ({}, 8, r"--logra-master split in the checkpoint and weights in this run; precision bfloat16 .* float32"),
        (ADAM_BF16, 8, r"--logra-rank 8 in the checkpoint and None in this run.*dense training False .* True"),
    ],
    ids=["rank", "precision", "optimizer"],
)
def test_a_checkpoint_of_other_settings_is_refused_on_all_ranks(
    folders: dict[str, Path], saved: Any, setting: dict[str, Any], logra_rank: int, message: str
) -> None:
    keywords = {"load": saved("dense"), "logra_rank": logra_rank}
    with pytest.raises(RankError, match=f"(?s){message}.*the parallel sizes and the number of ranks may differ"):
        run_ranks(2, _session, folders["tied"], Layout(tp=2), setting, keywords)


def _megatron_logits(rank: int, world_size: int, folder: Path, place: Path, tokens: Tensor, layout: Layout) -> Any:
    """Logits of Megatron's own GPT model after its own `dist_checkpointing.load`, gathered over the vocabulary."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    policy = build_weights(folder, layout, torch.float32)
    shape = policy.shape
    model = GPTModel(
        policy.model.config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=policy.model.last.vocab_size,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
    )
    asked = model.sharded_state_dict()
    model.load_state_dict(dist_checkpointing.load({"model": asked}, str(place))["model"])
    # What this package says of every tensor agrees with what Megatron says of it.
    ours = {(key, stored.shape) for key, stored in read_stored(place).items() if not key.startswith("optimizer.")}
    apply_factories(asked)
    theirs = {(part.key, part.global_shape) for part in asked.values() if isinstance(part, ShardedTensor)}
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
        logits = gather_from_tensor_model_parallel_region(model(tokens, positions, mask))
    return logits, theirs <= ours


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_megatron_loads_a_checkpoint_into_its_own_model(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_tiny_model(family, tie_word_embeddings=tied)
    save_tiny_model(tmp_path / "hf", family, tie_word_embeddings=tied)
    layout = Layout(pp=2, tp=2)
    run_ranks(4, _session, tmp_path / "hf", layout, {}, {"save": tmp_path / "saved"})
    tokens = torch.randint(0, 130, (2, 9), generator=torch.Generator().manual_seed(0))
    place = checkpoint_folder(tmp_path / "saved", 0)
    results = run_ranks(2, _megatron_logits, tmp_path / "hf", place, tokens, Layout(tp=2))
    with torch.no_grad():
        expected = model(tokens).logits
    for logits, agree in results:
        assert agree
        torch.testing.assert_close(logits[..., :130], expected, rtol=1e-5, atol=1e-4)
    assert read_model_shape(tmp_path / "hf").tie_embeddings == tied
