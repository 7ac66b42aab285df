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
from megatron_logra.config_schema import ConfigError


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
        _check_layout(config, world_size),
        _check_batches(config, world_size),
        _check_lengths(config),
        _check_recompute(config),
        _check_kl(config),
        _check_without_effect(config),
    )
    _raise_problems(problem for check in checks for problem in check)


def validate_paths(config: Config) -> None:
    """Check that the files and folders to read exist and the folder to write can; raises ConfigError."""
    _raise_problems(_check_paths(config))


def validate_model_parallel(
    config: Config,
    *,
    num_attention_heads: int,
    num_query_groups: int,
    num_layers: int,
    ffn_hidden_size: int,
    max_position_embeddings: int | None = None,
) -> None:
    """Check that a model of this shape (from config.json) can be split as configured; raises ConfigError."""
    split = (
        (num_attention_heads, "attention heads"),
        (num_query_groups, "query groups (key/value heads)"),
        (ffn_hidden_size, "columns of ffn_hidden_size"),
    )
    problems = [
        problem for count, what in split for problem in _check_split(count, what, config, "tensor_model_parallel_size")
    ]
    problems += _check_split(num_layers, "layers", config, "pipeline_model_parallel_size")
    problems += _check_sequence_split(config)
    stages = config.parallel.pipeline_model_parallel_size
    chunk = config.training.recompute_num_layers
    if chunk is not None and stages > 0 and chunk > num_layers // stages:
        problems.append(
            f"recompute_num_layers {chunk} is more than the layers of a pipeline stage, {num_layers} // {stages} = "
            f"{num_layers // stages}: set --recompute-num-layers to at most {num_layers // stages}"
        )
    if max_position_embeddings is not None and config.model.seq_length > max_position_embeddings:
        problems.append(
            f"seq_length {config.model.seq_length} is more than the {max_position_embeddings} positions that the "
            f"model supports (max_position_embeddings): set --seq-length to at most {max_position_embeddings}"
        )
    _raise_problems(problems)


def _raise_problems(problems: Iterator[str] | list[str]) -> None:
    found = tuple(problems)
    if found:
        raise ConfigError(found)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_ranges(config: Config) -> Iterator[str]:
    ranges, reasons = dict(_RANGES), dict(_REASONS)
    for name, value in config.flat().items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        allowed = ranges.get(name, _Range(1))
        if not allowed.holds(value):
            reason = f" ({reasons[name]})" if name in reasons else ""
            finite = "" if math.isfinite(value) else "finite "
            yield f"{name} {value} is out of range: set {_flag(name)} to a {finite}value {allowed}{reason}"


def _check_texts(config: Config) -> Iterator[str]:
    may_be_empty = {"wandb_project", "wandb_exp_name", "system_prompt"}
    for name, value in config.flat().items():
        if value == "" and name not in may_be_empty:
            yield f"{name} is an empty text: give {_flag(name)} a value"
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


def _check_layout(config: Config, world_size: int) -> Iterator[str]:
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    if world_size < 1:
        yield f"world size {world_size} is out of range: start at least one process"
    size = tensor * pipeline
    if tensor > 0 and pipeline > 0 and world_size > 0 and world_size % size:
        yield (
            f"world size {world_size} is not divisible by tensor_model_parallel_size {tensor} x "
            f"pipeline_model_parallel_size {pipeline} = {size}: {world_size} % {size} = {world_size % size}; "
            f"start a multiple of {size} processes, or split the model over a number that divides {world_size}"
        )
    if config.parallel.sequence_parallel and tensor == 1:
        yield (
            "sequence_parallel has no effect with tensor_model_parallel_size 1: "
            "give --tensor-model-parallel-size at least 2, or leave out --sequence-parallel"
        )
    yield from _check_sequence_split(config)


def _check_sequence_split(config: Config) -> Iterator[str]:
    length, tensor = config.model.seq_length, config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and tensor > 1 and length % tensor:
        yield (
            f"seq_length {length} cannot be split over tensor_model_parallel_size {tensor} with sequence_parallel: "
            f"{length} % {tensor} = {length % tensor}; set --seq-length to a multiple of {tensor}"
        )


def _check_split(count: int, what: str, config: Config, name: str) -> Iterator[str]:
    size = getattr(config.parallel, name)
    if size > 0 and count % size:
        divisors = ", ".join(str(d) for d in range(1, min(count, 64) + 1) if count % d == 0)
        yield (
            f"{count} {what} cannot be split over {name} {size}: {count} % {size} = {count % size}; "
            f"set {_flag(name)} to a divisor of {count} ({divisors}{', ...' if count > 64 else ''})"
        )


