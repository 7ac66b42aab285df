"""Decides when a response has ended, and what text it has.

A stop token ends a response as its last token. A stop string ends it with the token that completes the string; its
tokens stay, its text is cut off. Only the tail that a new stop string could reach is decoded at every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_logra.rollout.engine import SamplingParams

# A tail may begin inside a character (at most 4 bytes), each byte of which can be a token of its own.
MARGIN_TOKENS = 4


class StopRule:
    """Stop tokens and stop strings of one `generate` call.

    Args:
        params: sampling parameters.
        tokenizer: a `transformers` tokenizer, or None if the engine has none.

    Raises:
        ValueError: stop strings without a tokenizer.
    """

    def __init__(self, params: SamplingParams, tokenizer: Any | None) -> None:
        if params.stop and tokenizer is None:
            raise ValueError(
                f"stop strings {params.stop} need a tokenizer, and the model folder has none; use stop_token_ids"
            )
        self._stop_ids = frozenset(params.stop_token_ids)
        self._strings = params.stop
        self._tokenizer = tokenizer
        # A token holds at least one byte.
        self._tail = MARGIN_TOKENS + max((len(string.encode()) for string in params.stop), default=0)

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of these tokens ends the response (the ones before it did not)."""
        if token_ids[-1] in self._stop_ids:
            return True
        if not self._strings or self._tokenizer is None:
            return False
        tail = self._tokenizer.decode(list(token_ids[-self._tail :]), skip_special_tokens=False)
        return any(string in tail for string in self._strings)

    def text(self, token_ids: Sequence[int]) -> str:
        """The response's text without special tokens, a stop token or what a stop string cuts off."""
        if self._tokenizer is None:
            return ""
        ids = list(token_ids[:-1] if token_ids[-1] in self._stop_ids else token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        ends = [text.find(string) for string in self._strings if string in text]
        return text[: min(ends)] if ends else text
