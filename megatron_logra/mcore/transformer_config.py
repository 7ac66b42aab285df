"""Megatron's `TransformerConfig` for a Hugging Face shape, and which layers of the model a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_block import get_num_layers_to_build, get_transformer_layer_offset
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_logra.hf.config import ModelShape
from megatron_logra.hf.families import Activation
from megatron_logra.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class PolicySettings:
    """How a policy is laid out and computed; names as in Megatron.

    With bf16 weights `master` says how their fp32 values are kept: `split`, as a 16-bit remainder beside the weight, or
    `fp32`, as a copy; `shard_master` divides it among the ranks that hold the same weights. Wider weights are their own
    masters. `targets` are shell patterns of projection groups whose weights are sketched, None for all; with
    `train_all` nothing is sketched and every weight has a gradient of its own, with `train_non_targets` what is not
    sketched. `chunk_size` bounds the tokens whose logits exist at once. `transformer_impl` None takes Transformer
    Engine's norms and attention where they can run.
    """

    dtype: torch.dtype
    seq_length: int
    sequence_parallel: bool = False
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    make_vocab_size_divisible_by: int = 128
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None
    transformer_impl: str | None = None
    master: str = "split"
    shard_master: bool = False
    targets: tuple[str, ...] | None = None
    train_all: bool = False
    train_non_targets: bool = False
    chunk_size: int = 1024


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's configuration with what it has no field for.

    `attention_softcap` `c` makes `c tanh(x / c)` of attention scores `x`; with `post_norms` what attention and MLP add
    to the residual stream is normalised before.
    """

    attention_softcap: float | None = None
    post_norms: bool = False


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def build_transformer_config(
    shape: ModelShape, settings: PolicySettings, groups: ParallelGroups, *, fused_rope: bool
) -> DecoderConfig:
    """Megatron's configuration for `shape`, laid out over `groups`.

    The loss arrives already divided by the global number of valid tokens, hence `calculate_per_token_loss`; sequences
    of a step differ in length between micro-batches, hence `variable_seq_lengths`.
    """
    pipelined = groups.pp_size > 1
    return DecoderConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        layernorm_epsilon=shape.layernorm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[shape.activation],
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=settings.dtype,
        pipeline_dtype=settings.dtype,
        bf16=settings.dtype == torch.bfloat16,
        tensor_model_parallel_size=groups.tp_size,
        pipeline_model_parallel_size=groups.pp_size,
        virtual_pipeline_model_parallel_size=settings.virtual_pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=settings.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=settings.num_layers_in_last_pipeline_stage,
        context_parallel_size=groups.cp_size,
        expert_model_parallel_size=groups.ep_size,
        expert_tensor_parallel_size=groups.etp_size,
        sequence_parallel=settings.sequence_parallel,
        recompute_granularity=settings.recompute_granularity,
        recompute_method=settings.recompute_method,
        recompute_num_layers=settings.recompute_num_layers,
        recompute_modules=None if settings.recompute_modules is None else list(settings.recompute_modules),
        use_cpu_initialization=False,
        perform_initialization=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=pipelined,
        batch_p2p_comm=torch.cuda.is_available() and pipelined and not settings.virtual_pipeline_model_parallel_size,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=fused_rope,
        cross_entropy_loss_fusion=False,
        **_attention_settings(shape),
        **_expert_settings(shape),
    )


def _attention_settings(shape: ModelShape) -> dict[str, Any]:
    """What Megatron calls the window counts the positions to the left of a token, not the token itself."""
    window = None if shape.sliding_window is None else (shape.sliding_window - 1, 0)
    return {
        "window_size": window,
        "window_attn_skip_freq": None if window is None else [int(layer) for layer in shape.sliding_layers],
        "softmax_scale": shape.softmax_scale,
        "attention_softcap": shape.attention_softcap,
        "layernorm_zero_centered_gamma": shape.is_gemma,
        "post_norms": shape.post_norms,
    }


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    """No token is dropped and no auxiliary loss is added: the policy is the one that the rollout engine samples."""
    if shape.num_experts is None:
        return {"moe_token_dispatcher_type": "alltoall"}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_router_topk": shape.moe_router_topk,
        "moe_router_pre_softmax": not shape.normalize_topk,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": shape.moe_shared_expert_size,
        "moe_shared_expert_gate": shape.moe_shared_expert_size is not None,
    }


def num_chunks(config: TransformerConfig) -> int:
    """Model chunks of a pipeline rank: the virtual stages of the interleaved schedule, or one."""
    return config.virtual_pipeline_model_parallel_size or 1


def chunk_layers(config: TransformerConfig, pp_rank: int) -> list[list[tuple[int, int]]]:
    """(local, global) 0-based numbers of the layers of each chunk of a pipeline rank.

    Local numbers run on from one chunk of the rank to the next, so that each names one layer of the rank.
    """
    chunks, local = [], 0
    for chunk in range(num_chunks(config)):
        vp_stage = None if config.virtual_pipeline_model_parallel_size is None else chunk
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
        count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
        chunks.append([(local + position, first + position) for position in range(count)])
        local += count
    return chunks


def stage_layers(config: TransformerConfig, pp_rank: int) -> list[tuple[int, int]]:
    """(local, global) 0-based numbers of all layers that a pipeline rank holds."""
    return [layer for chunk in chunk_layers(config, pp_rank) for layer in chunk]
