"""Sampling against a slow reference, the embedded engine against `transformers`, and packets that must be refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_logra.hf.config import read_model_shape
from megatron_logra.hf.table import full_table
from megatron_logra.optim.merge import round_factor
from megatron_logra.rollout.embedded import EmbeddedEngine
from megatron_logra.rollout.engine import SamplingParams
from megatron_logra.rollout.sampling import TOP_P_CANDIDATES, sample_tokens
from megatron_logra.sync.packet import FactorEntry, FactorPacket, PacketRefused, join_packets
from megatron_logra.sync.sender import group_widths, target_groups
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

RANK = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "llama", vocab_size=260)
    save_tiny_tokenizer(path)
    return path


def _prompts(number: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (1 + i % 5,), generator=generator).tolist() for i in range(number)]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    model = save_tiny_model(folder, "llama", vocab_size=260)
    save_tiny_tokenizer(folder)
    prompts = _prompts(7)
    for prompt, generation in zip(
        prompts, engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=9)), strict=True
    ):
        ids = torch.tensor([prompt])
        for token, logprob in zip(generation.token_ids, generation.logprobs, strict=True):
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, -1]
            assert token == int(logits.argmax())
            assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 20), (0.7, 20)])
def test_a_request_does_not_depend_on_its_batch(folder: Path, top_p: float, top_k: int) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=top_p, top_k=top_k, max_new_tokens=6, seed=5, stop_token_ids=(3, 4, 5)
    )
    prompts = _prompts(12)
    together = EmbeddedEngine(folder, batch_size=12).generate(prompts, params, request_ids=range(100, 112))
    apart = EmbeddedEngine(folder, batch_size=1).generate(prompts[::-1], params, request_ids=range(111, 99, -1))
    assert [g.token_ids for g in together] == [g.token_ids for g in apart[::-1]]
    same_prompt = EmbeddedEngine(folder).generate([prompts[4]] * 6, params)
    assert len({tuple(g.token_ids) for g in same_prompt}) > 1


def test_sampling_follows_the_softmax(folder: Path) -> None:
    engine = EmbeddedEngine(folder, batch_size=512)
    prompt, number = [7, 8], 4000
    draws = engine.generate([prompt] * number, SamplingParams(temperature=1.3, max_new_tokens=1, seed=2))
    model = save_tiny_model(folder, "llama", vocab_size=260)
    save_tiny_tokenizer(folder)
    with torch.no_grad():
        p = (model(input_ids=torch.tensor([prompt])).logits[0, -1] / 1.3).softmax(-1)
    counts = torch.bincount(torch.tensor([g.token_ids[0] for g in draws]), minlength=260) / number
    # Five standard deviations of each share, plus one draw for the rarest tokens.
    assert ((counts - p).abs() <= 5 * (p * (1 - p) / number).sqrt() + 1 / number).all()


def _reference_token(logits: list[float], uniform: float, temperature: float, top_p: float, top_k: int) -> int:
    """One row, one token at a time in Python's floats: vLLM's order, temperature, then top-k, then top-p of the rest."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = set(order)
    if top_k:
        kept = {token for token in order if logits[token] >= logits[order[min(top_k, len(order)) - 1]]}
    weight = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in kept}
    if top_p < 1:
        total, before = math.fsum(weight.values()), 0.0
        for token in [token for token in order if token in kept]:
            if before >= top_p * total:
                kept.discard(token)
            before += weight[token]
    # The walk goes up the vocabulary, or down the probabilities once these had to be sorted.
    walk = [token for token in (order if top_p < 1 else range(len(logits))) if token in kept]
    goal, reached = uniform * math.fsum(weight[token] for token in walk), 0.0
    for token in walk:
        reached += weight[token]
        if reached > goal:
            return token
    return walk[-1]


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 7, TOP_P_CANDIDATES + 50, 700, 5000])
def test_top_k_and_top_p_pick_the_tokens_of_a_slow_reference(top_k: int, top_p: float) -> None:
    """fp64 on both sides: a number falls between two sums of 700 terms, which differ by 1e-13, with that probability."""
    generator = torch.Generator().manual_seed(top_k)
    # Rows from nearly greedy to nearly uniform: the last ones need more candidates than are sorted at first.
    scale = torch.logspace(1, -2, 24, dtype=torch.float64)[:, None]
    logits = torch.randn(24, 700, generator=generator, dtype=torch.float64) * scale
    uniform = torch.rand(24, generator=generator, dtype=torch.float64)
    token, logprob = sample_tokens(logits, uniform, temperature=0.7, top_p=top_p, top_k=top_k)
    expected = [
        _reference_token(row, number, 0.7, top_p, top_k)
        for row, number in zip(logits.tolist(), uniform.tolist(), strict=True)
    ]
    assert token.tolist() == expected
    full = (logits / 0.7).log_softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob, full, rtol=0, atol=1e-12)
    for row in range(24):
        one = slice(row, row + 1)
        alone, _ = sample_tokens(logits[one], uniform[one], temperature=0.7, top_p=top_p, top_k=top_k)
        assert alone.tolist() == expected[one]


