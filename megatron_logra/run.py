"""Everything a training run is made of, built from its configuration: policy, data, rollout engine, loggers.

All checks that need files or the model happen here, before anything is written. A problem on one rank ends all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_logra.checkpoint.training import CheckpointWriter
from megatron_logra.config import Config
from megatron_logra.config_layout import ModelSizes, validate_model_parallel
from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.safetensors_io import HFReader, validate_checkpoint
from megatron_logra.kl.calibration import CalibrationWatch
from megatron_logra.kl.controller import KLController
from megatron_logra.loggers.base import LoggerGroup
from megatron_logra.mcore.bridge_family import read_shape
from megatron_logra.mcore.build import (
    build_optimizer,
    build_policy,
    check_projections,
    load_weights_,
    select_groups,
)
from megatron_logra.mcore.dense import DenseOptimizer
from megatron_logra.mcore.initialize import initialize_distributed, initialize_model_parallel
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.spec import attention_beyond_engine, select_modules
from megatron_logra.mcore.transformer_config import PolicySettings
from megatron_logra.mcore.weights import ReferencePolicy, stage_tables
from megatron_logra.metrics import Timers
from megatron_logra.optim.dense import DenseSettings
from megatron_logra.optim.logra import LograOptimizer, LograSettings
from megatron_logra.optim.schedule import LearningRateSchedule
from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.parallel.scalars import run_on_all_ranks
from megatron_logra.rl.data import PromptStream, Sample, load_dataset, tokenize_prompts
from megatron_logra.rl.rewards import RewardFunction, load_reward
from megatron_logra.rollout.embedded import EmbeddedEngine
from megatron_logra.rollout.engine import RolloutEngine
from megatron_logra.signals import ExitSignal
from megatron_logra.sync.gather import ShardSizes
from megatron_logra.sync.sender import PolicySender
from megatron_logra.train_step import check_forward_mode


class SetUpError(ValueError):
    """The run cannot start: wrong settings, model folder or data. Nothing was written."""


@dataclass(frozen=True)
class Questions:
    """A data set with its tokenised prompts, by sample index."""

    samples: list[Sample]
    prompts: list[list[int]]


@dataclass(frozen=True)
class Inputs:
    """What a run reads before it builds anything large; `stream` is where it stands in the training questions."""

    shape: ModelShape
    reader: HFReader
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    train: Questions
    stream: PromptStream
    evaluation: Questions | None
    reward: RewardFunction


@dataclass(frozen=True)
class BestMetric:
    """The highest value so far of the metric that --save-best-metric names, and the iteration that it belongs to."""

    name: str
    value: float
    step: int


@dataclass
class Run:
    """The state of a training run on one rank; `step` counts finished iterations."""

    config: Config
    inputs: Inputs
    groups: ParallelGroups
    device: torch.device
    policy: Policy
    optimizer: LograOptimizer | None
    dense: DenseOptimizer | None
    controller: KLController
    reference: ReferencePolicy | None
    engine: RolloutEngine
    sender: PolicySender
    timers: Timers
    loggers: LoggerGroup
    calibration: CalibrationWatch = field(default_factory=CalibrationWatch)
    writer: CheckpointWriter | None = None
    exit_signal: ExitSignal | None = None
    best: BestMetric | None = None
    step: int = 0

    @property
    def is_first_rank(self) -> bool:
        """True on the rank that speaks to the person."""
        return self.groups.rank == 0

    @property
    def version(self) -> int:
        """Policy version: the number of updates made."""
        counting = self.optimizer or self.dense
        assert counting is not None
        return counting.num_updates


def build_run(config: Config) -> Run:
    """Join the training world and build this rank's run. Collective over all ranks.

    Raises:
        SetUpError: something in the configuration, the model folder or the data is wrong, here or on another rank.
    """
    device = initialize_distributed(
        backend=config.parallel.distributed_backend,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
    )
    world = dist.group.WORLD
    assert world is not None
    inputs = _read_on_all_ranks(config, world, device)
    parallel = config.parallel
    settings = policy_settings(config, inputs.shape)
    groups = initialize_model_parallel(
        seed=config.training.seed,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=settings.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
    )
    policy = run_on_all_ranks(lambda: build_policy(inputs.shape, settings, groups), world, device)
    load_weights_(policy, inputs.reader.read)
    optimizer = None
    if policy.target_groups:
        optimizer = build_optimizer(policy, _logra_settings(config))
        check_projections(policy, optimizer)
        if config.kl.kl_estimator != "fisher":
            check_forward_mode(policy)
    sender = PolicySender(
        inputs.shape,
        stage_tables(policy),
        sizes=ShardSizes(
            tp=groups.tp_size,
            etp=groups.etp_size,
            ep=groups.ep_size,
            padded_vocab=config.padded_vocab_size(inputs.shape.vocab_size),
        ),
        targets=policy.target_groups,
        tp_group=groups.tp,
        pp_group=groups.pp,
        expert_group=groups.etp_ep,
        bucket_bytes=config.sync.sync_bucket_mb * 2**20,
        device=device,
    )
    return Run(
        config=config,
        inputs=inputs,
        groups=groups,
        device=device,
        policy=policy,
        optimizer=optimizer,
        dense=DenseOptimizer(policy, _dense_settings(config)) if config.trains_densely else None,
        controller=_build_controller(config),
        reference=ReferencePolicy(policy) if config.grpo.grpo_kl_beta > 0 else None,
        engine=EmbeddedEngine(
            config.model.hf_checkpoint,
            groups=sender.groups,
            tokenizer=inputs.tokenizer,
            dtype=compute_dtype(config),
            device=device,
            batch_size=config.rollout.rollout_batch_size,
            shape=inputs.shape,
        ),
        sender=sender,
        timers=Timers(synchronize=torch.cuda.synchronize if device.type == "cuda" else None),
        loggers=LoggerGroup(),
    )


def _read_on_all_ranks(config: Config, world: dist.ProcessGroup, device: torch.device) -> Inputs:
    """Read the inputs everywhere, or raise `SetUpError` everywhere."""
    try:
        return run_on_all_ranks(lambda: read_inputs(config), world, device)
    except (ValueError, OSError, RuntimeError) as error:
        raise SetUpError(str(error)) from error


def compute_dtype(config: Config) -> torch.dtype:
    """Dtype of weights and activations."""
    return torch.bfloat16 if config.training.bf16 else torch.float32


def read_inputs(config: Config) -> Inputs:
    """Read and check the model folder, the tokenizer, the data and the reward function; writes nothing.

    Raises:
        ValueError: naming the file, line, tensor or setting that is wrong.
    """
    folder = config.model.hf_checkpoint
    shape = read_shape(folder, config.model_overrides())
    validate_model_parallel(config, _sizes(shape))
    if config.optimizer.optimizer == "logra":
        select_groups(shape, config.optimizer.logra_targets or None)
    own_attention = attention_beyond_engine(shape, config.parallel.context_parallel_size)
    select_modules(config.parallel.transformer_impl, own_attention=own_attention)
    reader = HFReader(folder)
    validate_checkpoint(reader, shape)
    tokenizer = _load_tokenizer(folder)
    reward = load_reward(config.data.reward)
    train = _read_questions(config, config.data.train_data, tokenizer)
    evaluation = None
    if config.data.eval_data is not None:
        evaluation = _read_questions(config, config.data.eval_data, tokenizer, limit=config.evaluation.eval_samples)
    stream = PromptStream(train.samples, seed=config.training.seed, prompts_per_step=config.grpo.grpo_prompts_per_step)
    return Inputs(shape, reader, tokenizer, _stop_token_ids(folder, tokenizer), train, stream, evaluation, reward)


def _read_questions(config: Config, path: str, tokenizer: Any, limit: int | None = None) -> Questions:
    data = config.data
    samples = load_dataset(
        path, prompt_key=data.prompt_key, answer_key=data.answer_key, system_prompt=data.system_prompt
    )[:limit]
    prompts = tokenize_prompts(
        samples,
        tokenizer,
        apply_chat_template=data.apply_chat_template,
        max_prompt_tokens=config.max_prompt_tokens,
        max_new_tokens=config.rollout.rollout_max_new_tokens,
    )
    return Questions(samples, prompts)


def _load_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds for a folder without tokenizer
        raise ValueError(
            f"hf_checkpoint {folder!r} has no tokenizer that transformers can load: {error}; put tokenizer.json (or "
            "tokenizer.model) and tokenizer_config.json beside the weights"
        ) from error


def _stop_token_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the folder's generation config and of its tokenizer."""
    from transformers import GenerationConfig

    ids: list[int | None] = [tokenizer.eos_token_id]
    if (Path(folder) / "generation_config.json").is_file():
        given = GenerationConfig.from_pretrained(folder).eos_token_id
        ids += given if isinstance(given, list) else [given]
    stops = tuple(sorted({token for token in ids if token is not None}))
    if not stops:
        raise ValueError(
            f"neither the tokenizer nor generation_config.json of {folder!r} names an end token (eos_token_id): no "
            "response could end; add one"
        )
    return stops


