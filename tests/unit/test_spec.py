"""Which modules a layer is built from, and that a linear fused with its norm is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_logra.hf.config import read_model_shape
from megatron_logra.mcore.attention import CausalAttention
from megatron_logra.mcore.norm import ApexRMSNorm, RMSNorm, rms_norm
from megatron_logra.mcore.spec import (
    LayerModules,
    attention_beyond_engine,
    build_layer_spec,
    require_unfused_linears,
    select_modules,
)
from tests.tiny_models import save_tiny_model


def _has(*packages: str) -> Callable[[str], bool]:
    return lambda package: package in packages


TE, APEX = "transformer_engine.pytorch", "apex.normalization.fused_layer_norm"


@pytest.mark.parametrize(
    ("impl", "packages", "cuda", "norm"),
    [
        (None, (), False, RMSNorm),
        (None, (), True, RMSNorm),
        (None, (APEX,), True, ApexRMSNorm),
        (None, (APEX,), False, RMSNorm),
        (None, (TE,), False, RMSNorm),
        ("local", (TE,), True, RMSNorm),
        ("local", (TE, APEX), True, ApexRMSNorm),
    ],
)
def test_local_modules(impl: str | None, packages: tuple[str, ...], cuda: bool, norm: type) -> None:
    modules = select_modules(impl, can_import=_has(*packages), has_cuda=cuda)
    assert modules == LayerModules(norm=norm, core_attention=CausalAttention, fused_rope=False)


@pytest.mark.parametrize(("packages", "cuda", "lacking"), [((), True, "the package"), ((TE,), False, "CUDA")])
def test_transformer_engine_that_cannot_run_is_an_error(packages: tuple[str, ...], cuda: bool, lacking: str) -> None:
    with pytest.raises(ValueError, match=f"transformer_impl transformer_engine needs {lacking}"):
        select_modules("transformer_engine", can_import=_has(*packages), has_cuda=cuda)


class _EngineNorm(nn.Module):
    """Stands for Transformer Engine's norm: same parameter, plain tensors only."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        zero_centered_gamma: bool,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 2.0, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        assert torch.autograd.forward_ad.unpack_dual(x).tangent is None
        # 100 tells it from ours.
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered_gamma) + 100.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    pytorch.RMSNorm = _EngineNorm  # type: ignore[attr-defined]
    package.pytorch = pytorch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    import megatron.core.extensions.transformer_engine as extension

    monkeypatch.setattr(extension, "TEDotProductAttention", nn.Module)
    sys.modules.pop("megatron_logra.mcore.te", None)
    yield
    sys.modules.pop("megatron_logra.mcore.te", None)


class _Config:
    sequence_parallel = True
    params_dtype = torch.float32
    use_cpu_initialization = True

    def __init__(self, zero_centered: bool) -> None:
        self.layernorm_zero_centered_gamma = zero_centered


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("impl", [None, "transformer_engine"])
def test_transformer_engine_modules(impl: str | None, zero_centered: bool) -> None:
    modules = select_modules(impl, can_import=_has(TE), has_cuda=True)
    assert modules.fused_rope
    assert modules.norm.__name__ == "TERMSNorm" and issubclass(modules.norm, _EngineNorm)
    assert modules.core_attention.__name__ == "TECausalAttention"
    norm = modules.norm(_Config(zero_centered), 8, eps=1e-6)
    assert [name for name, _ in norm.named_parameters()] == ["weight"] and norm.weight.sequence_parallel
    x, direction = torch.randn(3, 8), torch.randn(3, 8)

    def formula(t: Tensor) -> Tensor:
        return rms_norm(t, norm.weight.detach(), 1e-6, zero_centered=zero_centered)

    assert (norm(x) - 100.0).allclose(formula(x), atol=1e-5)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = norm(torch.autograd.forward_ad.make_dual(x, direction))
        primal, tangent = torch.autograd.forward_ad.unpack_dual(dual)
    expected = torch.func.jvp(formula, (x,), (direction,))
    assert primal.allclose(expected[0]) and tangent.allclose(expected[1])


@pytest.mark.usefixtures("engine")
def test_transformer_engine_leaves_attention_that_it_lacks_to_ours() -> None:
    modules = select_modules(None, own_attention="soft-capping", can_import=_has(TE), has_cuda=True)
    assert modules.norm.__name__ == "TERMSNorm" and modules.core_attention is CausalAttention
    with pytest.raises(ValueError, match="transformer_impl transformer_engine has no soft-capping, which this model"):
        select_modules("transformer_engine", own_attention="soft-capping", can_import=_has(TE), has_cuda=True)


@pytest.mark.parametrize(
    ("family", "cp_size", "lacking"),
    [
        ("llama", 2, None),
        ("mistral", 1, None),
        ("mistral", 2, "sliding windows under context parallelism"),
        ("gemma2", 1, "soft-capping of attention scores"),
        ("gemma3_text", 1, None),
    ],
)
def test_what_transformer_engine_lacks(tmp_path: Path, family: str, cp_size: int, lacking: str | None) -> None:
    save_tiny_model(tmp_path, family)
    assert attention_beyond_engine(read_model_shape(tmp_path), cp_size) == lacking


def test_a_zero_centred_norm_multiplies_by_one_plus_weight_before_it_rounds() -> None:
    norm = RMSNorm(_Config(True), 8, eps=1e-6)  # type: ignore[arg-type]
    assert not norm.weight.any()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    weight = torch.full((8,), 2**-12, dtype=torch.bfloat16)  # lost if 1 + weight were a bf16 number
    exact = torch.nn.functional.rms_norm(x.double(), (8,), eps=1e-6) * (1 + weight.double())
    assert torch.equal(rms_norm(x, weight, 1e-6, zero_centered=True), exact.to(torch.bfloat16))


def test_a_linear_fused_with_its_norm_is_refused() -> None:
    class TELayerNormColumnParallelLinear(nn.Module):
        pass

    class Config:
        normalization = "RMSNorm"
        qk_layernorm = True
        num_moe_experts = None
        post_norms = False

    spec: Any = build_layer_spec(Config(), LayerModules(RMSNorm, CausalAttention))  # type: ignore[arg-type]
    assert spec.submodules.self_attention.submodules.q_layernorm is RMSNorm
    spec.submodules.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
    with pytest.raises(
        ValueError, match=r"linear_qkv is TELayerNormColumnParallelLinear: a linear fused with its layer"
    ):
        require_unfused_linears(spec)
