"""The embedded engine samples models with windows, soft-capping and two kinds of layers as transformers computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_logra.rollout.embedded import EmbeddedEngine
from megatron_logra.rollout.engine import SamplingParams
from tests.tiny_models import ATTENTION, save_tiny_model


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in ATTENTION),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
        ("mixtral", {"sliding_window": 4}),
    ],
)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    tmp_path: Path, family: str, overrides: dict[str, object]
) -> None:
    model = save_tiny_model(tmp_path, family, **overrides)
    generator = torch.Generator().manual_seed(1)
    # Shorter and longer than the window, of one length (no padding) and of several.
    for lengths in ([9, 9], [1, 3, 4, 9, 14]):
        prompts = [torch.randint(0, 130, (length,), generator=generator).tolist() for length in lengths]
        generations = EmbeddedEngine(tmp_path).generate(prompts, SamplingParams(temperature=0, max_new_tokens=8))
        for prompt, generation in zip(prompts, generations, strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *generation.token_ids]])).logits[
                    0, len(prompt) - 1 : -1
                ]
            assert generation.token_ids == logits.argmax(-1).tolist()
            expected = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
            # fp32 attention in another order of summation.
            torch.testing.assert_close(torch.tensor(generation.logprobs), expected, rtol=0, atol=1e-4)