def _sizes(shape: ModelShape) -> ModelSizes:
    return ModelSizes(**{leaf.name: getattr(shape, leaf.name) for leaf in fields(ModelSizes)})


def policy_settings(config: Config, shape: ModelShape) -> PolicySettings:
    """How the configuration lays the policy out."""
    training, parallel = config.training, config.parallel
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    return PolicySettings(
        dtype=compute_dtype(config),
        seq_length=config.model.seq_length,
        sequence_parallel=parallel.sequence_parallel,
        virtual_pipeline_model_parallel_size=(
            None if chunk is None else shape.num_layers // parallel.pipeline_model_parallel_size // chunk
        ),
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        recompute_modules=training.recompute_modules or None,
        transformer_impl=parallel.transformer_impl,
        master=config.logra_master,
        shard_master=parallel.use_distributed_optimizer,
        targets=config.optimizer.logra_targets or None,
        train_all=config.optimizer.optimizer == "adam",
        train_non_targets=config.optimizer.logra_train_non_targets,
        chunk_size=training.log_probs_chunk_size,
    )


def _logra_settings(config: Config) -> LograSettings:
    optimizer = config.optimizer
    has_rate = optimizer.logra_rule != "paper"
    return LograSettings(
        rank=optimizer.logra_rank,
        rule=optimizer.logra_rule,
        update_ratio=optimizer.logra_update_ratio,
        beta2=optimizer.logra_beta2,
        epsilon=optimizer.logra_eps,
        seed=optimizer.logra_seed,
        distribution=optimizer.logra_distribution,
        refresh_interval=optimizer.logra_refresh_interval,
        projection_cache=optimizer.logra_projection_cache,
        schedule=_schedule(config) if has_rate else None,
        weight_decay=optimizer.weight_decay if has_rate else 0.0,
        clip_grad=optimizer.clip_grad if has_rate else 0.0,
    )


def _dense_settings(config: Config) -> DenseSettings:
    optimizer = config.optimizer
    return DenseSettings(
        schedule=_schedule(config),
        weight_decay=optimizer.weight_decay,
        beta1=optimizer.adam_beta1,
        beta2=optimizer.adam_beta2,
        epsilon=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        distributed=config.parallel.use_distributed_optimizer,
    )


def _schedule(config: Config) -> LearningRateSchedule:
    optimizer = config.optimizer
    assert optimizer.lr is not None
    return LearningRateSchedule(
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        warmup=optimizer.lr_warmup_iters,
        decay=optimizer.lr_decay_iters or config.training.train_iters * config.updates_per_step,
        style=optimizer.lr_decay_style,
    )


def _build_controller(config: Config) -> KLController:
    kl = config.kl
    return KLController(
        budget=kl.kl_budget,
        budget_final=kl.kl_budget_final,
        schedule_steps=kl.kl_schedule_steps,
        schedule=kl.kl_schedule,
        alpha_max=kl.kl_alpha_max,
        mismatch_weight=kl.kl_mismatch_weight,
        budget_floor=kl.kl_budget_floor,
    )
