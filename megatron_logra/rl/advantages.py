"""Owns the group-normalised advantage of GRPO.

For a group of responses to one prompt, over its valid members only:

    advantage_i = (reward_i - mean(reward)) / (std(reward) + epsilon)

``std`` is the sample standard deviation (divided by n - 1), as in verl and NeMo-RL; Megatron-RL divides by n.
A group whose valid members all have one reward, or with fewer than two of them, tells nothing: its advantages
are 0. Source: DeepSeekMath (arXiv 2402.03300), equation 21 (outcome supervision).

Shape legend: B groups (prompts), G responses per group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_logra.rl.batching import Response


def group_advantages(
    rewards_BG: torch.Tensor, valid_BG: torch.Tensor | None = None, *, epsilon: float = 1e-6
) -> torch.Tensor:
    """Give the advantages [B, G] of rewards [B, G], in the dtype of the rewards.

    ``valid_BG`` bool marks the rewards that count; the others may hold anything, NaN too, and get advantage
    0. Computed in float64. No communication: a group lives on one rank. Raises ``ValueError`` for a group of
    one, whose advantage would always be 0, and for a valid reward that is not finite.
    """
    num_responses = rewards_BG.shape[1]
    if num_responses < 2:
        raise ValueError(f"grpo_group_size is {num_responses}: a group-relative advantage needs at least 2 responses")
    if valid_BG is None:
        valid_BG = torch.ones_like(rewards_BG, dtype=torch.bool)
    rewards64_BG = torch.where(valid_BG, rewards_BG.double(), 0.0)
    if not bool(torch.isfinite(rewards64_BG).all()):
        raise ValueError("a reward marked valid is not finite: mark it invalid, as score_responses does")
    count_B1 = valid_BG.sum(dim=1, keepdim=True).double()
    mean_B1 = rewards64_BG.sum(dim=1, keepdim=True) / count_B1.clamp(min=1.0)
    centred_BG = torch.where(valid_BG, rewards64_BG - mean_B1, 0.0)
    variance_B1 = centred_BG.square().sum(dim=1, keepdim=True) / (count_B1 - 1.0).clamp(min=1.0)
    advantages_BG = centred_BG / (variance_B1.sqrt() + epsilon)
    return torch.where(_is_informative(rewards64_BG, valid_BG), advantages_BG, 0.0).to(rewards_BG.dtype)


def response_advantages(responses: Sequence[Response], *, epsilon: float = 1e-6) -> torch.Tensor:
    """Give the advantage of each response, float64 [len(responses)], in their order, grouped by ``group``.

    No communication. Raises ``ValueError`` when the groups are not all of one size.
    """
    members: dict[int, list[int]] = {}
    for index, response in enumerate(responses):
        members.setdefault(response.group, []).append(index)
    sizes = {len(indices) for indices in members.values()}
    if len(sizes) != 1:
        raise ValueError(f"the groups of responses have sizes {sorted(sizes)}: all prompts need equally many responses")
    index_BG = torch.tensor(list(members.values()))
    rewards = torch.tensor([response.reward for response in responses], dtype=torch.float64)
    valid = torch.tensor([response.valid for response in responses])
    advantages = torch.empty_like(rewards)
    advantages[index_BG] = group_advantages(rewards[index_BG], valid[index_BG], epsilon=epsilon)
    return advantages


def _is_informative(rewards_BG: torch.Tensor, valid_BG: torch.Tensor) -> torch.Tensor:
    """Tell, [B, 1], whether two valid rewards of a group differ.

    Asked exactly, because the mean of equal rewards is not exactly that reward, and the rounding error
    divided by ``epsilon`` would be a small false signal.
    """
    largest_B1 = rewards_BG.masked_fill(~valid_BG, -torch.inf).amax(dim=1, keepdim=True)
    smallest_B1 = rewards_BG.masked_fill(~valid_BG, torch.inf).amin(dim=1, keepdim=True)
    return largest_B1 > smallest_B1
