"""Owns the sections of the configuration that say what the policy is, how it is laid out and how it learns.

See `megatron_logra.config` for the whole tree and its conventions.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_logra.config_schema import setting


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
    """Parallel layout: data parallelism takes the ranks that tensor, pipeline and context parallelism leave."""

    tensor_model_parallel_size: int = setting(1, help="ranks that one layer is split over", unit="ranks")
    pipeline_model_parallel_size: int = setting(1, help="stages that the layers are split into", unit="ranks")
    sequence_parallel: bool = setting(
        False, help="split the activations between tensor-parallel regions along the sequence"
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None,
        help="interleaved schedule: layers of one model chunk, of which a rank then has several; not set: one chunk",
        unit="layers",
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, help="layers of the first pipeline stage; not set: as many as the others", unit="layers"
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, help="layers of the last pipeline stage; not set: as many as the others", unit="layers"
    )
    context_parallel_size: int = setting(1, help="ranks that one sequence is split over", unit="ranks")
    expert_model_parallel_size: int = setting(
        1, help="ranks that the experts of a mixture-of-experts layer are spread over", unit="ranks"
    )
    expert_tensor_parallel_size: int | None = setting(
        None, help="ranks that one expert is split over; not set: --tensor-model-parallel-size", unit="ranks"
    )
    use_distributed_optimizer: bool = setting(
        False,
        help="divide what the optimizer keeps of a weight (the 16-bit remainder or fp32 copy; Adam's moments) among "
        "the ranks that hold the same weight",
    )
    transformer_impl: Literal["local", "transformer_engine"] | None = setting(
        None,
        help="norms, attention and rotary embedding; not set: transformer_engine where it is installed and there is "
        "CUDA, else local",
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
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None,
        help="recompute activations in the backward pass: full, of whole layers; selective, of --recompute-modules; "
        "not set: keep them all",
    )
    recompute_modules: tuple[str, ...] = setting(
        (),
        help="what selective recomputation covers: core_attn, mlp, moe, shared_experts; empty: core_attn",
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None,
        help="uniform: recompute all layers in chunks of --recompute-num-layers; "
        "block: recompute only the first --recompute-num-layers layers of each pipeline stage",
    )
    recompute_num_layers: int | None = setting(
        None, help="see --recompute-method; needed with --recompute-granularity full", unit="layers"
    )
    log_probs_chunk_size: int = setting(
        1024, help="positions whose logits exist at the same time; bounds their memory", unit="tokens"
    )
    exit_interval: int | None = setting(
        None,
        help="stop after an iteration that is divisible by this; not set: run to the end",
        unit="iterations",
    )
    exit_signal_handler: bool = setting(
        False, help="at SIGTERM finish the iteration, save and end with status 0, instead of ending at once"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer (LoGRA or Megatron's Adam): sketch, update rule, learning rate and master weights."""

    optimizer: Literal["logra", "adam"] = setting(
        "logra", help="logra: sketches of the target weights; adam: Megatron's dense Adam for every weight"
    )
    logra_rank: int = setting(256, help="rows of a random projection: the rank of an update")
    logra_rule: Literal["paper", "lr", "sgd"] = setting(
        "paper",
        help="how a sketch becomes an update: paper, row-wise Adam with norm --logra-update-ratio; lr, row-wise Adam "
        "times the learning rate; sgd, the sketch itself times the learning rate",
    )
    logra_update_ratio: float = setting(6e-5, help="norm of a proposed update over the norm of the weights it changes")
    logra_beta2: float = setting(0.95, help="decay of the second moments of the rows")
    logra_eps: float = setting(1e-8, help="added to a row's root second moment, relative to the mean root")
    logra_seed: int = setting(42, help="seed of the random projections")
    logra_distribution: Literal["rademacher", "gaussian"] = setting(
        "rademacher", help="entries of the random projections"
    )
    logra_refresh_interval: int = setting(1, help="draw new projections after every so many updates", unit="updates")
    logra_projection_cache: bool = setting(
        False,
        help="keep the projections in the compute dtype (16 or 32 times their packed size) instead of expanding them "
        "layer by layer",
    )
    logra_targets: tuple[str, ...] = setting(
        (),
        help="shell patterns of the weight groups to train, for example '*.qkv_proj' or 'model.layers.1?.mlp.*'; "
        "empty: all linear layers of attention, MLP and experts",
    )
    logra_train_non_targets: bool = setting(
        False,
        help="train norms, embeddings, biases and all other weights with Megatron's Adam instead of freezing them",
    )
    logra_check_interval: int | None = setting(
        None,
        help="compare the weights of ranks that must hold the same after every so many updates; not set: never",
        unit="updates",
    )
    logra_master: Literal["split", "fp32"] | None = setting(
        None,
        help="master weights: split keeps a 16-bit remainder beside the bfloat16 weight (4 bytes a parameter), "
        "fp32 a separate copy (6 bytes); not set: split with --bf16, fp32 without",
    )
    lr: float | None = setting(
        None, help="learning rate of --optimizer adam, the rules lr and sgd and --logra-train-non-targets"
    )
    min_lr: float = setting(0.0, help="learning rate at the end of the decay")
    lr_warmup_iters: int = setting(0, help="updates over which the learning rate rises", unit="updates")
    lr_decay_iters: int | None = setting(
        None, help="update at which the decay ends; not set: the last one of the run", unit="updates"
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = setting("constant", help="how the learning rate falls")
    weight_decay: float = setting(0.0, help="decoupled weight decay of whatever has a learning rate")
    clip_grad: float = setting(
        0.0,
        help="largest norm of the gradient, which for sketches is the norm of S A; 0: no clipping",
    )
    adam_beta1: float = setting(0.9, help="decay of Adam's first moment")
    adam_beta2: float = setting(0.95, help="decay of Adam's second moment")
    adam_eps: float = setting(1e-8, help="added to Adam's root second moment")


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """KL control: predict what an update does to the policy, and scale it before it is made."""

    kl_control: Literal["predicted", "off"] = setting(
        "predicted",
        help="predicted: scale each update to meet the budget; off: take every update as proposed",
    )
    kl_estimator: Literal["jvp", "fisher", "auto"] = setting(
        "auto",
        help="how the KL is predicted: jvp, exactly, by the forward-mode derivative, which a pass at the start makes "
        "sure that all layers have; fisher, estimated by backward passes from drawn labels; auto: jvp",
    )
    kl_fisher_draws: int = setting(8, help="labels that --kl-estimator fisher draws at each position of the probe")
    kl_budget: float = setting(2e-4, help="KL that the first update may cost", unit="nats per token")
    kl_schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", help="how the budget falls from first to last; constant: it stays at --kl-budget"
    )
    kl_budget_final: float = setting(2e-5, help="KL that the last update may cost", unit="nats per token")
    kl_schedule_steps: int = setting(300, help="updates over which the budget falls from first to last", unit="updates")
    kl_alpha_max: float = setting(3.0, help="largest factor by which a proposed update is scaled")
    kl_probe_responses: int = setting(
        2,
        help="responses of each data-parallel rank that the prediction uses, the first that have a generated token",
        unit="responses",
    )
    kl_probe_max_tokens: int = setting(
        4096,
        help="bound on the generated tokens of those responses, on each data-parallel rank; longer ones are cut",
        unit="tokens",
    )
    kl_probe_interval: int = setting(
        1,
        help="predict the KL of every so many updates only; in between the last ratio of predicted KL to squared norm "
        "of the update is used again",
        unit="updates",
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
