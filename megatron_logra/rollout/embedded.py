"""The embedded rollout engine: a frozen Hugging Face model in the trainer's own process, updated in place.

A full replica of the policy in every process, so that each samples its share of the prompts without communication.
Weights are float32, or bf16 as computed with plus an int16 remainder for every weight that factors update (an exact
float32 value in 4 bytes), so that merging factors gives the same bits as the trainer's merge.

Protocol: `rollout.engine`. While weights are being changed the engine has no version; if that fails half-way it
refuses to sample or to take factors until `load_full` succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from megatron_logra.hf.config import ModelShape, read_model_shape
from megatron_logra.hf.loaded import checkpoint_views
from megatron_logra.hf.safetensors_io import HFReader
from megatron_logra.hf.table import full_table
from megatron_logra.optim.split_master import SplitMaster, round_to_bf16
from megatron_logra.rollout.decoding import CausalLM, Request, decode_batch
from megatron_logra.rollout.engine import GenerateProgress, Generation, SamplingParams, request_seed
from megatron_logra.rollout.stopping import StopRule
from megatron_logra.sync.apply import apply_packet_
from megatron_logra.sync.checksum import weights_checksum
from megatron_logra.sync.packet import FactorPacket, PacketRefused
from megatron_logra.sync.sender import target_groups

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class EmbeddedEngine:
    """A `RolloutEngine` that samples in this process.

    Args:
        folder: Hugging Face folder; gives weights and, if it is there, the tokenizer.
        dtype: float32, or bfloat16 (then targets have remainders), or float64 (references).
        device: where the model is.
        batch_size: most requests sampled at once.
        max_prefill_tokens: most padded prompt tokens that go through the model at once.
        groups: projection group of every weight a packet must update, by Hugging Face name; default all
            targets of the model's family.
        tokenizer: a `transformers` tokenizer to use instead of the folder's.
        policy_version: version of the weights in the folder.
        shape: of the model, by default as config.json in `folder` says.

    Raises:
        ValueError: a folder, shape or setting that does not fit.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch_size: int = 64,
        max_prefill_tokens: int = 8192,
        groups: Mapping[str, str] | None = None,
        tokenizer: Any | None = None,
        policy_version: int = 0,
        shape: ModelShape | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
        if batch_size < 1 or max_prefill_tokens < 1:
            raise ValueError(
                f"batch_size and max_prefill_tokens must be >= 1, got {batch_size} and {max_prefill_tokens}"
            )
        folder = Path(folder)
        shape = shape or read_model_shape(folder)
        self.max_length = shape.max_position_embeddings
        self.vocab_size = shape.vocab_size
        self.tokenizer = tokenizer or _load_tokenizer(folder)
        self._model = _load_model(
            folder, dtype, device, attention="sdpa" if shape.attention_softcap is None else "eager"
        )
        self._causal_lm = CausalLM(self._model, shape)
        self._batch_size = batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._groups = dict(target_groups([full_table(shape)]) if groups is None else groups)
        # A tied output layer is the same parameter under a second name, which never counts.
        own = {name: parameter.data for name, parameter in self._model.named_parameters()}
        self._parameters = checkpoint_views(own, shape)
        every_name = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        self._tied_names = every_name - own.keys()
        unknown = self._groups.keys() - self._parameters.keys()
        if unknown:
            raise ValueError(f"groups names weights the model does not have: {', '.join(sorted(unknown))}")
        self._remainders: dict[str, Tensor] = {}
        if dtype == torch.bfloat16:
            self._remainders = {
                name: torch.zeros_like(self._parameters[name], dtype=torch.int16) for name in self._groups
            }
            self._read_remainders(folder)
        self._version: int | None = policy_version

    @property
    def policy_version(self) -> int:
        """The version of the weights. Raises ValueError after a change of weights that failed half-way."""
        if self._version is None:
            raise ValueError("the engine's weights were left half changed by an error; call load_full")
        return self._version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_ids: Sequence[int] | None = None,
        progress: Callable[[GenerateProgress], None] | None = None,
    ) -> list[Generation]:
        """Samples one response a prompt, in the order given; see `RolloutEngine.generate`.

        Prompts are sorted by length, so that batches need little padding; equal prompts are computed once.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, a prompt that leaves no room for
                `max_new_tokens` within the model's positions, or a wrong number of request ids.
        """
        version = self.policy_version
        self._check_prompts(prompts, params)
        ids = range(len(prompts)) if request_ids is None else request_ids
        if len(ids) != len(prompts):
            raise ValueError(f"{len(ids)} request ids were given for {len(prompts)} prompts")
        requests = [
            Request(index, tuple(prompt), request_seed(params.seed, request_id))
            for index, (prompt, request_id) in enumerate(zip(prompts, ids, strict=True))
        ]
        rule = StopRule(params, self.tokenizer)
        self._sample(requests, params, rule, progress)
        return [
            Generation(one.token_ids, one.logprobs, one.finished, rule.text(one.token_ids), version) for one in requests
        ]

    @torch.inference_mode()
    def _sample(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        rule: StopRule,
        progress: Callable[[GenerateProgress], None] | None,
    ) -> None:
        num_finished = num_tokens = 0

        def on_step(step_tokens: int, step_finished: int) -> None:
            nonlocal num_finished, num_tokens
            num_finished, num_tokens = num_finished + step_finished, num_tokens + step_tokens
            if progress is not None:
                progress(GenerateProgress(num_finished, len(requests), num_tokens))

        in_order = sorted(requests, key=lambda one: (len(one.prompt_ids), one.prompt_ids, one.index))
        for first in range(0, len(in_order), self._batch_size):
            decode_batch(
                self._causal_lm,
                in_order[first : first + self._batch_size],
                params,
                max_prefill_tokens=self._max_prefill_tokens,
                is_stopped=rule.is_stopped,
                on_step=on_step,
            )

    def _check_prompts(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                raise ValueError(
                    f"prompt {index} has tokens from {min(prompt)} to {max(prompt)}, "
                    f"outside the vocabulary 0..{self.vocab_size - 1}"
                )
            total = len(prompt) + params.max_new_tokens
            if total > self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}: "
                    f"{len(prompt)} + {params.max_new_tokens} = {total} exceeds the model's {self.max_length} positions"
                )

    def weights(self) -> dict[str, Tensor]:
        """The weights it computes with, by Hugging Face name, tied ones once; views, not copies."""
        return dict(self._parameters)

    def masters(self) -> dict[str, Tensor | SplitMaster]:
        """The exact weights by Hugging Face name: the weight itself, or with its remainder; views, not copies."""
        return {
            name: SplitMaster(weight, self._remainders[name]) if name in self._remainders else weight
            for name, weight in self._parameters.items()
        }

    def weights_checksum(self) -> str:
        """Checksum of `weights()`."""
        return weights_checksum(self._parameters.items())

    def apply_factors(self, packet: FactorPacket) -> None:
        """Merges a packet into the weights; raises `PacketRefused` and changes nothing if it does not fit."""
        if self._version is None:
            raise PacketRefused("the weights were left half changed by an error; a full synchronisation is needed")
        version = self._version
        with self._changing():
            try:
                self._version = apply_packet_(packet, self.masters(), version=version, groups=self._groups)
            except PacketRefused:
                self._version = version
                raise

    @torch.no_grad()
    def load_full(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces every weight; a float32 tensor keeps all its bits where the engine has a remainder.

        A tied output layer may come under its own name too; it is ignored.

        Raises:
            ValueError: an unknown, repeated or missing name or a wrong shape. The engine is unusable until
                another call succeeds.
        """
        with self._changing():
            seen: set[str] = set()
            for name, tensor in tensors:
                if name in self._tied_names:
                    continue
                self._store(name, tensor, seen)
            missing = self._parameters.keys() - seen
            if missing:
                raise ValueError(f"a full synchronisation lacked {len(missing)} weights: {', '.join(sorted(missing))}")
            self._version = version

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The body sets the version when all weights are changed; until then, or after an error, there is none."""
        self._version = None
        yield

    def _store(self, name: str, tensor: Tensor, seen: set[str]) -> None:
        if name not in self._parameters:
            raise ValueError(f"a full synchronisation sent {name}, which the model does not have")
        if name in seen:
            raise ValueError(f"a full synchronisation sent {name} twice")
        weight = self._parameters[name]
        if tensor.shape != weight.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, needs {tuple(weight.shape)}")
        seen.add(name)
        if weight.dtype != torch.bfloat16 or tensor.dtype == torch.bfloat16:
            weight.copy_(tensor)
            if name in self._remainders:
                self._remainders[name].zero_()
            return
        exact = tensor.to(device=weight.device, dtype=torch.float32)
        if name in self._remainders:
            SplitMaster(weight, self._remainders[name]).store_(exact)
        else:
            weight.copy_(round_to_bf16(exact))

    def _read_remainders(self, folder: Path) -> None:
        """Reads what bf16 loading rounded away, with the rounding that the trainer uses."""
        reader = HFReader(folder)
        wider = [name for name in self._parameters if name in reader and reader.dtype(name) != torch.bfloat16]
        seen: set[str] = set()
        for name in wider:
            self._store(name, reader.read(name), seen)


def _load_model(folder: Path, dtype: torch.dtype, device: torch.device | str, *, attention: str) -> Any:
    """The frozen model; ValueError if the folder's tensors are not exactly the model's.

    `attention` is transformers' name of how it is computed; only `eager` caps scores softly.
    """
    had_progress_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True, output_loading_info=True
        )
    finally:
        if had_progress_bar:
            transformers_logging.enable_progress_bar()
    problems = {kind: report[kind] for kind in ("missing_keys", "mismatched_keys") if report[kind]}
    if problems:
        raise ValueError(f"the weights in {folder} are not those of its config.json: {problems}")
    return model.to(device).eval().requires_grad_(False)


def _load_tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
