"""Owns the configuration tree: every setting of a run, its type, default, unit and help text, and nothing else.

The tree is made of frozen dataclasses, one per section. The name of a leaf is unique over the whole tree and is
at once the attribute (`config.parallel.tensor_model_parallel_size`), the command-line flag
(`--tensor-model-parallel-size`) and the YAML key. The annotation is the type that is enforced; a `Literal` lists
the choices; `None` means "not set", and the help text says what happens then.

Nothing here or below imports torch, so that `--help` answers at once.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_logra.config_policy import KLConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_logra.config_schema import ConfigError, Setting, closest, read_settings, setting

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "GRPOConfig",
    "KLConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RolloutConfig",
    "SyncConfig",
    "TrainingConfig",
    "build_config",
    "iterate_sections",
    "iterate_settings",
]


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """GRPO: groups of responses and the loss."""

    grpo_prompts_per_step: int = setting(8, help="prompts of one iteration, over all ranks", unit="prompts")
    grpo_group_size: int = setting(8, help="responses to each prompt", unit="responses")
    grpo_iterations: int = setting(1, help="passes over one batch of rollouts", unit="passes")
    grpo_skip_zero_advantage: bool = setting(
        True,
        help="leave responses whose advantage is 0 out of forward and backward: the update is the same, "
        "metrics of the training pass are then over the others",
    )
    grpo_kl_beta: float = setting(0.0, help="weight of the KL to the initial policy in the loss; 0: none")
    grpo_clamp_eps_lower: float = setting(0.2, help="the probability ratio is clipped below 1 minus this")
    grpo_clamp_eps_upper: float = setting(0.2, help="the probability ratio is clipped above 1 plus this")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollouts: how responses are generated."""

    rollout_engine: Literal["embedded"] = setting(
        "embedded", help="embedded: a Hugging Face model in every process of the trainer"
    )
    rollout_temperature: float = setting(
        1.0, help="sampling temperature; log-probabilities and the predicted KL are taken at it, on both sides"
    )
    rollout_top_p: float = setting(
        1.0,
        help="sample from the likeliest tokens of this total probability, of what --rollout-top-k left; "
        "log-probabilities and the predicted KL stay those of the whole distribution, on both sides",
    )
    rollout_top_k: int = setting(
        0,
        help="sample from so many likeliest tokens, before --rollout-top-p; 0: from all; log-probabilities and the "
        "predicted KL stay those of the whole distribution, on both sides",
        unit="tokens",
    )
    rollout_max_new_tokens: int = setting(256, help="longest response", unit="tokens")
    rollout_stop: tuple[str, ...] = setting((), help="texts that end a response, beside the end token")
    rollout_batch_size: int = setting(64, help="responses that a rank generates at the same time", unit="responses")


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Synchronisation of the rollout engine with the trainer."""

    sync: Literal["factors", "full", "auto"] = setting(
        "auto",
        help="factors: send only the low-rank update; full: send all weights; auto: factors, and full at the "
        "start and whenever an engine has lost track",
    )
    sync_bucket_mb: int = setting(64, help="most that is gathered and sent at once", unit="MiB")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and rewards."""

    train_data: str = setting(help="training questions, a .jsonl or .parquet file")
    eval_data: str | None = setting(None, help="held-out questions, a .jsonl or .parquet file; not set: no evaluation")
    prompt_key: str = setting("prompt", help="key of the prompt: a text, or a list of chat messages")
    answer_key: str = setting("answer", help="key of the reference answer")
    system_prompt: str | None = setting(None, help="system message put before each prompt; not set: none")
    apply_chat_template: bool = setting(True, help="render prompts with the chat template of the tokenizer")
    reward: str = setting(
        "megatron_logra.rl.rewards:exact_number", help="reward function, module:function or path/to/file.py:function"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = setting(None, help="folder of the run's results and checkpoints; not set: nothing is saved")
    load: str | None = setting(
        None,
        help="folder that an earlier run saved, to continue it on any layout; the same as --save: start anew when it "
        "holds no checkpoint yet, so that a restarted job goes on by itself",
    )
    save_interval: int | None = setting(
        None, help="save every so many iterations; not set: only at the end", unit="iterations"
    )
    save_retain_interval: int | None = setting(
        None,
        help="keep only checkpoints of every so many iterations, the newest two and the best; not set: keep all",
        unit="iterations",
    )
    save_best_metric: str | None = setting(
        None, help="save whenever this metric of an evaluation (val/accuracy, val/reward) is the highest so far"
    )
    async_save: bool = setting(
        False, help="write checkpoints and exports while training goes on, from a copy in host memory"
    )
    fallback: bool = setting(True, help="continue from an older checkpoint when the newest one is damaged")
    export_interval: int | None = setting(
        None,
        help="write the policy as SAVE/huggingface every so many iterations; not set: with every checkpoint",
        unit="iterations",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on --eval-data, always at the start and at the end."""

    eval_interval: int | None = setting(
        None, help="evaluate also every so many iterations; not set: only at start and end", unit="iterations"
    )
    eval_samples: int | None = setting(None, help="questions to evaluate on; not set: all", unit="questions")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = setting(1, help="print the table of metrics every so many iterations", unit="iterations")
    log_comm_interval: int | None = setting(
        None,
        help="count the bytes of all communication in every so many iterations (it slows these down); not set: never",
        unit="iterations",
    )
    log_samples: int = setting(2, help="responses printed with each table; 0: none", unit="responses")
    tensorboard_dir: str | None = setting(None, help="folder for TensorBoard; not set: no TensorBoard")
    wandb_project: str = setting("", help="Weights & Biases project; empty: no Weights & Biases")
    wandb_exp_name: str = setting("", help="name of the run in Weights & Biases; empty: it makes one up")
    wandb_save_dir: str | None = setting(None, help="folder for local files of Weights & Biases; not set: its own")


MODEL_OVERRIDES = tuple(
    leaf.name
    for leaf in dataclasses.fields(ModelConfig)
    if leaf.name not in {"hf_checkpoint", "seq_length", "make_vocab_size_divisible_by"}
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run; `explicit` names those that were given and not left at their default."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    kl: KLConfig = KLConfig()
    grpo: GRPOConfig = GRPOConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    data: DataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    explicit: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Shares that the responses are split into among `world_size` ranks."""
        return world_size // (self.model_parallel_size * self.parallel.context_parallel_size)

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Ranks that one expert is split over: the setting, or that of dense layers."""
        given = self.parallel.expert_tensor_parallel_size
        return self.parallel.tensor_model_parallel_size if given is None else given

    @property
    def is_kl_controlled(self) -> bool:
        """Whether updates are scaled to a KL budget; dense Adam's are taken as they are."""
        return self.optimizer.optimizer == "logra" and self.kl.kl_control == "predicted"

    @property
    def trains_densely(self) -> bool:
        """Whether Megatron's optimizer trains anything: every weight, or those that are not sketched."""
        return self.optimizer.optimizer == "adam" or self.optimizer.logra_train_non_targets

    @property
    def has_learning_rate(self) -> bool:
        """Whether anything is trained with `lr`."""
        return self.trains_densely or self.optimizer.logra_rule != "paper"

    @property
    def synchronisation(self) -> Literal["factors", "full", "auto"]:
        """How the rollout engine follows: the setting; factors alone do not describe a dense update."""
        return "full" if self.trains_densely else self.sync.sync

    @property
    def starts_or_continues(self) -> bool:
        """Whether the run continues its own folder, and starts anew while that holds no checkpoint."""
        load, save = self.checkpoint.load, self.checkpoint.save
        return load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save)

    @property
    def responses_per_step(self) -> int:
        """Responses of one iteration, over all ranks."""
        return self.grpo.grpo_prompts_per_step * self.grpo.grpo_group_size

    @property
    def global_batch_size(self) -> int:
        """Responses of one update, over all ranks: the setting, or all responses of an iteration."""
        given = self.training.global_batch_size
        return self.responses_per_step if given is None else given

    @property
    def updates_per_step(self) -> int:
        """Updates of one iteration."""
        return self.responses_per_step // self.global_batch_size * self.grpo.grpo_iterations

    def num_microbatches(self, world_size: int) -> int:
        """Micro-batches of one update on each data-parallel rank."""
        return self.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size(world_size))

    @property
    def logra_master(self) -> Literal["split", "fp32"]:
        """Master weights: the setting, or what the precision implies."""
        return self.optimizer.logra_master or ("split" if self.training.bf16 else "fp32")

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for the longest response."""
        return self.model.seq_length - self.rollout.rollout_max_new_tokens

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Vocabulary after padding, a multiple that every tensor-parallel rank gets an equal part of."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple

    def model_overrides(self) -> dict[str, object]:
        """Model settings that were given; each must agree with config.json."""
        values = ((name, getattr(self.model, name)) for name in MODEL_OVERRIDES)
        return {name: value for name, value in values if value is not None}

    def flat(self) -> dict[str, object]:
        """All settings by name, in the order of the tree."""
        return {spec.name: getattr(getattr(self, spec.section), spec.name) for spec in iterate_settings()}


def iterate_settings() -> Iterator[Setting]:
    """Every leaf of the tree, in order."""
    for section, section_class in iterate_sections():
        yield from read_settings(section, section_class)


def iterate_sections() -> Iterator[tuple[str, Any]]:
    """Name and class of every section, in order."""
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.type):
            yield section.name, section.type


def build_config(values: Mapping[str, object], *, explicit: Iterable[str] | None = None) -> Config:
    """Build the tree from settings by name; whatever is not in `values` gets its default.

    `explicit` names the settings that count as given (default: all of `values`). Raises ConfigError with all
    unknown names, values of a wrong type and missing required settings.
    """
    specs = {spec.name: spec for spec in iterate_settings()}
    problems = [f"unknown setting {name!r}{closest(name, specs)}" for name in values if name not in specs]
    sections: dict[str, dict[str, object]] = {section: {} for section, _ in iterate_sections()}
    for spec in specs.values():
        if spec.name not in values:
            if spec.required:
                problems.append(f"{spec.name} is required: give {spec.flag} ({spec.help})")
            continue
        try:
            sections[spec.section][spec.name] = spec.convert(values[spec.name])
        except TypeError as error:
            problems.append(f"{spec.name}: {error}")
    if problems:
        raise ConfigError(problems)
    tree: dict[str, Any] = {name: cls(**sections[name]) for name, cls in iterate_sections()}
    return Config(**tree, explicit=frozenset(values if explicit is None else explicit))
