"""From the shape of a Hugging Face model to this rank's part of a Megatron-Core `GPTModel`.

The layer spec is Megatron's own transformer layer around our linears, norm and attention. The norm is never fused into
a linear: a fused linear hands its hooks the un-normalised input, and the sketch would silently be of another matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_logra.hf.config import ModelShape
from megatron_logra.mcore.attention import CausalAttention
from megatron_logra.mcore.linear import SketchedColumnParallelLinear, SketchedRowParallelLinear
from megatron_logra.mcore.norm import RMSNorm
from megatron_logra.parallel.groups import ParallelGroups


def build_transformer_config(
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    recompute_granularity: str | None = None,
    recompute_method: str | None = None,
    recompute_num_layers: int | None = None,
) -> TransformerConfig:
    """Megatron's configuration for `shape` with weights and compute in `dtype`.

    The loss arrives already divided by the global number of valid tokens, hence `calculate_per_token_loss`; sequences
    of a step differ in length between micro-batches, hence `variable_seq_lengths`.
    """
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        layernorm_epsilon=shape.layernorm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        sequence_parallel=sequence_parallel,
        recompute_granularity=recompute_granularity,
        recompute_method=recompute_method,
        recompute_num_layers=recompute_num_layers,
        use_cpu_initialization=False,
        perform_initialization=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=pipeline_model_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=torch.cuda.is_available() and pipeline_model_parallel_size > 1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )


def build_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's transformer layer around our linears, norms and attention (unfused, runs on every device)."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.linear_qkv = SketchedColumnParallelLinear
    attention.linear_proj = SketchedRowParallelLinear
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    layer.mlp = _dense_mlp_spec(layer.mlp)
    return spec


def _dense_mlp_spec(original: object) -> object:
    """Megatron's MLP builder with our linears; it is a `ModuleSpec` or a partial, depending on the version."""
    submodules = MLPSubmodules(linear_fc1=SketchedColumnParallelLinear, linear_fc2=SketchedRowParallelLinear)
    if isinstance(original, ModuleSpec):
        return ModuleSpec(module=MLP, submodules=submodules)
    return type(original)(MLP.as_mlp_submodule, submodules=submodules)  # type: ignore[call-arg]


def build_model(
    shape: ModelShape,
    config: TransformerConfig,
    groups: ParallelGroups,
    *,
    max_sequence_length: int,
    padded_vocab_size: int,
) -> GPTModel:
    """This rank's `GPTModel` with uninitialised weights; the embedding's output is the anchor of backward.

    All parameters are frozen: targets change through their sketches, everything else stays as loaded. Without an
    anchor nothing would ask for a gradient, so the embedding's output is made to require one.
    """
    layer_spec = build_layer_spec(config)
    num_layers = get_num_layers_to_build(config, pp_rank=groups.pp_rank)
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer_spec] * num_layers, layer_norm=RMSNorm),
        vocab_size=padded_vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,  # type: ignore[arg-type]
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    # Angles are computed in the dtype of the frequencies: fp32, or wider for a wider model.
    frequencies = compute_rotary_frequencies(shape, device=model.rotary_pos_emb.inv_freq.device)
    model.rotary_pos_emb.inv_freq = frequencies.to(torch.promote_types(config.params_dtype, torch.float32))
    model.requires_grad_(False)
    if model.pre_process:
        model.embedding.register_forward_hook(_anchor_gradient)
    return model


def _anchor_gradient(_module: object, _inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def stage_layers(config: TransformerConfig, pp_rank: int) -> list[tuple[int, int]]:
    """(local, global) 0-based numbers of the layers that a pipeline stage holds."""
    first = get_transformer_layer_offset(config, pp_rank=pp_rank)
    return [(local, first + local) for local in range(get_num_layers_to_build(config, pp_rank=pp_rank))]


def compute_rotary_frequencies(shape: ModelShape, *, device: torch.device) -> Tensor:
    """Inverse frequencies `[head_dim / 2]` in fp32, with Llama 3's scaling where the checkpoint asks for it.

    Wavelengths beyond `original_max_position_embeddings / low_freq_factor` are stretched by `factor`, those below
    `.../ high_freq_factor` kept, and the band between is interpolated (Llama 3.1 model card).
    """
    exponents = torch.arange(0, shape.kv_channels, 2, dtype=torch.float32, device=device) / shape.kv_channels
    frequencies = 1.0 / (shape.rotary_base**exponents)
    if shape.rope_scaling is None:
        return frequencies
    return _stretch_llama3(frequencies, shape.rope_scaling)


def _stretch_llama3(frequencies: Tensor, scaling: Mapping[str, float]) -> Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / scaling["factor"] * (1 - keep)
