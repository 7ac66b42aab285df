"""The policy that is trained: this rank's part of the model, its sketch targets, and the passes over it.

Every pass goes through Megatron's own pipeline schedules, so the same code runs with and without pipeline parallelism.
Only ranks of the last pipeline stage see hidden states after the final norm; results that exist there alone are
returned as empty lists elsewhere.

Shapes: micro-batches as in `rl.batching`; `N` chosen positions (those that predict a generated token).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.table import LocalParameter
from megatron_logra.mcore.logprobs import VocabShard, vocab_parallel_logprobs
from megatron_logra.parallel.collectives import copy_to_group, gather_sequence
from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.rl.batching import MicroBatch
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
        model: Megatron's model with this rank's layers.
        parameters: every parameter of this rank with its Hugging Face rows and columns.
        targets: the sketched weights among them.
        phase: what the targets do in the current pass.
        groups: process groups.
        vocab: this rank's vocabulary shard.
        chunk_size: tokens whose logits exist at once.
    """

    shape: ModelShape
    model: GPTModel
    parameters: list[LocalParameter]
    targets: list[SketchTarget]
    phase: SketchPhase
    groups: ParallelGroups
    vocab: VocabShard
    chunk_size: int

    def accumulate_sketches(
        self, batches: Sequence[MicroBatch], loss: TokenLoss, *, temperature: float
    ) -> list[TokenOutputs]:
        """Forward and backward over all micro-batches; sketches of all targets grow by this rank's share.

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
        return outputs

    @torch.no_grad()
    def compute_logprobs(self, batches: Sequence[MicroBatch], *, temperature: float) -> list[TokenOutputs]:
        """Forward only; outputs on the last pipeline stage, an empty list on the others."""
        outputs: list[TokenOutputs] = []

        def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            head = partial(self._token_head, batch=batch, temperature=temperature, outputs=outputs)
            return self._forward(model, batch, head), lambda logprob_N: as_megatron_loss(logprob_N.sum())

        self.run_schedule(step, batches, forward_only=True)
        return outputs

    @torch.no_grad()
    def compute_hidden(self, batch: MicroBatch) -> Tensor | None:
        """Hidden states `[N, H]` of the chosen positions after the final norm; None before the last stage."""
        kept: list[Tensor] = []

        def head(hidden_states: Tensor, **_: object) -> Tensor:
            kept.append(self.select_hidden(hidden_states, batch))
            return kept[0]

        def step(iterator: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
            return self._forward(model, next(iterator), head), lambda hidden: as_megatron_loss(hidden.sum())

        self.run_schedule(step, [batch], forward_only=True)
        return kept[0] if kept else None

    def output_weight(self) -> Tensor:
        """Local shard `[V / tp, H]` of the output layer, which may be the tied embedding. Last stage only."""
        if self.model.share_embeddings_and_output_weights:
            return self.model.shared_embedding_or_output_weight()
        return self.model.output_layer.weight

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

        Args:
            copies: how many hidden states travel side by side in the batch dimension between stages (2 for a primal
                and its tangent).
        """
        rows, length = batches[0].tokens_BT.shape
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows * copies,
            forward_only=forward_only,
        )

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
