"""Picks the next token of every row of a batch from its logits and one uniform number a row.

    p_V = softmax(logits_V / temperature);  token = first v with p_0 + ... + p_v > uniform * (sum of p)

Top-k and top-p cut the distribution first, in the order and with the conventions of vLLM and transformers:

    top-k   keeps the tokens whose logit is at least the k-th largest one (all tokens that tie with it stay)
    top-p   of what top-k left, renormalised, keeps the smallest set of likeliest tokens whose probability reaches top-p

One row never looks at another, and its uniform numbers come from a generator of its own, so what a request
samples does not depend on the batch it is in (up to the rounding of its logits). The log-probability of a token
is that of the whole distribution, as the trainer computes it: the cuts choose tokens and change no number.

Shapes: `B` rows, `V` vocabulary, `K` candidates, `N` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Most nuclei are small: sorting this many most likely tokens is 10 times cheaper than sorting the vocabulary.
TOP_P_CANDIDATES = 512


def draw_uniforms(seeds: Sequence[int], num_tokens: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 `[len(seeds), num_tokens]` on the CPU, one generator a row."""
    rows = [
        torch.rand(num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(rows)


def sample_tokens(
    logits_BV: Tensor, uniform_B: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Samples one token a row.

    Args:
        logits_BV: logits `[B, V]`, any floating dtype; computed in float32 at least.
        uniform_B: float64 `[B]` in [0, 1) on the same device; unused when greedy.
        temperature: > 0, or 0 for the most likely token.
        top_p: in (0, 1]; 1 does not cut.
        top_k: at least 0; 0, or a number not below `V`, does not cut.

    Returns:
        token_B int64 and logprob_B, the log-probability under the full softmax of `logits / temperature`
        (temperature 1 when greedy), not the one cut by top-k and top-p.
    """
    logits_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    if temperature == 0:
        token_B = logits_BV.argmax(dim=-1)
        probability_BV = logits_BV.softmax(dim=-1)
    else:
        probability_BV = (logits_BV / temperature).softmax(dim=-1)
        weight_BV = probability_BV
        if 0 < top_k < logits_BV.shape[-1]:
            # By logits: probabilities that underflow tie with one another.
            smallest_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
            weight_BV = probability_BV.masked_fill(logits_BV < smallest_B1, 0)
        token_B = _sample_top_p(weight_BV, uniform_B, top_p) if top_p < 1 else _sample_inverse(weight_BV, uniform_B)
    # A sampled token has p > 0, so the logarithm is finite; its relative error is that of the softmax.
    return token_B, probability_BV.gather(1, token_B[:, None])[:, 0].log()


def _sample_inverse(weight_BK: Tensor, uniform_B: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds `uniform * total`: it always has a positive weight."""
    cumulative_BK = weight_BK.cumsum(dim=-1, dtype=torch.float64)
    total_B = cumulative_BK[:, -1]
    below_total_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    target_B = torch.minimum(uniform_B * total_B, below_total_B)
    return torch.searchsorted(cumulative_BK, target_B[:, None], right=True)[:, 0]


def _sample_top_p(weight_BV: Tensor, uniform_B: Tensor, top_p: float) -> Tensor:
    goal_B = weight_BV.sum(dim=-1, dtype=torch.float64) * top_p
    num_candidates = min(TOP_P_CANDIDATES, weight_BV.shape[-1])
    sorted_BK, token_BK = weight_BV.topk(num_candidates, dim=-1)
    token_B = _sample_sorted(sorted_BK, token_BK, uniform_B, goal_B)
    # Each row decides for itself whether the candidates were enough, or the batch would change its result.
    short_B = sorted_BK.sum(dim=-1, dtype=torch.float64) < goal_B
    if num_candidates < weight_BV.shape[-1] and bool(short_B.any()):
        sorted_SV, token_SV = weight_BV[short_B].sort(dim=-1, descending=True)
        token_B[short_B] = _sample_sorted(sorted_SV, token_SV, uniform_B[short_B], goal_B[short_B])
    return token_B


def _sample_sorted(sorted_BK: Tensor, token_BK: Tensor, uniform_B: Tensor, goal_B: Tensor) -> Tensor:
    """Samples from the shortest prefix of descending weights that holds at least `goal`."""
    before_BK = sorted_BK.cumsum(dim=-1, dtype=torch.float64) - sorted_BK
    kept_BK = sorted_BK.masked_fill(before_BK >= goal_B[:, None], 0)
    return token_BK.gather(1, _sample_inverse(kept_BK, uniform_B)[:, None])[:, 0]
