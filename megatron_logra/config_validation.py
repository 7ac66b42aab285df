"""Owns the rules that settings must obey: ranges, divisibility, settings that need or exclude each other, paths.

Every rule that is broken gives one sentence, which names the setting, its value, the rule with its arithmetic and
the way out. All sentences of a call are raised together as one ConfigError, so that a user sees them at once.
A setting that was given (`Config.explicit`) and has no effect breaks a rule. A bound or an interval that a run
merely does not reach has an effect: `--train-iters 2` may follow any configuration.
"""

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

from megatron_logra.config import Config
from megatron_logra.config_layout import check_layout, check_recompute
from megatron_logra.config_schema import flag_of, raise_problems


class _Range(NamedTuple):
    """Values that a number may take; `low` and `high` themselves are allowed unless they are excluded."""

    low: float
    high: float = math.inf
    low_excluded: bool = False
    high_excluded: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_excluded else value >= self.low
        below = value < self.high if self.high_excluded else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        low = f"{'greater than' if self.low_excluded else 'at least'} {self.low}"
        high = f"{'less than' if self.high_excluded else 'at most'} {self.high}"
        return low if self.high == math.inf else f"{low} and {high}"


_POSITIVE = _Range(0, low_excluded=True)
_NOT_NEGATIVE = _Range(0)
_FRACTION = _Range(0, 1)
# Integers that are not listed here must be at least 1, whatever they count; every other number is listed.
_RANGES = (
    ("seq_length", _Range(2)),
    ("rotary_base", _POSITIVE),
    ("seed", _NOT_NEGATIVE),
    (
        "logra_rank",
        _Range(1, 2**16),
    ),  # a merge adds one product for each row exactly, which ends beyond 2**16
    ("logra_update_ratio", _POSITIVE),
    ("logra_beta2", _Range(0, 1, high_excluded=True)),
    ("logra_eps", _NOT_NEGATIVE),
    ("logra_seed", _NOT_NEGATIVE),
    ("lr", _POSITIVE),
    ("min_lr", _NOT_NEGATIVE),
    ("lr_warmup_iters", _NOT_NEGATIVE),
    ("weight_decay", _NOT_NEGATIVE),
    ("clip_grad", _NOT_NEGATIVE),
    ("adam_beta1", _Range(0, 1, high_excluded=True)),
    ("adam_beta2", _Range(0, 1, high_excluded=True)),
    ("adam_eps", _POSITIVE),
    ("kl_budget", _POSITIVE),
    ("kl_budget_final", _NOT_NEGATIVE),
    ("kl_alpha_max", _POSITIVE),
    ("kl_mismatch_weight", _FRACTION),
    ("kl_budget_floor", _FRACTION),
    ("grpo_group_size", _Range(2)),
    ("grpo_kl_beta", _NOT_NEGATIVE),
    ("grpo_clamp_eps_lower", _Range(0, 1, high_excluded=True)),
    ("grpo_clamp_eps_upper", _NOT_NEGATIVE),
    ("rollout_temperature", _POSITIVE),
    ("rollout_top_p", _Range(0, 1, low_excluded=True)),
    ("rollout_top_k", _NOT_NEGATIVE),
    ("log_samples", _NOT_NEGATIVE),
)
_REASONS = (
    ("kl_budget", "a budget of 0 would allow no update; to do without a budget use --kl-control off"),
    ("grpo_group_size", "the advantage in a group of one is always 0"),
    ("rollout_temperature", "at 0 all responses of a group would be the same"),
)


def validate_config(config: Config, *, world_size: int) -> None:
    """Check everything that needs neither the model nor the file system; raises ConfigError with all problems."""
    checks = (
        _check_ranges(config),
        _check_texts(config),
        check_layout(config, world_size),
        _check_batches(config, world_size),
        _check_lengths(config),
        check_recompute(config),
        _check_optimizer(config),
        _check_kl(config),
        _check_without_effect(config),
    )
    raise_problems(problem for check in checks for problem in check)


def validate_paths(config: Config) -> None:
    """Check that the files and folders to read exist and the folder to write can; raises ConfigError."""
    raise_problems(_check_paths(config))


