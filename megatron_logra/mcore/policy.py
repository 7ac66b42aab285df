"""The policy that is trained: this rank's part of the model, its sketch targets, and the passes over it.

Every pass goes through Megatron's own pipeline schedules, so the same code runs with and without pipeline parallelism.
Only ranks of the last pipeline stage see hidden states after the final norm; results that exist there alone are
returned as empty lists elsewhere.

Shapes: micro-batches as in `rl.batching`; `N` chosen positions (those that predict a generated token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.table import LocalParameter
from megatron_logra.mcore.logprobs import VocabShard, vocab_parallel_logprobs
from megatron_logra.mcore.model import StageModel
from megatron_logra.parallel.collectives import copy_to_group, gather_sequence
from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.rl.batching import MicroBatch, empty_microbatch
from megatron_logra.sketch.target import SketchPhase, SketchTarget

TokenLoss = Callable[[Tensor, MicroBatch], Tensor]


@dataclass(frozen=True)
class TokenOutputs:
    """Per chosen position of one micro-batch: log-probability and entropy in nats, `[N]`, detached."""

    logprob_N: Tensor
    entropy_N: Tensor


@dataclass
class Policy:
    """One rank's share of the policy.

    Attributes:
        shape: sizes of the whole model.
        model: Megatron's model with this rank's layers, in one or several chunks.
        parameters: every parameter of this rank with its Hugging Face rows and columns.
        targets: the sketched weights among them.
        target_groups: projection groups of the sketched weights of the whole model, in order, the same on all ranks.
        phase: what the targets do in the current pass.
        groups: process groups.
        vocab: this rank's vocabulary shard.
        chunk_size: tokens whose logits exist at once.
    """

    shape: ModelShape
    model: StageModel
    parameters: list[LocalParameter]
    targets: list[SketchTarget]
    target_groups: tuple[str, ...]
    phase: SketchPhase
    groups: ParallelGroups
    vocab: VocabShard
    chunk_size: int

    @cached_property
    def target_by_name(self) -> dict[str, SketchTarget]:
        """The targets by Megatron parameter name."""
        return {target.name: target for target in self.targets}

    def accumulate(self, batches: Sequence[MicroBatch], loss: TokenLoss, *, temperature: float) -> list[TokenOutputs]:
        """Forward and backward over all micro-batches; sketches and gradients grow by this rank's share.

        Args:
            loss: maps (log-probabilities `[N]`, micro-batch) to the scalar loss of the micro-batch, already divided by
                the global number of valid tokens.
            temperature: sampling temperature, which divides the logits.

        Returns:
            The outputs of each micro-batch on the last pipeline stage, an empty list on the others.
        """
        outputs: list[TokenOutputs] = []

        def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            head = partial(self._token_head, batch=batch, temperature=temperature, outputs=outputs)
            return self._forward(model, batch, head), lambda logprob_N: as_megatron_loss(loss(logprob_N, batch))

        with self.phase.during("accumulate"):
            self.run_schedule(step, batches, forward_only=False)
        return outputs[: len(batches)]

    @torch.no_grad()
    def compute_logprobs(self, batches: Sequence[MicroBatch], *, temperature: float) -> list[TokenOutputs]:
        """Forward only; outputs on the last pipeline stage, an empty list on the others."""
        outputs: list[TokenOutputs] = []

        def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            head = partial(self._token_head, batch=batch, temperature=temperature, outputs=outputs)
            return self._forward(model, batch, head), lambda logprob_N: as_megatron_loss(logprob_N.sum())

        self.run_schedule(step, batches, forward_only=True)
        return outputs[: len(batches)]

    @torch.no_grad()
    def compute_hidden(self, batch: MicroBatch) -> Tensor | None:
        """Hidden states `[N, H]` of the chosen positions after the final norm; None before the last stage."""
        kept: list[Tensor] = []

        def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
            current = next(iterator)

            def head(hidden_states: Tensor, **_: object) -> Tensor:
                kept.append(self.select_hidden(hidden_states, current))
                return kept[-1]

            return self._forward(model, current, head), lambda hidden: as_megatron_loss(hidden.sum())

        self.run_schedule(step, [batch], forward_only=True)
        return kept[0] if kept else None

    def output_weight(self) -> Tensor:
        """Local shard `[V / tp, H]` of the output layer, which may be the tied embedding. Last stage only."""
        last = self.model.last
        if last.share_embeddings_and_output_weights:
            return last.shared_embedding_or_output_weight()
        return last.output_layer.weight

    def select_hidden(self, hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        """Hidden states of the chosen positions, `[N, H]`, from the (sequence-sharded) output of the final norm.

        The gradient of the result may differ between TP ranks; it is summed over TP on the way back.
        """
        if self.model.config.sequence_parallel:
            hidden_SBH = gather_sequence(hidden_SBH, self.groups.tp)
        else:
            hidden_SBH = copy_to_group(hidden_SBH, self.groups.tp)
        return hidden_SBH.reshape(-1, hidden_SBH.shape[-1]).index_select(0, batch.hidden_index_N)

    def run_schedule(
        self, step: Callable[..., Any], batches: Sequence[MicroBatch], *, forward_only: bool, copies: int = 1
    ) -> None:
        """Drive `step` over the micro-batches with Megatron's schedule for this layout.

        The interleaved schedule wants whole rounds of as many micro-batches as there are stages, and with one round
        its stages wait for each other's tensor shapes for ever once there is a backward pass. So the rounds are filled
        up with micro-batches without entries, which come after all others.

        Args:
            copies: how many hidden states travel side by side in the batch dimension between stages (2 for a primal
                and its tangent).
        """
        chunks = self.model.chunks
        if len(chunks) > 1:
            stages = self.groups.pp_size
            wanted = max(-(-len(batches) // stages), 1 if forward_only else 2) * stages
            missing = wanted - len(batches)
            # With two stages, Megatron mixes up the shapes of what goes forward and what comes back: all must be alike.
            alike = stages == 2 and not forward_only
            rows, length = batches[0].tokens_BT.shape if alike else (1, self.length_multiple)
            batches = [*batches, *[empty_microbatch(batches[0], rows, length)] * missing]
        rows, length = batches[0].tokens_BT.shape
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=length * self.groups.cp_size,
            micro_batch_size=rows * copies,
            forward_only=forward_only,
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.model.named_parameters()))[1].device

    @property
    def length_multiple(self) -> int:
        """What the length of this rank's part of a sequence must be a multiple of."""
        shards = self.groups.tp_size if self.model.config.sequence_parallel else 1
        return shards if self.groups.cp_size == 1 else math.lcm(shards, 2)

    def _forward(self, model: GPTModel, batch: MicroBatch, head: Callable[..., Tensor]) -> Tensor:
        return model(batch.tokens_BT, batch.positions_BT, None, output_processor=head)

    def _token_head(
        self,
        hidden_states: Tensor,
        *,
        batch: MicroBatch,
        temperature: float,
        outputs: list[TokenOutputs],
        **_: object,
    ) -> Tensor:
        logprob_N, entropy_N = vocab_parallel_logprobs(
            self.select_hidden(hidden_states, batch),
            self.output_weight(),
            batch.target_N,
            shard=self.vocab,
            temperature=temperature,
            chunk_size=self.chunk_size,
        )
        outputs.append(TokenOutputs(logprob_N.detach(), entropy_N))
        return logprob_N


def as_megatron_loss(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's per-token form: (loss, number of tokens, report); the number is not used to scale ours."""
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {}
