"""What a rollout engine is: sampling parameters, a sampled response, and the protocol every engine follows.

Protocol: an engine serves exactly one policy version. `apply_factors` moves it from `packet.version_before` to
`packet.version_after` or refuses and changes nothing; `load_full` puts it at any version. Every `Generation`
names the version it was sampled from.

Log-probabilities are those of the sampled token under the full softmax of `logits / temperature`, over the real
tokens of the vocabulary and before top-k and top-p cut it. Trainer and predicted KL use that same distribution, so
all of them compare; what top-k and top-p decide is only which tokens are seen. With temperature 0 (greedy)
log-probabilities are taken at temperature 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_logra.sync.packet import FactorPacket


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_p: the next token comes from the smallest set of most likely tokens with at least this probability,
            of what top_k left.
        top_k: the next token is one of so many most likely ones (and of those that tie with the last); 0: of all.
        max_new_tokens: a response ends after so many tokens (then `Generation.finished` is False).
        stop_token_ids: any of these ends a response and is its last token.
        stop: any of these strings ends a response. Its tokens stay in `token_ids`; `text` ends before it.
        seed: together with a request's id decides all random numbers of that request.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0 (0 is greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 samples from all tokens), got {self.top_k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if any(not text for text in self.stop):
            raise ValueError("stop holds an empty string, which would end every response at once: remove it")


@dataclass(frozen=True)
class Generation:
    """One sampled response.

    Attributes:
        token_ids: the sampled tokens, a stop token or the tokens of a stop string included.
        logprobs: natural log-probability of each token, raw (see the module's first lines).
        finished: True if a stop token or stop string ended it, False if `max_new_tokens` did.
        text: decoded without special tokens, cut before a stop string; empty if the engine has no tokenizer.
        policy_version: the version of the weights that sampled it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    text: str
    policy_version: int


@dataclass(frozen=True)
class GenerateProgress:
    """How far a `generate` call is: requests done, requests in all, tokens sampled so far."""

    num_finished: int
    num_requests: int
    num_tokens: int


class RolloutEngine(Protocol):
    """Samples responses from one policy version; see the module's first lines for the protocol."""

    @property
    def policy_version(self) -> int:
        """The version of the weights it serves."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_ids: Sequence[int] | None = None,
        progress: Callable[[GenerateProgress], None] | None = None,
    ) -> list[Generation]:
        """Samples one response a prompt (token ids), in the order given.

        `request_ids` (default 0, 1, ...) with `params.seed` decide each request's random numbers, whatever else is
        in the call: give global ids when several engines share the prompts of a step.
        """
        ...

    def apply_factors(self, packet: FactorPacket) -> None:
        """Merges a packet into the weights. Raises `PacketRefused` and changes nothing if it does not fit."""
        ...

    def load_full(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces every weight by the one of that Hugging Face name; afterwards it serves `version`."""
        ...

    def weights_checksum(self) -> str:
        """Hexadecimal checksum of the weights as served (see `sync.checksum`)."""
        ...


def request_seed(seed: int, request_id: int) -> int:
    """The seed in [0, 2^63) of one request's random generator, the same for every engine."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
