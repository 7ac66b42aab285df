"""Sampling a step's responses on all ranks at once: shares of the requests, rewards where the text is, one exchange.

Request number `i` of a step is response `i % group_size` to prompt `i // group_size`. Every rank generates a
contiguous share (so that the responses to one prompt mostly stay together and share its prefill), scores its own
texts, and receives everybody's responses as plain tensors. The outcome does not depend on the number of ranks: the
random numbers of a request follow from the step's seed and its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_logra.parallel.collectives import all_gather_first_dim
from megatron_logra.parallel.scalars import run_on_all_ranks
from megatron_logra.rl.batching import Response
from megatron_logra.rl.data import Sample
from megatron_logra.rl.rewards import RewardFailure, RewardFunction, score_responses
from megatron_logra.rollout.engine import GenerateProgress, Generation, RolloutEngine, SamplingParams


@dataclass(frozen=True)
class Rollouts:
    """All responses of a step, equal on all ranks, and what only this rank knows.

    `texts` and `failures` are of this rank's own share, which starts at request number `first`.
    """

    responses: list[Response]
    first: int
    texts: list[str]
    failures: list[RewardFailure] = field(default_factory=list)


def own_share(num_requests: int, group: ProcessGroup) -> range:
    """Request numbers this rank serves: contiguous, sizes differing by one at most."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return range(rank * num_requests // size, (rank + 1) * num_requests // size)


def collect_rollouts(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    reward: RewardFunction,
    params: SamplingParams,
    *,
    group_size: int,
    group: ProcessGroup,
    device: torch.device,
    progress: Callable[[GenerateProgress], None] | None = None,
) -> Rollouts:
    """Generate and score `group_size` responses to each prompt. Collective over `group`.

    A reward that fails costs its own response, which is marked invalid; an engine that fails ends all ranks.
    """
    share = own_share(len(prompts) * group_size, group)
    generations = run_on_all_ranks(
        lambda: engine.generate(
            [prompts[number // group_size] for number in share],
            params,
            request_ids=list(share),
            progress=progress,
        ),
        group,
        device,
    )
    pairs = [
        (generation.text, samples[number // group_size]) for number, generation in zip(share, generations, strict=True)
    ]
    rewards, failures = score_responses(reward, pairs)
    failed = {failure.position for failure in failures}
    table = [
        [rewards[position], float(generation.finished), float(position not in failed)]
        for position, generation in enumerate(generations)
    ]
    gathered = _exchange(generations, table, params.max_new_tokens, group, device)
    responses = [
        Response(
            prompt_ids=prompts[number // group_size],
            response_ids=ids,
            generation_logprobs=logprobs,
            reward=reward_value,
            finished=bool(finished),
            sample_index=samples[number // group_size].index,
            group=number // group_size,
            valid=bool(valid),
        )
        for number, (ids, logprobs, (reward_value, finished, valid)) in enumerate(gathered)
    ]
    return Rollouts(responses, share.start, [generation.text for generation in generations], failures)


def _exchange(
    generations: Sequence[Generation],
    table: Sequence[Sequence[float]],
    max_tokens: int,
    group: ProcessGroup,
    device: torch.device,
) -> list[tuple[list[int], list[float], list[float]]]:
    """(token ids, log-probabilities, row of the table) of every request of all ranks, in order. Two all-gathers."""
    shape = torch.tensor([len(generations)], device=device)
    counts = all_gather_first_dim(shape, group).tolist()
    rows = max(counts)
    ids = torch.zeros(rows, max_tokens + 1, dtype=torch.int64)
    values = torch.zeros(rows, max_tokens + 3, dtype=torch.float64)
    for row, (generation, numbers) in enumerate(zip(generations, table, strict=True)):
        length = len(generation.token_ids)
        ids[row, 0] = length
        ids[row, 1 : 1 + length] = torch.tensor(generation.token_ids)
        values[row, :3] = torch.tensor(numbers, dtype=torch.float64)
        values[row, 3 : 3 + length] = torch.tensor(generation.logprobs, dtype=torch.float64)
    all_ids = _gather_host(ids, group, device)
    all_values = _gather_host(values, group, device)
    result = []
    for rank, count in enumerate(counts):
        for row in range(rank * rows, rank * rows + count):
            length = int(all_ids[row, 0])
            result.append(
                (
                    all_ids[row, 1 : 1 + length].tolist(),
                    all_values[row, 3 : 3 + length].tolist(),
                    all_values[row, :3].tolist(),
                )
            )
    return result


def _gather_host(x: Tensor, group: ProcessGroup, device: torch.device) -> Tensor:
    return all_gather_first_dim(x.to(device), group).cpu()
