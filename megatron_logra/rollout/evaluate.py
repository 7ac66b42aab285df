"""Accuracy of the current policy on held-out questions, greedy, shared out over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup

from megatron_logra.rl.data import Sample
from megatron_logra.rl.rewards import RewardFunction
from megatron_logra.rollout.collect import Rollouts, collect_rollouts
from megatron_logra.rollout.engine import GenerateProgress, RolloutEngine, SamplingParams


def evaluate_policy(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    reward: RewardFunction,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    stop: Sequence[str],
    group: ProcessGroup,
    device: torch.device,
    progress: Callable[[GenerateProgress], None] | None = None,
) -> tuple[int, float, Rollouts]:
    """One greedy response to each question: number right (reward at least 1), mean reward, and the responses.

    A question whose reward fails counts as wrong. Collective over `group`.
    """
    params = SamplingParams(
        temperature=0.0,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(stop_token_ids),
        stop=tuple(stop),
    )
    rollouts = collect_rollouts(
        engine,
        samples,
        prompts,
        reward,
        params,
        group_size=1,
        group=group,
        device=device,
        progress=progress,
    )
    rewards = [response.reward if response.valid else 0.0 for response in rollouts.responses]
    num_correct = sum(value >= 1.0 for value in rewards)
    return num_correct, sum(rewards) / len(rewards), rollouts
