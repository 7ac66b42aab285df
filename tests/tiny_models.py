"""Makes small random Hugging Face models of the supported families, with `transformers` itself."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_tiny_model(family: str, *, seed: int = 0, scale: float = 4.0, **overrides: object) -> PreTrainedModel:
    """A model with 4 layers, 4 heads, 2 KV heads, vocabulary 130, in fp32.

    Weights are drawn `scale` times as wide as a fresh model's, so that the policy is far from uniform and wrong
    orders of rows or heads show in its output. Biases and norms are random too.
    """
    settings: dict[str, object] = dict(
        vocab_size=130,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    if family == "qwen2":
        settings.pop("head_dim")
    settings |= overrides
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    return model.eval()


def save_tiny_model(folder: Path, family: str, **overrides: object) -> PreTrainedModel:
    """Save a tiny model as a Hugging Face folder and return it."""
    model = make_tiny_model(family, **overrides)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model
