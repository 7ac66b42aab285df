"""Owns the configuration tree: every setting of a run, its type, default, unit and help text, and nothing else.

The tree is made of frozen dataclasses, one per section. The name of a leaf is unique over the whole tree and is
at once the attribute (`config.parallel.tensor_model_parallel_size`), the command-line flag
(`--tensor-model-parallel-size`) and the YAML key. The annotation is the type that is enforced; a `Literal` lists
the choices; `None` means "not set", and the help text says what happens then.

Nothing here or below imports torch, so that `--help` answers at once.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
class ModelConfig:
    """Model: all but the sequence length comes from config.json; a value given here must agree with it."""

    hf_checkpoint: str = setting(
        help="Hugging Face folder that gives the shape (config.json), the weights (safetensors) and the tokenizer"
    )
    seq_length: int = setting(1024, help="longest prompt plus response", unit="tokens")
    make_vocab_size_divisible_by: int = setting(
        128, help="pad the vocabulary to a multiple of this times the tensor-parallel size", unit="tokens"
    )
    max_position_embeddings: int | None = setting(
        None, help="longest sequence that the model supports; not set: from config.json", unit="tokens"
    )
    num_layers: int | None = setting(None, help="transformer layers; not set: from config.json")
    hidden_size: int | None = setting(None, help="width of the residual stream; not set: from config.json")
    ffn_hidden_size: int | None = setting(None, help="inner width of the MLP; not set: from config.json")
    num_attention_heads: int | None = setting(None, help="query heads; not set: from config.json")
    num_query_groups: int | None = setting(None, help="key/value heads; not set: from config.json")
    kv_channels: int | None = setting(None, help="width of one head; not set: from config.json")
    vocab_size: int | None = setting(None, help="vocabulary before padding; not set: from config.json", unit="tokens")
    normalization: Literal["RMSNorm"] | None = setting(None, help="norm layers; not set: from config.json")
    rotary_base: float | None = setting(None, help="base of the rotary embedding; not set: from config.json")
    untie_embeddings_and_output_weights: bool | None = setting(
        None, help="whether the output layer has a weight of its own; not set: from config.json"
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout: data parallelism takes the ranks that tensor and pipeline parallelism leave."""

    tensor_model_parallel_size: int = setting(1, help="ranks that one layer is split over", unit="ranks")
    pipeline_model_parallel_size: int = setting(1, help="stages that the layers are split into", unit="ranks")
    sequence_parallel: bool = setting(
        False, help="split the activations between tensor-parallel regions along the sequence"
    )
    distributed_backend: Literal["nccl", "gloo"] | None = setting(
        None, help="backend of torch.distributed; not set: nccl with CUDA, gloo without"
    )
    distributed_timeout_minutes: int = setting(
        10, help="time after which a collective that hangs ends the run", unit="minutes"
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training: length of the run, batches, precision, memory."""

    train_iters: int = setting(
        100, help="iterations; each makes one batch of rollouts and trains on it", unit="iterations"
    )
    micro_batch_size: int = setting(1, help="responses in one forward pass of a rank", unit="responses")
    global_batch_size: int | None = setting(
        None,
        help="responses that one update is made of, over all ranks; "
        "not set: all of an iteration (--grpo-prompts-per-step x --grpo-group-size)",
        unit="responses",
    )
    seed: int = setting(1234, help="seed of the data order and of sampling")
    bf16: bool = setting(False, help="compute in bfloat16; without it in float32")
    recompute_granularity: Literal["full"] | None = setting(
        None, help="recompute activations of whole layers in the backward pass; not set: keep them all"
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None,
        help="uniform: recompute all layers in chunks of --recompute-num-layers; "
        "block: recompute only the first --recompute-num-layers layers of each pipeline stage",
    )
    recompute_num_layers: int | None = setting(
        None, help="see --recompute-method; needed with --recompute-granularity", unit="layers"
    )
    log_probs_chunk_size: int = setting(
        1024, help="positions whose logits exist at the same time; bounds their memory", unit="tokens"
    )
    exit_interval: int | None = setting(
        None,
        help="stop after an iteration that is divisible by this; not set: run to the end",
        unit="iterations",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer (LoGRA): sketch, update rule and master weights."""

    optimizer: Literal["logra"] = setting("logra", help="optimizer")
    logra_rank: int = setting(256, help="rows of a random projection: the rank of an update")
    logra_rule: Literal["paper"] = setting("paper", help="how a sketch becomes a direction")
    logra_update_ratio: float = setting(6e-5, help="norm of a proposed update over the norm of the weights it changes")
    logra_beta2: float = setting(0.95, help="decay of the second moments of the rows")
    logra_eps: float = setting(1e-8, help="added to a row's root second moment, relative to the mean root")
    logra_seed: int = setting(42, help="seed of the random projections")
    logra_distribution: Literal["rademacher", "gaussian"] = setting(
        "rademacher", help="entries of the random projections"
    )
    logra_master: Literal["split", "fp32"] | None = setting(
        None,
        help="master weights: split keeps a 16-bit remainder beside the bfloat16 weight (4 bytes a parameter), "
        "fp32 a separate copy (6 bytes); not set: split with --bf16, fp32 without",
    )


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """KL control: predict what an update does to the policy, and scale it before it is made."""

    kl_control: Literal["predicted", "off"] = setting(
        "predicted",
        help="predicted: scale each update to meet the budget; off: take every update as proposed",
    )
    kl_estimator: Literal["jvp"] = setting("jvp", help="how the KL is predicted (jvp: forward-mode derivative)")
    kl_budget: float = setting(2e-4, help="KL that the first update may cost", unit="nats per token")
    kl_budget_final: float = setting(2e-5, help="KL that the last update may cost", unit="nats per token")
    kl_schedule_steps: int = setting(
        300, help="updates over which the budget falls (cosine) from first to last", unit="updates"
    )
    kl_alpha_max: float = setting(3.0, help="largest factor by which a proposed update is scaled")
    kl_probe_responses: int = setting(
        2, help="responses of each data-parallel rank that the prediction uses", unit="responses"
    )
    kl_probe_max_tokens: int = setting(
        4096, help="bound on the tokens of those responses, on each data-parallel rank", unit="tokens"
    )
    kl_mismatch_weight: float = setting(
        0.3, help="weight of the newest value in the average generation mismatch; 0 ignores the mismatch"
    )
    kl_budget_floor: float = setting(
        0.5, help="part of the scheduled budget that the mismatch can never take away", unit="fraction"
    )
    kl_measure_interval: int | None = setting(
        None, help="measure the actual KL after every so many updates; not set: never", unit="updates"
    )


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
    rollout_temperature: float = setting(1.0, help="sampling temperature")
    rollout_top_p: float = setting(1.0, help="sample from the likeliest tokens of this total probability")
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
    load: str | None = setting(None, help="folder that an earlier run of the same layout saved, to continue it")
    save_interval: int | None = setting(
        None, help="save every so many iterations; not set: only at the end", unit="iterations"
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
        """Copies of the model among `world_size` ranks."""
        return world_size // self.model_parallel_size

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