def _check_ranges(config: Config) -> Iterator[str]:
    ranges, reasons = dict(_RANGES), dict(_REASONS)
    for name, value in config.flat().items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        allowed = ranges.get(name, _Range(1))
        if not allowed.holds(value):
            reason = f" ({reasons[name]})" if name in reasons else ""
            finite = "" if math.isfinite(value) else "finite "
            yield f"{name} {value} is out of range: set {flag_of(name)} to a {finite}value {allowed}{reason}"


def _check_texts(config: Config) -> Iterator[str]:
    may_be_empty = {"wandb_project", "wandb_exp_name", "system_prompt"}
    for name, value in config.flat().items():
        if value == "" and name not in may_be_empty:
            yield f"{name} is an empty text: give {flag_of(name)} a value"
    if "" in config.rollout.rollout_stop:
        yield "rollout_stop contains an empty text, which would end every response at once: remove it"
    if len(set(config.rollout.rollout_stop)) < len(config.rollout.rollout_stop):
        yield f"rollout_stop {list(config.rollout.rollout_stop)} contains the same text twice: remove one"
    if config.data.prompt_key == config.data.answer_key:
        yield (
            f"prompt_key and answer_key are both {config.data.prompt_key!r}, so that the answer would be the "
            "question: set --answer-key to the key of the answer"
        )
    module, colon, function = config.data.reward.rpartition(":")
    is_path = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    if config.data.reward and not (colon and is_path and function.isidentifier()):
        yield (
            f"reward {config.data.reward!r} is not of the form module:function, "
            "for example my_rewards:exact or path/to/my_rewards.py:exact"
        )


def _check_batches(config: Config, world_size: int) -> Iterator[str]:
    training, grpo = config.training, config.grpo
    batch, step = config.global_batch_size, config.responses_per_step
    ranks_per_replica = config.model_parallel_size * config.parallel.context_parallel_size
    if min(batch, step, training.micro_batch_size, ranks_per_replica, world_size) < 1:
        return
    product = f"grpo_prompts_per_step {grpo.grpo_prompts_per_step} x grpo_group_size {grpo.grpo_group_size}"
    if step % batch:
        yield (
            f"{product} = {step} responses is not divisible by global_batch_size {batch}: {step} % {batch} = "
            f"{step % batch}; set --global-batch-size to a divisor of {step}"
        )
    if world_size % ranks_per_replica:
        return
    replicas = config.data_parallel_size(world_size)
    unit = training.micro_batch_size * replicas
    if batch % unit:
        origin = f" (= {product})" if training.global_batch_size is None else ""
        yield (
            f"global_batch_size {batch}{origin} is not divisible by micro_batch_size {training.micro_batch_size} x "
            f"data-parallel size {replicas} = {unit}: {batch} % {unit} = {batch % unit}; "
            f"choose sizes so that {unit} divides the batch"
        )
    probe, share = config.kl.kl_probe_responses, batch // replicas
    if "kl_probe_responses" in config.explicit and probe > share:
        yield (
            f"kl_probe_responses {probe} is more than the responses of a data-parallel rank in one update, "
            f"{batch} // {replicas} = {share}: set --kl-probe-responses to at most {share}"
        )


def _check_lengths(config: Config) -> Iterator[str]:
    length, response = config.model.seq_length, config.rollout.rollout_max_new_tokens
    if response > 0 and length - response < 1:
        yield (
            f"rollout_max_new_tokens {response} leaves no room for a prompt in seq_length {length}: {length} - "
            f"{response} = {length - response} tokens; raise --seq-length or lower --rollout-max-new-tokens"
        )
    positions = config.model.max_position_embeddings
    if positions is not None and length > positions:
        yield (
            f"seq_length {length} is more than max_position_embeddings {positions}: set --seq-length to at most "
            f"{positions}"
        )


