"""Frequencies of the rotary position embedding, as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_logra.hf.config import ModelShape


def compute_rotary_frequencies(shape: ModelShape, *, device: torch.device) -> Tensor:
    """Inverse frequencies `[head_dim / 2]` in fp32, with Llama 3's scaling where the checkpoint asks for it.

    Wavelengths beyond `original_max_position_embeddings / low_freq_factor` are stretched by `factor`, those below
    `.../ high_freq_factor` kept, and the band between is interpolated (Llama 3.1 model card).
    """
    exponents = torch.arange(0, shape.kv_channels, 2, dtype=torch.float32, device=device) / shape.kv_channels
    frequencies = 1.0 / (shape.rotary_base**exponents)
    if shape.rope_scaling is None:
        return frequencies
    return _stretch_llama3(frequencies, shape.rope_scaling)


def _stretch_llama3(frequencies: Tensor, scaling: Mapping[str, float]) -> Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / scaling["factor"] * (1 - keep)
