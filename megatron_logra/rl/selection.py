"""Chooses which responses of an update go through forward and backward.

A response whose advantage is 0 adds exactly nothing to the gradient of the policy loss: with rewards of 0 and 1 that is
every response of a group that was all right or all wrong, often most of a batch. Leaving it out changes no sketch as
long as the loss is still divided by the valid tokens of all responses.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_logra.rl.batching import Response


def select_informative(responses: Sequence[Response], advantages: Sequence[float], *, multiple: int) -> list[int]:
    """Indices, ascending, of the responses with a gradient, filled up with others to a multiple of `multiple`.

    `multiple` is data-parallel size times micro-batch size; at least that many are kept, so that every rank always has
    a micro-batch. Host only; equal on all ranks that pass the same values.

    Raises:
        ValueError: the number of responses is not a multiple itself.
    """
    total = len(responses)
    if total % multiple:
        raise ValueError(
            f"{total} responses cannot be cut into micro-batches on all data-parallel ranks: {total} % {multiple} = "
            f"{total % multiple}"
        )
    informative = [index for index, response in enumerate(responses) if response.valid and advantages[index] != 0]
    count = max(multiple, -(-len(informative) // multiple) * multiple)
    chosen = set(informative)
    # Valid responses first: their tokens at least inform the metrics.
    rest = sorted((index for index in range(total) if index not in chosen), key=lambda i: not responses[i].valid)
    return sorted([*informative, *rest[: count - len(informative)]])
