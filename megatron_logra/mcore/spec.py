"""Layer specs: Megatron's transformer layer around our linears, with the norms and attention that the machine has.

    transformer_engine   its RMS norm, attention and fused rotary embedding          CUDA with Transformer Engine
    local                our norm (NVIDIA Apex's kernel if importable), torch's SDPA  everywhere

The linears are always ours. A norm is never fused into a linear: a fused linear reads the un-normalised input, so the
sketch would silently be that of another matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_logra.hf.config import ModelShape
from megatron_logra.mcore.attention import CausalAttention, GroupedSelfAttention
from megatron_logra.mcore.layer import PostNormTransformerLayer
from megatron_logra.mcore.linear import SketchedColumnParallelLinear, SketchedRowParallelLinear
from megatron_logra.mcore.moe import Router, SketchedMoELayer
from megatron_logra.mcore.norm import ApexRMSNorm, RMSNorm
from megatron_logra.mcore.transformer_config import DecoderConfig


@dataclass(frozen=True)
class LayerModules:
    """What a layer is built from besides our linears; `fused_rope` asks Megatron for the fused rotary embedding."""

    norm: Any
    core_attention: Any
    fused_rope: bool = False


def _can_import(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


def select_modules(
    transformer_impl: str | None,
    *,
    own_attention: str | None = None,
    can_import: Callable[[str], bool] = _can_import,
    has_cuda: bool | None = None,
) -> LayerModules:
    """Modules for `--transformer-impl`; None takes Transformer Engine where it can run.

    Args:
        own_attention: what the model needs that Transformer Engine's attention does not have; then ours is taken beside
            its norms.

    Raises:
        ValueError: Transformer Engine is asked for and cannot run here, or does not have what the model needs.
    """
    has_cuda = torch.cuda.is_available() if has_cuda is None else has_cuda
    has_te = can_import("transformer_engine.pytorch")
    if transformer_impl == "transformer_engine" and not (has_te and has_cuda):
        lacking = "CUDA" if has_te else "the package transformer-engine"
        raise ValueError(
            f"transformer_impl transformer_engine needs {lacking}, which this machine does not have: install it, or "
            "give --transformer-impl local"
        )
    if transformer_impl == "transformer_engine" and own_attention is not None:
        raise ValueError(
            f"transformer_impl transformer_engine has no {own_attention}, which this model needs: leave the setting "
            "out, then its norms are used with an attention that has it"
        )
    if transformer_impl == "transformer_engine" or (transformer_impl is None and has_te and has_cuda):
        from megatron_logra.mcore.te import TECausalAttention, TERMSNorm

        attention = TECausalAttention if own_attention is None else CausalAttention
        return LayerModules(norm=TERMSNorm, core_attention=attention, fused_rope=True)
    has_apex = has_cuda and can_import("apex.normalization.fused_layer_norm")
    return LayerModules(norm=ApexRMSNorm if has_apex else RMSNorm, core_attention=CausalAttention)


def attention_beyond_engine(shape: ModelShape, cp_size: int) -> str | None:
    """What this model's attention needs that Transformer Engine's does not have; None if it has everything."""
    if shape.attention_softcap is not None:
        return "soft-capping of attention scores"
    if shape.sliding_window is not None and cp_size > 1:
        # It has them for other ways of exchanging keys than Megatron's default, the ring.
        return "sliding windows under context parallelism"
    return None


def build_layer_spec(config: DecoderConfig, modules: LayerModules) -> ModuleSpec:
    """Megatron's transformer layer around our linears and `modules`."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    if config.post_norms:
        spec.module, spec.params = PostNormTransformerLayer, {"post_norm": modules.norm}
    layer = spec.submodules
    layer.input_layernorm = modules.norm
    layer.pre_mlp_layernorm = modules.norm
    layer.self_attention.module = GroupedSelfAttention
    attention = layer.self_attention.submodules
    attention.linear_qkv = SketchedColumnParallelLinear
    attention.linear_proj = SketchedRowParallelLinear
    attention.core_attention = modules.core_attention
    if config.qk_layernorm:
        attention.q_layernorm = modules.norm
        attention.k_layernorm = modules.norm
    layer.mlp = _dense_mlp(layer.mlp) if config.num_moe_experts is None else _experts_mlp()
    require_unfused_linears(spec)
    return spec


def require_unfused_linears(spec: ModuleSpec) -> None:
    """Refuse a layer spec whose linears normalise their own input. Raises ValueError naming them."""
    layer = spec.submodules
    mlp = layer.mlp.keywords.get("submodules") if isinstance(layer.mlp, partial) else layer.mlp.submodules
    linears = {
        "self_attention.linear_qkv": layer.self_attention.submodules.linear_qkv,
        "self_attention.linear_proj": layer.self_attention.submodules.linear_proj,
        "mlp.linear_fc1": getattr(mlp, "linear_fc1", None),
        "mlp.linear_fc2": getattr(mlp, "linear_fc2", None),
    }
    fused = [
        f"{name} is {linear.__name__}"
        for name, linear in linears.items()
        if isinstance(linear, type) and "LayerNorm" in linear.__name__
    ]
    if fused:
        raise ValueError(
            f"{', '.join(fused)}: a linear fused with its layer norm reads the un-normalised input, so the sketch "
            "would be that of another matrix; use a separate norm and SketchedColumnParallelLinear"
        )


def _linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=SketchedColumnParallelLinear, linear_fc2=SketchedRowParallelLinear)


def _dense_mlp(original: object) -> object:
    """Megatron's MLP builder with our linears; it is a `ModuleSpec` or a partial, depending on the version."""
    if isinstance(original, ModuleSpec):
        return ModuleSpec(module=MLP, submodules=_linears())
    return type(original)(MLP.as_mlp_submodule, submodules=_linears())  # type: ignore[call-arg]


def _experts_mlp() -> object:
    return partial(
        SketchedMoELayer,
        submodules=MoESubmodules(
            experts=partial(SequentialMLP, submodules=_linears()),
            shared_experts=partial(SharedExpertMLP, submodules=_linears()),
            router=Router,
        ),
    )
