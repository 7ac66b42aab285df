"""Which modules a layer is built from, and that a linear fused with its norm is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_logra.mcore.attention import CausalAttention
from megatron_logra.mcore.norm import ApexRMSNorm, RMSNorm, rms_norm
from megatron_logra.mcore.spec import LayerModules, build_layer_spec, require_unfused_linears, select_modules


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

    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool, params_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 2.0, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        assert torch.autograd.forward_ad.unpack_dual(x).tangent is None
        return rms_norm(x, self.weight, self.eps) + 100.0  # to tell it from ours


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


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("impl", [None, "transformer_engine"])
def test_transformer_engine_modules(impl: str | None) -> None:
    modules = select_modules(impl, can_import=_has(TE), has_cuda=True)
    assert modules.fused_rope
    assert modules.norm.__name__ == "TERMSNorm" and issubclass(modules.norm, _EngineNorm)
    assert modules.core_attention.__name__ == "TECausalAttention"
    norm = modules.norm(_Config(), 8, eps=1e-6)
    assert [name for name, _ in norm.named_parameters()] == ["weight"] and norm.weight.sequence_parallel
    x, direction = torch.randn(3, 8), torch.randn(3, 8)
    assert (norm(x) - 100.0).allclose(rms_norm(x, norm.weight, 1e-6), atol=1e-5)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = norm(torch.autograd.forward_ad.make_dual(x, direction))
        primal, tangent = torch.autograd.forward_ad.unpack_dual(dual)
    expected = torch.func.jvp(lambda t: rms_norm(t, norm.weight.detach(), 1e-6), (x,), (direction,))
    assert primal.allclose(expected[0]) and tangent.allclose(expected[1])


def test_a_linear_fused_with_its_norm_is_refused() -> None:
    class TELayerNormColumnParallelLinear(nn.Module):
        pass

    class Config:
        normalization = "RMSNorm"
        qk_layernorm = True
        num_moe_experts = None

    spec: Any = build_layer_spec(Config(), LayerModules(RMSNorm, CausalAttention))  # type: ignore[arg-type]
    assert spec.submodules.self_attention.submodules.q_layernorm is RMSNorm
    spec.submodules.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
    with pytest.raises(
        ValueError, match=r"linear_qkv is TELayerNormColumnParallelLinear: a linear fused with its layer"
    ):
        require_unfused_linears(spec)