def _check_batches(config: Config, world_size: int) -> Iterator[str]:
    training, grpo = config.training, config.grpo
    batch, step = config.global_batch_size, config.responses_per_step
    if min(batch, step, training.micro_batch_size, config.model_parallel_size, world_size) < 1:
        return
    product = f"grpo_prompts_per_step {grpo.grpo_prompts_per_step} x grpo_group_size {grpo.grpo_group_size}"
    if step % batch:
        yield (
            f"{product} = {step} responses is not divisible by global_batch_size {batch}: {step} % {batch} = "
            f"{step % batch}; set --global-batch-size to a divisor of {step}"
        )
    if world_size % config.model_parallel_size:
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


def _check_recompute(config: Config) -> Iterator[str]:
    training = config.training
    for name in ("recompute_method", "recompute_num_layers"):
        value = getattr(training, name)
        if training.recompute_granularity is None and value is not None:
            yield (
                f"{name} {value} has no effect without recompute_granularity: "
                f"give --recompute-granularity full, or leave out {_flag(name)}"
            )
        if training.recompute_granularity == "full" and value is None:
            example = "--recompute-method uniform" if name == "recompute_method" else "--recompute-num-layers 1"
            yield f"recompute_granularity full needs {name}: give for example {example}"
    if config.optimizer.logra_master == "split" and not training.bf16:
        yield (
            "logra_master split needs bf16, because it splits a float32 value into a bfloat16 weight and a "
            "remainder: give --bf16, or --logra-master fp32"
        )


def _check_kl(config: Config) -> Iterator[str]:
    kl = config.kl
    if kl.kl_control == "predicted" and kl.kl_budget_final > kl.kl_budget:
        yield (
            f"kl_budget_final {kl.kl_budget_final} is more than kl_budget {kl.kl_budget}, but the budget falls from "
            f"first to last: set --kl-budget-final to at most {kl.kl_budget}"
        )


def _check_without_effect(config: Config) -> Iterator[str]:
    """Settings that were given although another setting turns off what they are for."""
    kl, off = config.kl, config.kl.kl_control == "off"
    kl_names = tuple(name for name in config.flat() if name.startswith("kl_") and name != "kl_control")
    constant = not off and kl.kl_budget == kl.kl_budget_final
    rules: tuple[tuple[bool, tuple[str, ...], str, str], ...] = (
        (off, kl_names, "kl_control off", "give --kl-control predicted"),
        (constant, ("kl_schedule_steps",), "kl_budget_final = kl_budget", "give another --kl-budget-final"),
        (
            not off and kl.kl_mismatch_weight == 0,
            ("kl_budget_floor",),
            "kl_mismatch_weight 0",
            "give --kl-mismatch-weight more than 0",
        ),
        (config.checkpoint.save is None, ("save_interval",), "no save", "give --save a folder"),
        (
            config.data.eval_data is None,
            ("eval_interval", "eval_samples"),
            "no eval_data",
            "give --eval-data a file",
        ),
        (
            not config.logging.wandb_project,
            ("wandb_exp_name", "wandb_save_dir"),
            "no wandb_project",
            "give --wandb-project a name",
        ),
    )
    values = config.flat()
    for applies, names, because, fix in rules:
        for name in names:
            if applies and name in config.explicit:
                yield f"{name} {values[name]} has no effect with {because}: {fix}, or leave out {_flag(name)}"


def _check_paths(config: Config) -> Iterator[str]:
    folders = (("hf_checkpoint", config.model.hf_checkpoint), ("load", config.checkpoint.load))
    files = (("train_data", config.data.train_data), ("eval_data", config.data.eval_data))
    for name, path in folders:
        if path is not None and not os.path.isdir(path):
            state = "is not a folder" if os.path.exists(path) else "does not exist"
            yield f"{name} {path!r} {state}: give {_flag(name)} an existing folder"
    for name, path in files:
        if path is not None and not os.path.isfile(path):
            state = "is not a file" if os.path.exists(path) else "does not exist"
            yield f"{name} {path!r} {state}: give {_flag(name)} an existing .jsonl or .parquet file"
    outputs = (
        ("save", config.checkpoint.save),
        ("tensorboard_dir", config.logging.tensorboard_dir),
        ("wandb_save_dir", config.logging.wandb_save_dir),
    )
    for name, path in outputs:
        if path is not None and os.path.exists(path) and not os.path.isdir(path):
            yield f"{name} {path!r} is a file, but a folder is to be written there: give {_flag(name)} another path"
    save, source = config.checkpoint.save, config.model.hf_checkpoint
    if save is not None and os.path.realpath(save) == os.path.realpath(source):
        yield f"save {save!r} is the folder of hf_checkpoint, which it would overwrite: give --save another folder"