def _check_optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.logra_master == "split" and not config.training.bf16:
        yield (
            "logra_master split needs bf16, because it splits a float32 value into a bfloat16 weight and a "
            "remainder: give --bf16, or --logra-master fp32"
        )
    if config.has_learning_rate and optimizer.lr is None:
        because = (
            "optimizer adam"
            if optimizer.optimizer == "adam"
            else (
                "logra_train_non_targets" if optimizer.logra_train_non_targets else f"logra_rule {optimizer.logra_rule}"
            )
        )
        yield f"{because} needs lr: give a learning rate with --lr, for example --lr 1e-6"
    if optimizer.lr is not None and optimizer.min_lr > optimizer.lr:
        yield f"min_lr {optimizer.min_lr} is more than lr {optimizer.lr}: set --min-lr to at most {optimizer.lr}"
    if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters <= optimizer.lr_warmup_iters:
        yield (
            f"lr_decay_iters {optimizer.lr_decay_iters} is not after lr_warmup_iters {optimizer.lr_warmup_iters}: the "
            "learning rate rises first and then falls; raise --lr-decay-iters"
        )
    if config.trains_densely and config.sync.sync == "factors":
        yield (
            "sync factors cannot describe a dense update (optimizer adam or logra_train_non_targets): give --sync full "
            "or leave it out"
        )
    if optimizer.optimizer == "adam" and config.kl.kl_control == "predicted" and "kl_control" in config.explicit:
        yield "kl_control predicted needs optimizer logra: dense Adam's update is taken as it is; give --kl-control off"


def _check_kl(config: Config) -> Iterator[str]:
    kl, optimizer = config.kl, config.optimizer
    if kl.kl_estimator == "fisher" and (optimizer.weight_decay > 0 or optimizer.logra_train_non_targets):
        what = "weight_decay" if optimizer.weight_decay > 0 else "logra_train_non_targets"
        yield f"kl_estimator fisher takes no {what}, which its backward passes would miss: give --kl-estimator jvp"
    if config.is_kl_controlled and kl.kl_schedule != "constant" and kl.kl_budget_final > kl.kl_budget:
        yield (
            f"kl_budget_final {kl.kl_budget_final} is more than kl_budget {kl.kl_budget}, but the budget falls from "
            f"first to last: set --kl-budget-final to at most {kl.kl_budget}"
        )


class _WithoutEffect(NamedTuple):
    """When it applies, these settings have no effect because of something, and what to do instead."""

    applies: bool
    names: tuple[str, ...]
    because: str
    fix: str


def _check_without_effect(config: Config) -> Iterator[str]:
    """Settings that were given although another setting turns off what they are for."""
    values = config.flat()
    for rule in (*_optimizer_rules(config), *_kl_rules(config), *_output_rules(config)):
        for name in rule.names:
            if rule.applies and name in config.explicit:
                yield (
                    f"{name} {values[name]} has no effect with {rule.because}: {rule.fix}, or leave out {flag_of(name)}"
                )