def test_tokens_that_tie_with_the_kth_stay() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, 1.0, -9.0]]).expand(400, -1)
    uniform = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1]
    token, _ = sample_tokens(logits, uniform, temperature=1.0, top_k=2)
    assert set(token.tolist()) == {0, 2, 3}


def test_a_top_k_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k must be >= 0"):
        SamplingParams(top_k=-1)


def _packet(folder: Path, version: int = 0) -> FactorPacket:
    tables = [full_table(read_model_shape(folder))]
    generator = torch.Generator().manual_seed(version)
    entries = []
    for entry in tables[0]:
        for name in entry.hf_names if entry.group else ():
            direction = torch.randn(entry.hf_shapes[name][0], RANK, generator=generator) * 1e-3
            entries.append(FactorEntry(name, entry.group or "", round_factor(direction, 1.0, RANK)))
    assert len(entries) == len(target_groups(tables))
    widths = group_widths(tables)
    return FactorPacket(42, version, RANK, "rademacher", widths, version, version + 1, entries=tuple(entries))


def test_bf16_engine_stays_the_rounded_fp32_engine(folder: Path) -> None:
    narrow, wide = EmbeddedEngine(folder, dtype=torch.bfloat16), EmbeddedEngine(folder)
    for version in range(3):
        packet = FactorPacket.from_bytes(_packet(folder, version).to_bytes())
        narrow.apply_factors(packet)
        wide.apply_factors(join_packets(packet.split(4000)))
    for name in narrow.weights():
        if name.endswith("_proj.weight"):
            high = narrow.masters()[name].join()  # type: ignore[union-attr]
            assert torch.equal(high, wide.weights()[name]), name
    assert narrow.policy_version == wide.policy_version == 3


def _spoil(packet: FactorPacket, how: str) -> FactorPacket:
    first, *rest = packet.entries
    spoilt = {
        "missing": {"entries": tuple(rest)},
        "twice": {"entries": (first, first, *rest)},
        "unknown": {"entries": (replace(first, name="model.layers.9.mlp.up_proj.weight"), *rest)},
        "mislabelled": {"entries": (replace(first, group=rest[-1].group), *rest)},
        "shape": {"entries": (replace(first, factor_OR=first.factor_OR[1:]), *rest)},
        "infinite": {"entries": (replace(first, factor_OR=first.factor_OR / 0), *rest)},
        "early": {"version_before": 1, "version_after": 2},
        "rank": {"rank": RANK + 1},
    }
    return replace(packet, **spoilt[how])


@pytest.mark.parametrize("how", ["missing", "twice", "unknown", "mislabelled", "shape", "infinite", "early", "rank"])
def test_a_packet_that_does_not_fit_changes_nothing(folder: Path, how: str) -> None:
    engine = EmbeddedEngine(folder)
    before = engine.weights_checksum()
    with pytest.raises(PacketRefused):
        engine.apply_factors(_spoil(_packet(folder), how))
    assert engine.weights_checksum() == before and engine.policy_version == 0
    engine.apply_factors(_packet(folder))
    with pytest.raises(PacketRefused, match="version"):
        engine.apply_factors(_packet(folder))
    assert engine.weights_checksum() != before and engine.policy_version == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_damaged_bytes_are_refused(folder: Path, damage: str) -> None:
    data = bytearray(_packet(folder).to_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[-3] ^= 1
    else:
        data = bytearray(b"not a packet at all")
    with pytest.raises(PacketRefused):
        FactorPacket.from_bytes(bytes(data))
