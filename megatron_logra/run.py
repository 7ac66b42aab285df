"""Everything a training run is made of, built from its configuration: policy, data, rollout engine, loggers.

All checks that need files or the model happen here, before anything is written. A problem on one rank ends all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_logra.config import Config
from megatron_logra.config_validation import validate_model_parallel
from megatron_logra.hf.config import ModelShape, read_model_shape
from megatron_logra.hf.safetensors_io import HFReader, validate_checkpoint
from megatron_logra.kl.controller import KLController
from megatron_logra.loggers.base import LoggerGroup
from megatron_logra.mcore.build import PolicySettings, build_optimizer, build_policy, load_weights_
from megatron_logra.mcore.initialize import initialize_distributed, initialize_model_parallel
from megatron_logra.mcore.policy import Policy
from megatron_logra.mcore.weights import ReferencePolicy, stage_tables
from megatron_logra.metrics import Timers
from megatron_logra.optim.logra import LograOptimizer, LograSettings
from megatron_logra.parallel.groups import ParallelGroups
from megatron_logra.parallel.scalars import run_on_all_ranks
from megatron_logra.rl.data import PromptStream, Sample, load_dataset, tokenize_prompts
from megatron_logra.rl.rewards import RewardFunction, load_reward
from megatron_logra.rollout.embedded import EmbeddedEngine
from megatron_logra.rollout.engine import RolloutEngine
from megatron_logra.sync.sender import PolicySender


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


@dataclass
class Run:
    """The state of a training run on one rank; `step` counts finished iterations."""

    config: Config
    inputs: Inputs
    groups: ParallelGroups
    device: torch.device
    policy: Policy
    optimizer: LograOptimizer
    controller: KLController
    reference: ReferencePolicy | None
    engine: RolloutEngine
    sender: PolicySender
    timers: Timers
    loggers: LoggerGroup
    step: int = 0

    @property
    def is_first_rank(self) -> bool:
        """True on the rank that speaks to the person."""
        return self.groups.rank == 0

    @property
    def version(self) -> int:
        """Policy version: the number of updates made."""
        return self.optimizer.num_updates


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
    groups = initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        seed=config.training.seed,
    )
    policy = build_policy(inputs.shape, _policy_settings(config), groups)
    load_weights_(policy, inputs.reader.read)
    sender = PolicySender(
        inputs.shape,
        stage_tables(policy),
        tp_group=groups.tp,
        pp_group=groups.pp,
        tp_size=groups.tp_size,
        padded_vocab=config.padded_vocab_size(inputs.shape.vocab_size),
        bucket_bytes=config.sync.sync_bucket_mb * 2**20,
        device=device,
    )
    return Run(
        config=config,
        inputs=inputs,
        groups=groups,
        device=device,
        policy=policy,
        optimizer=build_optimizer(policy, _logra_settings(config)),
        controller=_build_controller(config),
        reference=ReferencePolicy(policy) if config.grpo.grpo_kl_beta > 0 else None,
        engine=EmbeddedEngine(
            config.model.hf_checkpoint,
            groups=sender.groups,
            tokenizer=inputs.tokenizer,
            dtype=compute_dtype(config),
            device=device,
            batch_size=config.rollout.rollout_batch_size,
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
    shape = read_model_shape(folder, config.model_overrides())
    validate_model_parallel(
        config,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        num_layers=shape.num_layers,
        ffn_hidden_size=shape.ffn_hidden_size,
        max_position_embeddings=shape.max_position_embeddings,
    )
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


def _policy_settings(config: Config) -> PolicySettings:
    training = config.training
    return PolicySettings(
        dtype=compute_dtype(config),
        seq_length=config.model.seq_length,
        sequence_parallel=config.parallel.sequence_parallel,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        master=config.logra_master,
        chunk_size=training.log_probs_chunk_size,
    )


def _logra_settings(config: Config) -> LograSettings:
    optimizer = config.optimizer
    return LograSettings(
        rank=optimizer.logra_rank,
        rule=optimizer.logra_rule,
        update_ratio=optimizer.logra_update_ratio,
        beta2=optimizer.logra_beta2,
        epsilon=optimizer.logra_eps,
        seed=optimizer.logra_seed,
        distribution=optimizer.logra_distribution,
    )


def _build_controller(config: Config) -> KLController:
    kl = config.kl
    return KLController(
        budget=kl.kl_budget,
        budget_final=kl.kl_budget_final,
        schedule_steps=kl.kl_schedule_steps,
        alpha_max=kl.kl_alpha_max,
        mismatch_weight=kl.kl_mismatch_weight,
        budget_floor=kl.kl_budget_floor,
    )
