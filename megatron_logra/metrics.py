"""Owns the definitions of the metrics that a run reports, and the sums that make them global over ranks.

A mean over tokens or responses is kept as (sum, count) until every rank's share has been added, so that a rank with
two tokens does not weigh as much as a rank with two thousand:

    vector = sums.to_vector(device)                                  # float64 [summed | extrema]
    all_reduce(vector[: sums.num_summed], SUM)                       # by the caller, over its own process group
    all_reduce(vector[sums.num_summed :], MAX)
    metrics = sums.from_vector(vector).to_metrics()

Names and definitions (per step; NeMo-RL's and verl's wherever they have one):

    train/reward, train/reward_std          mean and population standard deviation of the reward over valid responses
    train/zero_variance_groups              share of groups whose rewards are all equal: they have no advantage
    train/num_failed_rewards                responses left out because their reward function failed
    val/accuracy, val/accuracy_low|high     share of held-out questions answered right, 95 % Wilson interval
    response_length/mean|max|min            tokens; clip_ratio: share of responses cut off by the token limit
    prompt_length/mean                      tokens
    token_mult_prob_error                   mean over tokens of exp(|log p_gen - log p_train|)
    gen_kl_error                            KL(p_gen || p_train), k3 estimate on the sampled tokens, nats a token
    logra/mismatch                          mean of log p_gen - log p_train over tokens of finished responses, nats
    timing_s/*                              wall seconds of one phase on one rank; kl_probe is part of update_actor,
                                            eval and save are no part of step
    memory/kl_probe_peak_extra_bytes        most that predicting the KL needed beyond what was in use before it, over
                                            ranks: of torch's CUDA allocator, or resident memory of the process
    perf/throughput                         (prompt + response) tokens of the step / (step seconds * ranks)

Shapes: N valid response tokens, flat; B responses, flat.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import NormalDist

import torch
from torch import Tensor

Values = Tensor | Sequence[float]


class Sums:
    """Named means, totals and extrema of one step that ranks can reduce as one float64 vector.

    Nothing is read back from a device before `to_metrics`, so adding costs no synchronisation. A name may be added to
    any number of times, with values of any shape. Every rank must have added the same names with the same methods
    (empty values count as adding); `from_vector` raises `ValueError` when they have not.
    """

    def __init__(self) -> None:
        self._summed: dict[tuple[str, str], Tensor] = {}
        self._extrema: dict[tuple[str, str], Tensor] = {}

    def add_mean_(self, name: str, values: Values, weights: Values | None = None) -> None:
        """Add `values` to the mean `name`; `weights` (same shape, 0 leaves a value out) default to 1."""
        value, weight = _pair(values, weights)
        self._add(name, "sum", (value * weight).sum())
        self._add(name, "count", weight.sum())

    def add_moments_(self, name: str, values: Values, weights: Values | None = None) -> None:
        """Like `add_mean_`, and also reports the population standard deviation as `name` + `_std`."""
        value, weight = _pair(values, weights)
        self.add_mean_(name, value, weight)
        self._add(name, "squares", (value.square() * weight).sum())

    def add_total_(self, name: str, values: Values) -> None:
        """Add `values` to the total `name`: summed over ranks, divided by nothing."""
        self._add(name, "total", _float64(values).sum())

    def add_max_(self, name: str, values: Values) -> None:
        """Let `values` take part in the maximum `name`."""
        self._extend(name, "max", _float64(values))

    def add_min_(self, name: str, values: Values) -> None:
        """Let `values` take part in the minimum `name`."""
        self._extend(name, "min", -_float64(values))

    def merge_(self, other: Sums) -> None:
        """Add everything that `other` holds."""
        for (name, kind), value in other._summed.items():
            self._add(name, kind, value)
        for (name, kind), value in other._extrema.items():
            self._extend(name, kind, value)

    @property
    def num_summed(self) -> int:
        """Length of the leading part of `to_vector` that is reduced with SUM; the rest is reduced with MAX."""
        return len(self._summed)

    def to_vector(self, device: torch.device | str = "cpu") -> Tensor:
        """Return float64 `[num_summed + extrema + 2]` on `device`; the last two entries identify the names.

        Minima are stored negated. A NaN extremum travels as infinity, because MAX may drop a NaN.
        """
        check = self._names_check()
        values = [self._summed[key] for key in sorted(self._summed)]
        extrema = [self._extrema[key] for key in sorted(self._extrema)]
        values += [torch.where(value.isnan(), math.inf, value) for value in extrema]
        values += [torch.tensor(check, dtype=torch.float64), torch.tensor(-check, dtype=torch.float64)]
        return torch.stack([value.to(device) for value in values])

    def from_vector(self, vector: Tensor) -> Sums:
        """Return the sums that a reduced `to_vector` of this object stands for (communicates nothing).

        Raises `ValueError` when the ranks had not added the same names.
        """
        size, check = len(self._summed) + len(self._extrema) + 2, self._names_check()
        if vector.numel() != size:
            raise ValueError(f"a vector of {vector.numel()} entries cannot be read as metrics: {size} are expected")
        vector = vector.cpu()
        largest, smallest = float(vector[-2]), -float(vector[-1])
        if largest != check or smallest != check:
            names = sorted({name for name, _ in (*self._summed, *self._extrema)})
            raise ValueError(f"ranks added different metric names; this rank has {names}: add them on every rank")
        result = Sums()
        entries = iter(vector)
        result._summed = {key: next(entries) for key in sorted(self._summed)}
        result._extrema = {key: next(entries) for key in sorted(self._extrema)}
        return result

    def to_metrics(self) -> dict[str, float]:
        """Return plain floats by name. A mean or extremum of nothing at all is left out."""
        summed = {key: float(value) for key, value in self._summed.items()}
        metrics: dict[str, float] = {}
        for (name, kind), value in summed.items():
            if kind == "total":
                metrics[name] = value
            elif kind == "sum" and (count := summed[name, "count"]) != 0:
                metrics[name] = mean = value / count
                if (name, "squares") in summed:
                    variance = summed[name, "squares"] / count - mean * mean
                    metrics[f"{name}_std"] = math.sqrt(variance) if not variance <= 0 else 0.0
        for (name, kind), value in ((key, float(tensor)) for key, tensor in self._extrema.items()):
            if value != -math.inf:
                metrics[name] = value if kind == "max" else -value
        return metrics

    def _add(self, name: str, kind: str, value: Tensor) -> None:
        old = self._summed.get((name, kind))
        self._summed[name, kind] = value if old is None else old + value

    def _extend(self, name: str, kind: str, values: Tensor) -> None:
        start = torch.full((1,), -math.inf, dtype=torch.float64, device=values.device)
        value = torch.cat([start, values.reshape(-1)]).amax()
        old = self._extrema.get((name, kind))
        self._extrema[name, kind] = value if old is None else torch.maximum(old, value)

    def _names_check(self) -> float:
        names = repr((sorted(self._summed), sorted(self._extrema)))
        return float(zlib.crc32(names.encode()))


def compute_rollout_sums(
    *,
    rewards: Values,
    prompt_lengths: Values,
    response_lengths: Values,
    finished: Values,
    valid: Values | None = None,
    group: Sequence[int] | None = None,
) -> Sums:
    """Return reward and length sums of this rank's B responses.

    `finished` is true where a stop token ended the response (verl's clip ratio compares lengths with the limit and so
    also counts a response whose stop token was the last one allowed). `valid` is false where the reward function
    failed: such a response counts in the lengths, not in the rewards. `group` holds the prompt that each response
    belongs to; all responses of a group must be on this rank.
    """
    reward_B = _float64(rewards)
    valid_B = torch.ones_like(reward_B) if valid is None else _float64(valid)
    sums = Sums()
    sums.add_moments_("train/reward", reward_B, valid_B)
    sums.add_total_("train/num_failed_rewards", 1 - valid_B)
    if group is not None:
        members: dict[int, set[float]] = {}
        for key, reward, is_valid in zip(group, reward_B.tolist(), valid_B.tolist(), strict=True):
            members.setdefault(key, set()).update([reward] if is_valid else [])
        sums.add_mean_("train/zero_variance_groups", [float(len(distinct) < 2) for distinct in members.values()])
    sums.add_mean_("response_length/mean", response_lengths)
    sums.add_max_("response_length/max", response_lengths)
    sums.add_min_("response_length/min", response_lengths)
    sums.add_mean_("response_length/clip_ratio", 1 - _float64(finished))
    sums.add_mean_("prompt_length/mean", prompt_lengths)
    sums.add_total_("perf/total_num_tokens", torch.cat([_float64(prompt_lengths), _float64(response_lengths)]))
    return sums


def compute_agreement_sums(
    generation_logprob_N: Values, train_logprob_N: Values, finished_N: Values | None = None
) -> Sums:
    """Return how far generator and trainer, at the same weights, disagree on this rank's sampled tokens.

    Both log-probabilities are in nats, at the sampling temperature, of the token that was sampled, and the trainer's
    are those before the update. `finished_N` is true for tokens of finished responses and feeds `logra/mismatch`.
    Definitions: NeMo-RL, guides/grpo.md, "Metrics", and DESIGN "Predicted-KL step control" for the mismatch.
    """
    generation_N, train_N = _float64(generation_logprob_N), _float64(train_logprob_N)
    sums = Sums()
    sums.add_mean_("token_mult_prob_error", token_mult_prob_error(generation_N, train_N))
    sums.add_mean_("gen_kl_error", gen_kl_error(generation_N, train_N))
    sums.add_mean_("logra/mismatch", generation_N - train_N, finished_N)
    return sums


def token_mult_prob_error(generation_logprob_N: Tensor, train_logprob_N: Tensor) -> Tensor:
    """Return exp(|log p_gen - log p_train|) of every token: 1 where both sides agree."""
    return (generation_logprob_N - train_logprob_N).abs().exp()


def gen_kl_error(generation_logprob_N: Tensor, train_logprob_N: Tensor) -> Tensor:
    """Return the k3 estimate of KL(p_gen || p_train) in nats of every token that was sampled from p_gen.

    With r = log p_train - log p_gen it is exp(r) - r - 1, which is never negative and 0 where both sides agree.
    """
    log_ratio_N = train_logprob_N - generation_logprob_N
    return torch.expm1(log_ratio_N) - log_ratio_N


def compute_throughput(num_tokens: float, *, step_s: float, num_ranks: int) -> dict[str, float]:
    """Return `perf/throughput` in tokens (prompt and response, of all ranks) a second and rank, as verl counts it."""
    if step_s <= 0 or num_ranks < 1:
        raise ValueError(f"throughput needs step_s > 0 and num_ranks >= 1, got step_s {step_s}, num_ranks {num_ranks}")
    return {"perf/throughput": num_tokens / (step_s * num_ranks)}


def wilson_interval(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of a share, both in [0, 1].

    Unlike p +- z sqrt(p (1 - p) / n) it stays inside [0, 1] and keeps its width at 0 and n successes (Wilson 1927).
    """
    if not 0 <= successes <= total or total < 1:
        raise ValueError(f"an interval needs 0 <= successes <= total and total >= 1, got {successes} of {total}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    share = successes / total
    center = share + z2 / (2 * total)
    half_width = math.sqrt(z2 * (share * (1 - share) / total + z2 / (4 * total * total)))
    low, high = (center - half_width) / (1 + z2 / total), (center + half_width) / (1 + z2 / total)
    return (0.0 if successes == 0 else low), (1.0 if successes == total else high)


def compute_accuracy_metrics(num_correct: int, num_samples: int) -> dict[str, float]:
    """Return `val/accuracy` with its 95 % Wilson interval and `val/num_samples` (counts are over all ranks)."""
    low, high = wilson_interval(num_correct, num_samples)
    return {
        "val/accuracy": num_correct / num_samples,
        "val/accuracy_low": low,
        "val/accuracy_high": high,
        "val/num_samples": float(num_samples),
    }


def format_accuracy(metrics: Mapping[str, float]) -> str:
    """Return, for example, `57.0 % (57 of 100, 95 % interval 47.2 to 66.3 %)` from `compute_accuracy_metrics`."""
    share, total = metrics["val/accuracy"], metrics["val/num_samples"]
    low, high = metrics["val/accuracy_low"], metrics["val/accuracy_high"]
    counts = f"{round(share * total)} of {round(total)}"
    return f"{share:.1%} ({counts}, 95% interval {100 * low:.1f} to {100 * high:.1f}%)".replace("%", " %")


class Timers:
    """Collects the wall seconds of named phases of one step on one rank: `with timers("gen"): ...`.

    A name used again adds to its time. Phases may nest under different names; a time includes what is nested in it.
    `synchronize`, for example `torch.cuda.synchronize`, is called at both ends of a phase, so that kernels still
    in flight are counted where they were launched.
    """

    def __init__(
        self, *, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._started_s: dict[str, float] = {}
        self._elapsed_s: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block under `timing_s/<name>`, also when it raises."""
        if name in self._started_s:
            raise ValueError(f"timer {name!r} is already running: its time would be counted twice")
        self._started_s[name] = self._now_s()
        try:
            yield
        finally:
            elapsed_s = self._now_s() - self._started_s.pop(name)
            self._elapsed_s[name] = self._elapsed_s.get(name, 0.0) + elapsed_s

    def elapsed_s(self, name: str) -> float:
        """Return the seconds collected under `name` so far, including a phase that is running."""
        running_s = self._now_s() - self._started_s[name] if name in self._started_s else 0.0
        return self._elapsed_s.get(name, 0.0) + running_s

    def collect(self) -> dict[str, float]:
        """Return `timing_s/<name>` of every finished phase, and start anew."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._elapsed_s.items()}
        self._elapsed_s = {}
        return metrics

    def _now_s(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


def _float64(values: Values) -> Tensor:
    return torch.as_tensor(values).detach().to(torch.float64)


def _pair(values: Values, weights: Values | None) -> tuple[Tensor, Tensor]:
    value = _float64(values)
    weight = torch.ones_like(value) if weights is None else _float64(weights).to(value.device)
    if weight.shape != value.shape:
        raise ValueError(f"weights of shape {tuple(weight.shape)} do not fit values of shape {tuple(value.shape)}")
    # A value that is left out may be anything, NaN included: 0 * NaN would leak into the sum.
    return torch.where(weight == 0, torch.zeros_like(value), value), weight
