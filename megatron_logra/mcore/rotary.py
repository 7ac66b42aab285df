"""Angles of the rotary position embedding, as transformers computes them, for each kind of layer.

Layers of one model may rotate by different bases (those with a window by `local_rotary_base`). Megatron hands all
layers of a stage the same tensor, so it holds the angles of every kind, and each attention takes its own.

Shapes: frequencies `[K, head_dim / 2]`, angles `[S, K, 1, head_dim]` with `K` kinds: layers that see everything, then
layers with a window if they differ.
"""

from __future__ import annotations

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.rope import RopeScaling


class LayerRotaryEmbedding(RotaryEmbedding):
    """Megatron's embedding of one stage (its context-parallel slices included) for several kinds of layers."""

    def __init__(self, frequencies_Kd: Tensor, original: RotaryEmbedding) -> None:
        """Takes the place of `original`, with its process group and angles in the dtype of the frequencies."""
        super().__init__(2 * frequencies_Kd.shape[1], 1.0, cp_group=original.cp_group)
        self.inv_freq = frequencies_Kd

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles `[S, K, 1, head_dim]` of the whole sequence."""
        positions_S = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        angles_SKd = positions_S[:, None, None] * self.inv_freq
        return torch.cat((angles_SKd, angles_SKd), dim=-1)[:, :, None]


def compute_rotary_frequencies(shape: ModelShape, *, device: torch.device) -> Tensor:
    """Inverse frequencies `[K, head_dim / 2]` in fp32; the scaling of the checkpoint is for the first kind."""
    frequencies = _frequencies(shape, shape.rotary_base, device)
    if shape.rope_scaling is not None:
        frequencies = _stretch(frequencies, shape.rope_scaling)
    kinds = [frequencies]
    if shape.local_rotary_base is not None:
        kinds.append(_frequencies(shape, shape.local_rotary_base, device))
    return torch.stack(kinds)


def _frequencies(shape: ModelShape, base: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, shape.kv_channels, 2, dtype=torch.float32, device=device) / shape.kv_channels
    return 1.0 / (base**exponents)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths times `factor`.

    Of Llama 3 only those beyond `original_max_position_embeddings / low_freq_factor` are; those below
    `.../ high_freq_factor` are kept, and the band between is interpolated (Llama 3.1 model card).
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)
