"""The distributed sketch and the predicted KL against other people's autograd on the same Hugging Face model (fp64).

The reference never sees Megatron, our linears or our collectives: `transformers` computes the logits, PyTorch's own
backward the dense gradient, `torch.func.jvp` the directional derivative, and plain sums the KL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_logra.hf.config import ModelShape, read_model_shape
from megatron_logra.hf.loaded import checkpoint_views
from megatron_logra.hf.table import full_table
from megatron_logra.mcore.initialize import shutdown_model_parallel
from megatron_logra.mcore.tangent import compute_predicted_kl
from megatron_logra.parallel.reductions import reduce_sketches_, sum_over
from megatron_logra.rl.advantages import response_advantages
from megatron_logra.rl.batching import Response
from megatron_logra.rl.losses import grpo_token_loss
from megatron_logra.sketch.projection import make_projection
from megatron_logra.train_step import build_own_batches
from tests.distributed.layouts import Layout, build, join_blocks, keep_blocks, make_responses
from tests.distributed.ranks import run_ranks
from tests.tiny_models import EXPERTS, Float64Everywhere, make_tiny_model, save_tiny_model

RANK, SEED, TEMPERATURE = 8, 42, 0.8
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"]
# They differ from those in what a layer computes, not in how it is laid out, so fewer layouts do.
OTHER_FAMILIES = ["mistral", "phi3", "gemma2", "gemma3_text"]
KINDS = ("full_attention", "sliding_attention")
OTHER_LAYOUTS = [Layout(), Layout(tp=2, sp=True), Layout(pp=2, micro_batch_size=2)]


def _cases(*layouts: Layout) -> pytest.MarkDecorator:
    """Each of the first families in all of `layouts`, the others in theirs."""
    pairs = [(family, layout) for family in FAMILIES for layout in layouts]
    pairs += [(family, layout) for family in OTHER_FAMILIES for layout in OTHER_LAYOUTS]
    names = [f"{family}-{layout}" for family, layout in pairs]
    return pytest.mark.parametrize(("case", "layout"), pairs, ids=names, indirect=["case"])


def _shapes(folder: Path) -> dict[str, Any]:
    return {name: size for entry in full_table(read_model_shape(folder)) for name, size in entry.hf_shapes.items()}


def _sketch(rank: int, world_size: int, folder: Path, layout: Layout) -> dict[str, Any]:
    """Sketches of one accumulation, then directions and the mean predicted KL."""
    policy, optimizer = build(folder, layout, torch.float64, logra_options={"rank": RANK})
    responses = make_responses()
    advantages = response_advantages(responses).tolist()
    num_tokens = sum(len(response.response_ids) for response in responses)
    _, batches = build_own_batches(policy, responses, advantages, micro_batch_size=layout.micro_batch_size)

    def loss(logprob_N: Tensor, batch: Any) -> Tensor:
        old_N = batch.generation_logprob_N
        return grpo_token_loss(logprob_N, old_N, batch.advantage_N, clip_low=0.2, clip_high=0.2)[0].sum() / num_tokens

    policy.accumulate(batches, loss, temperature=TEMPERATURE)
    reduce_sketches_(optimizer.buffer, policy.groups)
    result: dict[str, Any] = {"sketches": {}, "directions": {}}
    keep_blocks(result["sketches"], policy, "sketch")
    optimizer.compute_direction_()
    keep_blocks(result["directions"], policy, "sketch")
    _, (probe,) = build_own_batches(policy, responses, [0.0] * len(responses))
    kl = compute_predicted_kl(policy, probe, temperature=TEMPERATURE)
    counts = policy.groups.is_last_stage and policy.groups.tp_rank == 0
    result["kl"] = (sum_over(kl * counts, policy.groups.world) / num_tokens).item()
    return result


def _logprobs(rank: int, world_size: int, folder: Path, layout: Layout) -> dict[torch.dtype, list[Tensor]]:
    """Log-probabilities of each response, on the last pipeline stage."""
    logprobs = {}
    for dtype in TOLERANCES:
        policy, _ = build(folder, layout, dtype)
        responses = make_responses()
        _, batches = build_own_batches(policy, responses, [0.0] * len(responses), micro_batch_size=1)
        outputs = policy.compute_logprobs(batches, temperature=TEMPERATURE)
        logprobs[dtype] = [output.logprob_N for output in outputs]
        shutdown_model_parallel()
    return logprobs


def _token_logprobs(logits_TV: Tensor, response: Response) -> Tensor:
    ids = torch.tensor([*response.prompt_ids, *response.response_ids])
    first = len(response.prompt_ids) - 1
    rows = (logits_TV[first:-1] / TEMPERATURE).log_softmax(-1)
    return rows.gather(1, ids[first + 1 :, None])[:, 0]


def _logits(model: PreTrainedModel, response: Response) -> Tensor:
    ids = torch.tensor([[*response.prompt_ids, *response.response_ids]])
    with Float64Everywhere():
        return model(input_ids=ids).logits[0]


def _dense_gradients(model: PreTrainedModel, shape: ModelShape) -> tuple[dict[str, Tensor], list[Tensor]]:
    responses = make_responses()
    advantages = response_advantages(responses)
    num_tokens = sum(len(response.response_ids) for response in responses)
    logprobs = []
    for response, advantage in zip(responses, advantages, strict=True):
        logprob_N = _token_logprobs(_logits(model, response), response)
        ratio = (logprob_N - torch.tensor(response.generation_logprobs, dtype=torch.float64)).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-gain.sum() / num_tokens).backward()
        logprobs.append(logprob_N.detach())
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return checkpoint_views(gradients, shape), logprobs


def _targets(folder: Path) -> Iterator[tuple[str, str, int]]:
    """(Hugging Face name, projection group, width) of every target."""
    for entry in full_table(read_model_shape(folder)):
        if entry.group is not None and entry.num_columns is not None:
            for name in entry.hf_names:
                yield name, entry.group, entry.num_columns


def _projection(group: str, width: int) -> Tensor:
    return make_projection(SEED, 0, group, RANK, width, dtype=torch.float64)


def _mean_over_probe(per_response: Callable[[Response], Tensor]) -> float:
    responses = make_responses()
    num_tokens = sum(len(response.response_ids) for response in responses)
    return sum(per_response(response).sum().item() for response in responses) / num_tokens


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    """What is known of each family, made when first needed."""
    return {}


@pytest.fixture
def case(
    request: pytest.FixtureRequest, cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    family = request.param
    if family not in cases:
        folder = tmp_path_factory.mktemp(family)
        save_tiny_model(folder, family)
        model = make_tiny_model(family).double()
        gradients, logprobs = _dense_gradients(model, read_model_shape(folder))
        cases[family] = {
            "family": family,
            "folder": folder,
            "model": model,
            "gradients": gradients,
            "logprobs": logprobs,
            "runs": {},
        }
    return cases[family]


def _run(case: dict[str, Any], function: Callable[..., Any], layout: Layout, *args: Any) -> list[Any]:
    """Run once on the ranks of the layout; Megatron trains experts under tensor parallelism with sequence parallelism only."""
    if case["family"] in EXPERTS:
        layout = replace(layout, sp=layout.tp > 1)
    key = (function, layout, args)
    if key not in case["runs"]:
        case["runs"][key] = run_ranks(layout.world_size, function, case["folder"], layout, *args)
    return case["runs"][key]


@_cases(Layout(), Layout(tp=2, sp=True), Layout(tp=2, pp=2, micro_batch_size=4))
def test_sketches_are_dense_gradients_times_the_projection(case: dict[str, Any], layout: Layout) -> None:
    results = _run(case, _sketch, layout)
    sketches = join_blocks(results, "sketches", _shapes(case["folder"]))
    names = [name for name, _, _ in _targets(case["folder"])]
    assert sorted(sketches) == sorted(names)
    for name, group, width in _targets(case["folder"]):
        expected = case["gradients"][name] @ _projection(group, width).T
        # fp64, a few hundred products; an expert without tokens must be exactly 0.
        assert (sketches[name] - expected).norm() <= 1e-10 * expected.norm(), name


@_cases(Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=4), Layout(tp=2, pp=2))
def test_logprobs_are_those_of_transformers(case: dict[str, Any], layout: Layout) -> None:
    # The last rank belongs to the last pipeline stage in every layout.
    for dtype, logprobs in _run(case, _logprobs, layout)[-1].items():
        for found, expected in zip(logprobs, case["logprobs"], strict=True):
            assert torch.allclose(found.double(), expected, rtol=0, atol=TOLERANCES[dtype]), dtype


@_cases(Layout(), Layout(tp=2, pp=2, sp=True))
def test_predicted_kl_is_the_derivative_and_the_limit_of_the_exact_kl(case: dict[str, Any], layout: Layout) -> None:
    results = _run(case, _sketch, layout)
    directions = join_blocks(results, "directions", _shapes(case["folder"]))
    if "kl" not in case:
        case["directions"], case["kl"] = directions, _reference_kl(case, directions)
    for name, direction in directions.items():
        assert (direction - case["directions"][name]).norm() <= 1e-10 * direction.norm(), name
    derivative, limit = case["kl"]
    for result in results:
        assert result["kl"] == pytest.approx(derivative, rel=1e-10)
        assert result["kl"] == pytest.approx(limit, rel=1e-3)


def _reference_kl(case: dict[str, Any], directions: dict[str, Tensor]) -> tuple[float, float]:
    """Mean over the probe of `Var(dz) / 2` by forward mode, and of the exact KL's second difference."""
    model = case["model"]
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    change = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    views = checkpoint_views(change, read_model_shape(case["folder"]))
    for name, group, width in _targets(case["folder"]):
        views[name].copy_(-directions[name] @ _projection(group, width))

    def logits_at(step: Tensor, response: Response) -> Tensor:
        moved = {name: weight + step * change[name] for name, weight in weights.items()}
        ids = torch.tensor([[*response.prompt_ids, *response.response_ids]])
        with Float64Everywhere():
            output = torch.func.functional_call(model, moved, kwargs={"input_ids": ids, "use_cache": False})
        first = len(response.prompt_ids) - 1
        return output.logits[0, first:-1] / TEMPERATURE

    def predicted(response: Response) -> Tensor:
        zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        logits, tangent = torch.func.jvp(lambda step: logits_at(step, response), (zero,), (one,))
        p = logits.softmax(-1)
        return ((p * tangent.square()).sum(-1) - (p * tangent).sum(-1).square()) / 2

    derivative = _mean_over_probe(predicted)
    # The second difference of KL(p_0 || p_h) at h and -h: its error falls with h^2, and so does cancellation grow.
    # A step so large that a token changes its expert would leave the derivative's domain.
    h = (1e-5 if case["family"] in EXPERTS else 1e-3) / max(1e-12, derivative) ** 0.5

    def exact(response: Response) -> Tensor:
        with torch.no_grad():
            old = logits_at(torch.zeros(()), response).log_softmax(-1)
            both = [logits_at(torch.tensor(sign * h), response).log_softmax(-1) for sign in (1.0, -1.0)]
            return sum((old.exp() * (old - new)).sum(-1) for new in both) / (2 * h * h)  # type: ignore[return-value]

    return derivative, _mean_over_probe(exact)


VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": [KINDS[1], KINDS[0]] * 2}),
    ("mixtral", {"sliding_window": 4}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ("gemma3_text", {"final_logit_softcapping": 2.0, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(
    ("family", "change"), VARIANTS, ids=[f"{family}-{next(iter(keys))}" for family, keys in VARIANTS]
)
def test_logprobs_of_other_settings(tmp_path: Path, family: str, change: dict[str, object]) -> None:
    model = save_tiny_model(tmp_path, family, **change).double()
    logprobs = run_ranks(1, _logprobs, tmp_path, Layout())[0][torch.float64]
    with torch.no_grad():
        for found, response in zip(logprobs, make_responses(), strict=True):
            assert torch.allclose(found, _token_logprobs(_logits(model, response), response), rtol=0, atol=1e-10)


# What each family's own settings do, each replaced by what would have no effect.
WITHOUT = [
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 4}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3_text", {"sliding_window": 128}),
    ("gemma3_text", {"rope_parameters": {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in KINDS}}),
]


@pytest.mark.parametrize(
    ("family", "change"), WITHOUT, ids=[f"{family}-{next(iter(keys))}" for family, keys in WITHOUT]
)
def test_the_settings_of_the_small_models_matter(family: str, change: dict[str, object]) -> None:
    # Otherwise agreement with transformers would say nothing about them.
    (response,) = [response for response in make_responses() if len(response.response_ids) == 17]
    with torch.no_grad():
        found, without = (
            _token_logprobs(_logits(make_tiny_model(family, **options).double(), response), response)  # type: ignore[arg-type]
            for options in ({}, change)
        )
    assert (found - without).abs().max() > 1e-3
