"""Owns the token losses of GRPO.

Per generated token, with ratio = exp(logprob - old_logprob):

    pg_loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    kl_loss = exp(d) - d - 1,  d = reference_logprob - logprob      (k3: never negative, unbiased)
    loss    = pg_loss + kl_beta * kl_loss

Sums and the division by the global number of valid tokens are the caller's. Sources: PPO (arXiv 1707.06347),
equation 7; GRPO (arXiv 2402.03300), equations 3 and 4; J. Schulman, "Approximating KL divergence" (k3).
The bounds on log-ratios and on k3 are those of verl and NeMo-RL.

Shape legend: T generated tokens, in any one shape common to all inputs.
"""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""|logprob - old_logprob| and |reference_logprob - logprob| are cut here, so that exp() cannot overflow."""

KL_BOUND = 10.0
"""k3 of one token is cut here, so that one improbable token cannot dominate a step."""


def grpo_token_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference_logprobs_T: torch.Tensor | None = None,
    kl_beta: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Give the loss of every token [T] and sums over the tokens for the log.

    Differentiable in ``logprobs_T`` only; all log-probabilities in nats. The statistics are detached scalars,
    sums over T: ``pg_loss``; ``pg_clipfrac``, tokens where the clipped branch is the larger loss; ``ppo_kl``,
    old_logprob - logprob; and with a reference ``kl_loss``, not multiplied by ``kl_beta``. Divided by the
    global number of valid tokens they are the metrics verl logs under these names. No communication and no
    read of a device value; T may be 0. Raises ``ValueError`` for a negative setting, ``kl_beta`` without a
    reference, or shapes that differ.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high), ("kl_beta", kl_beta)):
        if value < 0:
            raise ValueError(f"{name} is {value}: it must not be negative")
    if kl_beta > 0 and reference_logprobs_T is None:
        raise ValueError(f"kl_beta is {kl_beta} but there are no log-probabilities of the reference policy")
    for name, tensor in (
        ("old", old_logprobs_T),
        ("advantage", advantages_T),
        ("reference", reference_logprobs_T),
    ):
        if tensor is not None and tensor.shape != logprobs_T.shape:
            raise ValueError(
                f"{name} values have shape {tuple(tensor.shape)}, log-probabilities {tuple(logprobs_T.shape)}"
            )
    old_T, advantages_T = old_logprobs_T.detach(), advantages_T.detach()
    log_ratio_T = logprobs_T - old_T
    ratio_T = log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    stats = {
        "pg_loss": loss_T.detach().sum(),
        "pg_clipfrac": (clipped_T > unclipped_T).to(loss_T.dtype).sum(),
        "ppo_kl": -log_ratio_T.detach().sum(),
    }
    if reference_logprobs_T is not None:
        kl_T = k3_kl(logprobs_T, reference_logprobs_T.detach())
        stats["kl_loss"] = kl_T.detach().sum()
        if kl_beta > 0:
            loss_T = loss_T + kl_beta * kl_T
    return loss_T, stats


def k3_kl(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy | reference) in nats [T], each from one sampled token: exp(d) - d - 1, bounded."""
    difference_T = (reference_logprobs_T - logprobs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.expm1(difference_T) - difference_T).clamp(max=KL_BOUND)