def _optimizer_rules(config: Config) -> Iterator[_WithoutEffect]:
    optimizer = config.optimizer
    adam, rule = optimizer.optimizer == "adam", optimizer.logra_rule
    logra_names = tuple(name for name in config.flat() if name.startswith("logra_"))
    rate_names = ("lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "lr_decay_style", "weight_decay", "clip_grad")
    adam_names = ("adam_beta1", "adam_beta2", "adam_eps")
    yield _WithoutEffect(adam, logra_names, "optimizer adam", "give --optimizer logra")
    yield _WithoutEffect(
        not config.has_learning_rate,
        rate_names,
        "logra_rule paper, whose step is logra_update_ratio",
        "give --logra-rule lr",
    )
    yield _WithoutEffect(not config.trains_densely, adam_names, "optimizer logra", "give --optimizer adam")
    yield _WithoutEffect(
        optimizer.lr_decay_style == "constant",
        ("min_lr", "lr_decay_iters"),
        "lr_decay_style constant",
        "give --lr-decay-style cosine",
    )
    yield _WithoutEffect(
        not adam and rule != "paper", ("logra_update_ratio",), f"logra_rule {rule}", "give --logra-rule paper"
    )
    yield _WithoutEffect(rule == "sgd", ("logra_beta2", "logra_eps"), "logra_rule sgd", "give --logra-rule lr")
    yield _WithoutEffect(
        not config.training.bf16 and not config.trains_densely,
        ("use_distributed_optimizer",),
        "float32 weights, which are their own masters",
        "give --bf16",
    )


def _kl_rules(config: Config) -> Iterator[_WithoutEffect]:
    kl, off, adam = config.kl, not config.is_kl_controlled, config.optimizer.optimizer == "adam"
    budget_names = tuple(
        name
        for name in config.flat()
        if name.startswith("kl_") and name not in ("kl_control", "kl_measure_interval") and "probe" not in name
    )
    yield _WithoutEffect(off and not adam, budget_names, "kl_control off", "give --kl-control predicted")
    yield _WithoutEffect(adam, (*budget_names, "kl_probe_interval"), "optimizer adam", "give --optimizer logra")
    yield _WithoutEffect(
        not off and kl.kl_schedule == "constant",
        ("kl_budget_final", "kl_schedule_steps"),
        "kl_schedule constant",
        "give --kl-schedule cosine",
    )
    yield _WithoutEffect(
        not off and kl.kl_schedule != "constant" and kl.kl_budget == kl.kl_budget_final,
        ("kl_schedule_steps",),
        "kl_budget_final = kl_budget",
        "give another --kl-budget-final",
    )
    yield _WithoutEffect(
        kl.kl_estimator != "fisher",
        ("kl_fisher_draws",),
        f"kl_estimator {kl.kl_estimator}",
        "give --kl-estimator fisher",
    )
    yield _WithoutEffect(
        not off and kl.kl_mismatch_weight == 0,
        ("kl_budget_floor",),
        "kl_mismatch_weight 0",
        "give --kl-mismatch-weight more than 0",
    )


def _output_rules(config: Config) -> Iterator[_WithoutEffect]:
    yield _WithoutEffect(
        config.checkpoint.save is None,
        ("save_interval", "save_retain_interval", "save_best_metric", "async_save", "export_interval"),
        "no save",
        "give --save a folder",
    )
    yield _WithoutEffect(config.checkpoint.load is None, ("fallback",), "no load", "give --load a folder")
    yield _WithoutEffect(config.data.eval_data is None, ("save_best_metric",), "no eval_data", "give --eval-data")
    yield _WithoutEffect(
        config.data.eval_data is None, ("eval_interval", "eval_samples"), "no eval_data", "give --eval-data a file"
    )
    yield _WithoutEffect(
        not config.logging.wandb_project,
        ("wandb_exp_name", "wandb_save_dir"),
        "no wandb_project",
        "give --wandb-project a name",
    )


def _check_paths(config: Config) -> Iterator[str]:
    load = None if config.starts_or_continues else config.checkpoint.load
    folders = (("hf_checkpoint", config.model.hf_checkpoint), ("load", load))
    files = (("train_data", config.data.train_data), ("eval_data", config.data.eval_data))
    for name, path in folders:
        if path is not None and not os.path.isdir(path):
            state = "is not a folder" if os.path.exists(path) else "does not exist"
            yield f"{name} {path!r} {state}: give {flag_of(name)} an existing folder"
    for name, path in files:
        if path is not None and not os.path.isfile(path):
            state = "is not a file" if os.path.exists(path) else "does not exist"
            yield f"{name} {path!r} {state}: give {flag_of(name)} an existing .jsonl or .parquet file"
    outputs = (
        ("save", config.checkpoint.save),
        ("tensorboard_dir", config.logging.tensorboard_dir),
        ("wandb_save_dir", config.logging.wandb_save_dir),
    )
    for name, path in outputs:
        if path is not None and os.path.exists(path) and not os.path.isdir(path):
            yield f"{name} {path!r} is a file, but a folder is to be written there: give {flag_of(name)} another path"
    save, source = config.checkpoint.save, config.model.hf_checkpoint
    if save is not None and os.path.realpath(save) == os.path.realpath(source):
        yield f"save {save!r} is the folder of hf_checkpoint, which it would overwrite: give --save another folder"
