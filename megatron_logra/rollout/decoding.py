"""Samples a batch of requests with one frozen causal language model: shared prefill, then a token at a time.

Protocol: requests come sorted by prompt length, identical prompts side by side. Each distinct prompt goes through
the model once, left-padded within its chunk, and its cache rows are copied to every request of that prompt. Then
every step feeds one token a request; a finished request gives up its row, so no time is spent on it.

Padding never changes a result: padded slots are masked, positions count from the first real token. Rows see only
themselves, so a request's tokens do not depend on the batch (up to the rounding of matrix products).

Shapes: `B` rows, `P` distinct prompts, `Q` new tokens a row, `L` slots in use, `N` tokens to sample, `V` vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from megatron_logra.hf.config import ModelShape
from megatron_logra.rollout.engine import SamplingParams
from megatron_logra.rollout.kv_cache import RolloutCache
from megatron_logra.rollout.sampling import draw_uniforms, sample_tokens


@dataclass
class Request:
    """One prompt to continue and what has been sampled for it so far."""

    index: int
    prompt_ids: tuple[int, ...]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class CausalLM:
    """Calls a `transformers` causal language model with a rollout cache, in whichever way its version asks for."""

    def __init__(self, model: nn.Module, shape: ModelShape) -> None:
        self._model = model
        self._num_layers = shape.num_layers
        self._windows = {shape.sliding_window if is_local else None for is_local in shape.sliding_layers or (False,)}
        parameter = next(model.parameters())
        self._dtype, self.device = parameter.dtype, parameter.device
        # The argument was `past_key_values` before it became `cache`.
        arguments = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    def new_cache(self) -> RolloutCache:
        """An empty cache of the model's depth."""
        return RolloutCache(self._num_layers)

    def next_logits(self, tokens_BQ: Tensor, first_B: Tensor, cache: RolloutCache, *, padded: bool) -> Tensor:
        """Appends tokens to the cache and returns the logits `[B, V]` after the last one.

        Args:
            tokens_BQ: int64 tokens for the next `Q` slots.
            first_B: int64, the first real slot of each row; the slots before it are padding.
            cache: of the same rows; empty for a prefill.
            padded: whether any `first_B` is not 0; a host value, so that nothing is read back from the device.
        """
        start = cache.get_seq_length()
        slots_Q = torch.arange(start, start + tokens_BQ.shape[1], device=self.device)
        output = self._model(
            input_ids=tokens_BQ,
            attention_mask=self._attention_masks(slots_Q, first_B, start + tokens_BQ.shape[1]) if padded else None,
            position_ids=(slots_Q[None, :] - first_B[:, None]).clamp_min(0),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def _attention_masks(self, slots_Q: Tensor, first_B: Tensor, num_slots: int) -> Tensor | dict[str, Tensor]:
        """The mask of all layers, or of each kind of layers by its name in `transformers`."""
        masks = {window: self._additive_mask(slots_Q, first_B, num_slots, window) for window in self._windows}
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {"full_attention" if window is None else "sliding_attention": mask for window, mask in masks.items()}

    def _additive_mask(self, slots_Q: Tensor, first_B: Tensor, num_slots: int, window: int | None) -> Tensor:
        """Causal mask `[B, 1, Q, L]` that hides padding and what lies before the window: 0 where visible, else -inf.

        A padded query sees its own slot: a softmax over nothing is NaN, and NaN times a weight of 0 is NaN.
        """
        slots_L = torch.arange(num_slots, device=self.device)
        causal_QL = slots_L[None, :] <= slots_Q[:, None]
        own_QL = slots_L[None, :] == slots_Q[:, None]
        if window is not None:
            causal_QL &= slots_L[None, :] > slots_Q[:, None] - window
        real_BL = slots_L[None, :] >= first_B[:, None]
        visible_BQL = (real_BL[:, None, :] & causal_QL) | own_QL
        mask_BQL = torch.zeros(visible_BQL.shape, dtype=self._dtype, device=self.device)
        return mask_BQL.masked_fill_(~visible_BQL, -math.inf)[:, None]


def decode_batch(
    model: CausalLM,
    requests: Sequence[Request],
    params: SamplingParams,
    *,
    max_prefill_tokens: int,
    is_stopped: Callable[[list[int]], bool],
    on_step: Callable[[int, int], None],
) -> None:
    """Samples until every request is finished or has `max_new_tokens` tokens; fills the requests in place.

    Args:
        model: the language model.
        requests: sorted by prompt length, identical prompts adjacent, prompts not empty.
        params: sampling parameters.
        max_prefill_tokens: padded prompt tokens that go through the model at once (at least one prompt does).
        is_stopped: whether a response with these tokens has reached its end.
        on_step: called after every step with the numbers of tokens sampled and of requests that ended in it.
    """
    logits_BV, cache = _prefill(model, requests, max_prefill_tokens)
    rows = list(requests)
    longest = len(rows[-1].prompt_ids)
    first_B = torch.tensor([longest - len(row.prompt_ids) for row in rows], device=model.device)
    uniform_BN = draw_uniforms([row.seed for row in rows], params.max_new_tokens).to(model.device)
    for step in range(params.max_new_tokens):
        token_B, logprob_B = sample_tokens(
            logits_BV,
            uniform_BN[:, step],
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        for row, token, logprob in zip(rows, token_B.tolist(), logprob_B.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.finished = is_stopped(row.token_ids)
        last = step + 1 == params.max_new_tokens
        kept = [not (row.finished or last) for row in rows]
        on_step(len(rows), kept.count(False))
        if not any(kept):
            return
        if not all(kept):
            order = cache.keep_rows(kept)
            rows = [rows[index] for index in order]
            order_B = torch.tensor(order, device=model.device)
            token_B, first_B, uniform_BN = token_B[order_B], first_B[order_B], uniform_BN[order_B]
        padded = any(len(row.prompt_ids) < longest for row in rows)
        logits_BV = model.next_logits(token_B[:, None], first_B, cache, padded=padded)


def _prefill(model: CausalLM, requests: Sequence[Request], max_tokens: int) -> tuple[Tensor, RolloutCache]:
    """Runs each distinct prompt once; returns the logits `[B, V]` after the prompt and the cache of every request."""
    longest = len(requests[-1].prompt_ids)
    cache = model.new_cache()
    logits: list[Tensor] = []
    num_done = 0
    for prompts, counts in _prefill_chunks(requests, max_tokens):
        length = len(prompts[-1])
        first = [length - len(prompt) for prompt in prompts]
        # Token 0 stands in for padding; it is masked.
        padded_rows = [[0] * pad + list(prompt) for pad, prompt in zip(first, prompts, strict=True)]
        tokens_PQ = torch.tensor(padded_rows, device=model.device)
        prompt_cache = model.new_cache()
        logits_PV = model.next_logits(
            tokens_PQ, torch.tensor(first, device=model.device), prompt_cache, padded=any(first)
        )
        source = [row for row, count in enumerate(counts) for _ in range(count)]
        source_B = torch.tensor(source, device=model.device)
        cache.copy_rows(prompt_cache, source_B, num_done, (len(requests), longest))
        logits.append(logits_PV.index_select(0, source_B))
        num_done += len(source)
    return torch.cat(logits), cache


def _prefill_chunks(requests: Sequence[Request], max_tokens: int) -> Iterator[tuple[list[tuple[int, ...]], list[int]]]:
    """Distinct prompts and how many requests share each, in chunks of at most `max_tokens` padded tokens."""
    prompts: list[tuple[int, ...]] = []
    counts: list[int] = []
    for prompt, sharing in groupby(requests, key=lambda request: request.prompt_ids):
        if prompts and (len(prompts) + 1) * len(prompt) > max_tokens:
            yield prompts, counts
            prompts, counts = [], []
        prompts.append(prompt)
        counts.append(sum(1 for _ in sharing))
    yield prompts, counts
