"""Owns the way from sampled responses to the tensors of a micro-batch.

A response is one sequence ``prompt_ids + response_ids``, padded on the right: under causal attention nothing
after a token changes its hidden state, so padding needs no mask. The hidden state at position ``t`` predicts
token ``t + 1``. The entries of the loss are the pairs (position ``t``, token ``t + 1``) whose token is a
generated one; they are listed on the host, row after row, so that the device never sees a mask of unknown
size:

    loss = sum over entries of loss_N / count_valid_tokens(all responses of the update)

A response that is not ``valid`` (its reward failed) keeps its row, so that every rank runs the same number of
micro-batches, but has no entry.

Shape legend: B rows of a micro-batch, T padded sequence length, N entries (generated tokens of valid
responses).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Response:
    """One sampled response with what was learnt about it.

    ``response_ids`` are the generated tokens, the stop token included when there is one;
    ``generation_logprobs`` are the rollout engine's log-probabilities of exactly these tokens (nats, at the
    sampling temperature, full softmax). ``finished`` is False for a response that was cut at its length
    limit: it keeps its reward and its place in the loss. ``valid`` is False when the reward could not be
    computed: it leaves advantages and loss. ``sample_index`` is ``Sample.index``; ``group`` numbers the
    prompt within the step, and responses with one number form a group. ``old_logprobs`` and
    ``reference_logprobs`` are the trainer's own values before the update and those of the reference policy,
    both optional, one a generated token.

    Raises ``ValueError`` when the lengths do not match or there is no prompt token to predict the first token
    from.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    generation_logprobs: Sequence[float]
    reward: float
    finished: bool
    sample_index: int
    group: int
    valid: bool = True
    old_logprobs: Sequence[float] | None = None
    reference_logprobs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(
                f"the prompt of sample {self.sample_index} has no token: the first generated token needs one"
            )
        for name in ("generation_logprobs", "old_logprobs", "reference_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(
                    f"a response to sample {self.sample_index} has {len(self.response_ids)} tokens "
                    f"but {len(values)} {name}"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_valid_tokens(self) -> int:
        """Entries this response brings to the loss."""
        return len(self.response_ids) if self.valid else 0


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one micro-batch, built on the host.

    ``tokens_BT``, ``positions_BT`` int64, right-padded; ``num_tokens_B`` int64, the length without padding;
    ``finished_B`` bool; ``response_index_B`` int64, the place of the row in the list the batch was built
    from. Per entry, row after row and in the order of generation: ``sequence_N`` int64, the row;
    ``hidden_index_N`` int64, ``t * B + row``, the place of the predicting hidden state in Megatron's
    sequence-first [T*B] array; ``entry_index_N`` int64, the place of the entry among the
    ``num_batch_entries`` of the whole micro-batch, of which a context-parallel rank has a part;
    ``target_N`` int64, the token ``t + 1``; ``advantage_N``, ``generation_logprob_N``, ``old_logprob_N``,
    ``reference_logprob_N`` floating point.
    """

    tokens_BT: torch.Tensor
    positions_BT: torch.Tensor
    num_tokens_B: torch.Tensor
    finished_B: torch.Tensor
    response_index_B: torch.Tensor
    sequence_N: torch.Tensor
    hidden_index_N: torch.Tensor
    entry_index_N: torch.Tensor
    target_N: torch.Tensor
    advantage_N: torch.Tensor
    generation_logprob_N: torch.Tensor
    old_logprob_N: torch.Tensor | None = None
    reference_logprob_N: torch.Tensor | None = None
    num_batch_entries: int = 0

    @property
    def num_entries(self) -> int:
        """N, known on the host."""
        return self.target_N.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> MicroBatch:
        """Copy every tensor to ``device``."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()}
        return dataclasses.replace(self, **moved)


def build_microbatches(
    responses: Sequence[Response],
    advantages: Sequence[float] | torch.Tensor,
    *,
    micro_batch_size: int,
    pad_multiple: int = 1,
    length: int | None = None,
    pad_id: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[MicroBatch]:
    """Cut ``responses`` (of one rank) into micro-batches of one common shape, in the order given.

    ``advantages`` [len(responses)] is one number a response. All micro-batches have the same [B, T], because
    a pipeline sends tensors of one shape: T is ``length``, or the longest response, rounded up to
    ``pad_multiple`` (the tensor-parallel size under sequence parallelism). ``dtype`` is that of the
    floating-point tensors. ``old_logprob_N`` (``reference_logprob_N``) exists when every response carries the
    values, and is None when none does. No communication. Raises ``ValueError`` on counts that do not divide,
    a response longer than ``length``, or values that only some of the responses carry.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}: it must be at least 1")
    if len(advantages) != len(responses):
        raise ValueError(f"{len(responses)} responses but {len(advantages)} advantages: give one a response")
    if len(responses) % micro_batch_size:
        raise ValueError(
            f"{len(responses)} responses of this rank cannot be cut into micro-batches of micro_batch_size "
            f"{micro_batch_size}: {len(responses)} % {micro_batch_size} = {len(responses) % micro_batch_size}"
        )
    padded_length = compute_padded_length(responses, pad_multiple=pad_multiple, length=length)
    advantage_list = [float(value) for value in advantages]
    has_old = _all_or_none(responses, "old_logprobs")
    has_reference = _all_or_none(responses, "reference_logprobs")
    batches = []
    for start in range(0, len(responses), micro_batch_size):
        rows = responses[start : start + micro_batch_size]
        batch = _build_one(rows, advantage_list[start : start + micro_batch_size], start, padded_length, pad_id, dtype)
        valid_rows = [row for row in rows if row.valid]
        if has_old:
            old_N = _concatenate([row.old_logprobs for row in valid_rows], dtype)
            batch = dataclasses.replace(batch, old_logprob_N=old_N)
        if has_reference:
            reference_N = _concatenate([row.reference_logprobs for row in valid_rows], dtype)
            batch = dataclasses.replace(batch, reference_logprob_N=reference_N)
        batches.append(batch)
    return batches


def shard_context(batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """Give context-parallel rank ``rank`` of ``size`` its part of every sequence of ``batch``.

    The T positions are cut into ``2 size`` chunks and the rank gets chunks ``rank`` and ``2 size - 1 - rank``:
    under a causal mask all ranks then have the same work. An entry goes with its position. Raises
    ``ValueError`` when T does not divide.
    """
    if size == 1:
        return batch
    num_rows, length = batch.tokens_BT.shape
    if length % (2 * size):
        raise ValueError(
            f"sequences of length {length} cannot be cut into 2 x context_parallel_size {size} chunks: "
            f"{length} % {2 * size} = {length % (2 * size)}"
        )
    chunk = length // (2 * size)
    first, second = rank, 2 * size - 1 - rank
    positions = torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in (first, second)])
    local_of = torch.full((length,), -1, dtype=torch.int64)
    local_of[positions] = torch.arange(2 * chunk)
    local = local_of[batch.hidden_index_N // num_rows]
    kept = (local >= 0).nonzero()[:, 0]
    parts = {name: value[kept] for name, value in vars(batch).items() if name.endswith("_N") and value is not None}
    parts |= {"tokens_BT": batch.tokens_BT[:, positions], "positions_BT": batch.positions_BT[:, positions]}
    parts["hidden_index_N"] = local[kept] * num_rows + batch.sequence_N[kept]
    return dataclasses.replace(batch, **parts)


def empty_microbatch(like: MicroBatch, rows: int, length: int) -> MicroBatch:
    """Give a micro-batch of ``rows`` times ``length`` padding tokens without entries, on the device of ``like``."""
    nothing = {name: value[:0] for name, value in vars(like).items() if name.endswith("_N") and value is not None}
    tokens = like.tokens_BT.new_zeros((rows, length))
    return dataclasses.replace(
        like,
        **nothing,
        tokens_BT=tokens,
        positions_BT=torch.arange(length, device=tokens.device).repeat(rows, 1),
        num_tokens_B=like.num_tokens_B.new_zeros(rows),
        finished_B=like.finished_B.new_zeros(rows),
        response_index_B=like.response_index_B.new_zeros(rows),
        num_batch_entries=0,
    )


def compute_padded_length(responses: Iterable[Response], *, pad_multiple: int = 1, length: int | None = None) -> int:
    """Give T of ``build_microbatches``: ``length`` or the longest response, rounded up to ``pad_multiple``.

    Raises ``ValueError`` when a response does not fit into ``length``, or ``length`` is no multiple.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is {pad_multiple}: it must be at least 1")
    longest = max(responses, key=lambda response: response.num_tokens, default=None)
    if longest is None:
        raise ValueError("there is no response to batch")
    if length is None:
        return -(-longest.num_tokens // pad_multiple) * pad_multiple
    if longest.num_tokens > length:
        raise ValueError(
            f"a response to sample {longest.sample_index} has {len(longest.prompt_ids)} prompt + "
            f"{len(longest.response_ids)} generated = {longest.num_tokens} tokens, more than {length}: "
            "raise --seq-length or lower --rollout-max-new-tokens"
        )
    if length % pad_multiple:
        raise ValueError(
            f"the length {length} is no multiple of pad_multiple {pad_multiple} (tensor_model_parallel_size "
            f"under sequence parallelism): {length} % {pad_multiple} = {length % pad_multiple}"
        )
    return length


def count_valid_tokens(responses: Iterable[Response]) -> int:
    """Count the generated tokens of valid responses: the denominator of a token-level loss.

    Local when given a rank's responses, global when given those of all ranks. No communication.
    """
    return sum(response.num_valid_tokens for response in responses)


def split_data_parallel(responses: Sequence[Response], rank: int, size: int) -> list[int]:
    """Give the indices, ascending, of the responses that data-parallel rank ``rank`` of ``size`` trains on.

    Every ``size`` consecutive responses give one to each rank, the longest of them to the rank with the
    fewest tokens so far. So all ranks have equally many, their token counts differ by no more than the
    longest response, every rank can compute all the shares without communication, and the first ``n`` of all
    ranks are the first ``n * size``. Raises ``ValueError`` when the count does not divide.
    """
    if not 0 <= rank < size:
        raise ValueError(f"data-parallel rank {rank} of {size}: the rank must lie in 0..{size - 1}")
    if len(responses) % size:
        raise ValueError(
            f"{len(responses)} responses cannot be split over {size} data-parallel ranks: "
            f"{len(responses)} % {size} = {len(responses) % size}"
        )
    tokens_of_rank = [0] * size
    mine = []
    for start in range(0, len(responses), size):
        longest_first = sorted(range(start, start + size), key=lambda index: (-responses[index].num_tokens, index))
        lightest_first = sorted(range(size), key=lambda owner: (tokens_of_rank[owner], owner))
        for index, owner in zip(longest_first, lightest_first, strict=True):
            tokens_of_rank[owner] += responses[index].num_tokens
            if owner == rank:
                mine.append(index)
    return mine


def select_probe_responses(responses: Sequence[Response], *, num_responses: int, max_tokens: int) -> list[Response]:
    """Take the first ``num_responses`` responses, cut to at most ``max_tokens`` generated tokens together.

    For measuring a KL divergence, which needs states the policy visits and no reward: an invalid response
    counts as a valid one here. Each response may use an equal share of what is left, at least one token, so
    the number of rows depends on the settings only. Raises ``ValueError`` when ``max_tokens < num_responses``
    or there are too few responses.
    """
    if not 1 <= num_responses <= len(responses):
        raise ValueError(
            f"kl_probe_responses is {num_responses}: it must lie in 1..{len(responses)} (responses of a rank)"
        )
    if max_tokens < num_responses:
        raise ValueError(f"kl_probe_max_tokens {max_tokens} gives no token to some of the {num_responses} responses")
    probes = []
    left = max_tokens
    for position, response in enumerate(responses[:num_responses]):
        keep = min(len(response.response_ids), left // (num_responses - position))
        left -= keep
        probes.append(_cut(response, keep))
    return probes


def attach_logprobs(
    responses: Sequence[Response],
    batches: Sequence[MicroBatch],
    values: Sequence[torch.Tensor],
    *,
    kind: Literal["old_logprobs", "reference_logprobs"],
) -> list[Response]:
    """Write per-entry values [N] of each micro-batch back to the responses it was built from.

    Entries that a context-parallel rank does not have get zeros, so that a sum over the ranks completes them.
    Invalid responses, which have no entry, get zeros; they have no entry later either. Copies to the host.
    Raises ``ValueError`` when a tensor does not have the N of its micro-batch.
    """
    updated = list(responses)
    for batch, values_N in zip(batches, values, strict=True):
        if tuple(values_N.shape) != (batch.num_entries,):
            raise ValueError(
                f"{kind} of shape {tuple(values_N.shape)} for a micro-batch of {batch.num_entries} entries"
            )
        whole = torch.zeros(batch.num_batch_entries, dtype=torch.float64)
        whole[batch.entry_index_N.cpu()] = values_N.detach().double().cpu()
        numbers = whole.tolist()
        for index in batch.response_index_B.tolist():
            response = responses[index]
            count = response.num_valid_tokens
            mine, numbers = numbers[:count], numbers[count:]
            mine = mine if response.valid else [0.0] * len(response.response_ids)
            updated[index] = (
                dataclasses.replace(response, old_logprobs=mine)
                if kind == "old_logprobs"
                else dataclasses.replace(response, reference_logprobs=mine)
            )
    return updated


def _build_one(
    rows: Sequence[Response],
    advantages: Sequence[float],
    first_index: int,
    padded_length: int,
    pad_id: int,
    dtype: torch.dtype,
) -> MicroBatch:
    """Build the tensors of one micro-batch; ``first_index`` is the place of ``rows[0]`` in the list."""
    num_rows = len(rows)
    tokens_BT = torch.full((num_rows, padded_length), pad_id, dtype=torch.int64)
    sequence: list[int] = []
    position: list[int] = []
    target: list[int] = []
    advantage: list[float] = []
    for row, (response, value) in enumerate(zip(rows, advantages, strict=True)):
        ids = [*response.prompt_ids, *response.response_ids]
        tokens_BT[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        if response.valid:
            first = len(response.prompt_ids) - 1
            sequence += [row] * len(response.response_ids)
            position += range(first, first + len(response.response_ids))
            target += response.response_ids
            advantage += [value] * len(response.response_ids)
    sequence_N = torch.tensor(sequence, dtype=torch.int64)
    position_N = torch.tensor(position, dtype=torch.int64)
    return MicroBatch(
        tokens_BT=tokens_BT,
        positions_BT=torch.arange(padded_length).repeat(num_rows, 1),
        num_tokens_B=torch.tensor([response.num_tokens for response in rows], dtype=torch.int64),
        finished_B=torch.tensor([response.finished for response in rows], dtype=torch.bool),
        response_index_B=torch.arange(first_index, first_index + num_rows),
        sequence_N=sequence_N,
        hidden_index_N=position_N * num_rows + sequence_N,
        entry_index_N=torch.arange(len(target)),
        target_N=torch.tensor(target, dtype=torch.int64),
        advantage_N=torch.tensor(advantage, dtype=dtype),
        generation_logprob_N=_concatenate([row.generation_logprobs for row in rows if row.valid], dtype),
        num_batch_entries=len(target),
    )


def _concatenate(values: Iterable[Sequence[float] | None], dtype: torch.dtype) -> torch.Tensor:
    """Join per-response lists (none of them None) into one tensor [N]."""
    return torch.tensor([number for numbers in values for number in numbers or ()], dtype=dtype)


def _all_or_none(responses: Sequence[Response], name: str) -> bool:
    """Tell whether the responses carry ``name``; some with and some without is an error."""
    num_with = sum(getattr(response, name) is not None for response in responses)
    if num_with not in (0, len(responses)):
        raise ValueError(f"{num_with} of {len(responses)} responses carry {name}: all of them must, or none")
    return num_with > 0


def _cut(response: Response, num_tokens: int) -> Response:
    """Keep the first ``num_tokens`` generated tokens, as a valid response."""
    cut = num_tokens < len(response.response_ids)
    old, reference = response.old_logprobs, response.reference_logprobs
    return dataclasses.replace(
        response,
        response_ids=response.response_ids[:num_tokens],
        generation_logprobs=response.generation_logprobs[:num_tokens],
        old_logprobs=None if old is None else old[:num_tokens],
        reference_logprobs=None if reference is None else reference[:num_tokens],
        finished=response.finished and not cut,
        valid=True,
    )
