"""Predicted and exact KL against definitions in 60-digit decimals, from hardly any change to a large one."""

from __future__ import annotations

from decimal import Decimal, getcontext

import pytest
import torch
from torch import Tensor

from megatron_logra.kl import predicted_kl as module
from megatron_logra.kl.predicted_kl import exact_kl, predicted_kl

TOKENS, COLUMNS, TEMPERATURE = 4, 9, 0.75


def _case(size: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(TOKENS, COLUMNS, generator=generator, dtype=torch.float64) * 4
    return logits, torch.randn(TOKENS, COLUMNS, generator=generator, dtype=torch.float64) * size


def _softmax(row: list[float]) -> list[Decimal]:
    powers = [(Decimal(x) / Decimal(TEMPERATURE)).exp() for x in row]
    return [power / sum(powers) for power in powers]


def _decimal_exact_kl(old: Tensor, new: Tensor) -> list[float]:
    getcontext().prec = 60
    result = []
    for old_row, new_row in zip(old.tolist(), new.tolist(), strict=True):
        before, after = _softmax(old_row), _softmax(new_row)
        result.append(float(sum(p * (p.ln() - q.ln()) for p, q in zip(before, after, strict=True))))
    return result


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 30.0])
def test_exact_kl_keeps_its_digits(size: float) -> None:
    old, change = _case(size)
    new = old + change
    # Each change carries fp64 rounding of 1e-16 x 4 / size relative to itself only through old + change, which both
    # sides share; what remains is expm1(c) - c, which loses 2 eps / |c|.
    expected = torch.tensor(_decimal_exact_kl(old, new), dtype=torch.float64)
    torch.testing.assert_close(exact_kl(old, new, temperature=TEMPERATURE), expected, rtol=1e-12 + 1e-15 / size, atol=0)


def test_predicted_kl_is_half_the_fisher_form() -> None:
    logits, tangent = _case(0.3)
    for row in range(TOKENS):
        p = (logits[row] / TEMPERATURE).softmax(0)
        fisher = torch.diag(p) - torch.outer(p, p)
        change = tangent[row] / TEMPERATURE
        expected = 0.5 * change @ fisher @ change
        actual = predicted_kl(logits[row : row + 1], tangent[row : row + 1], temperature=TEMPERATURE)[0]
        assert actual.item() == pytest.approx(expected.item(), rel=1e-12)


def test_exact_kl_tends_to_the_prediction_along_a_direction() -> None:
    logits, tangent = _case(1.0)
    predicted = predicted_kl(logits, tangent, temperature=TEMPERATURE)
    errors = []
    for step in (1e-2, 1e-3):
        actual = exact_kl(logits, logits + step * tangent, temperature=TEMPERATURE) / step**2
        errors.append((actual / predicted - 1).abs().max().item())
    # The next term of the expansion is of first order in the step.
    assert errors[0] < 0.05 and errors[1] / errors[0] == pytest.approx(0.1, rel=0.1)


def test_a_common_shift_costs_no_digits() -> None:
    # Multiples of 2^-20 stay exact when 2^20 is added, so both calls see the same differences.
    logits, tangent = _case(0.01)
    tangent = (tangent * 2**20).round() / 2**20
    logits = (logits * 2**20).round() / 2**20
    plain = predicted_kl(logits, tangent, temperature=1.0)
    torch.testing.assert_close(predicted_kl(logits - 2**20, tangent + 2**20, temperature=1.0), plain, rtol=1e-7, atol=0)
    moved = exact_kl(logits, logits + tangent + 2**20, temperature=1.0)
    torch.testing.assert_close(moved, exact_kl(logits, logits + tangent, temperature=1.0), rtol=1e-7, atol=0)


def test_token_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tangent = _case(0.1)
    whole = predicted_kl(logits, tangent, temperature=TEMPERATURE), exact_kl(logits, logits + tangent, temperature=1.0)
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", 3 * COLUMNS)
    parts = predicted_kl(logits, tangent, temperature=TEMPERATURE), exact_kl(logits, logits + tangent, temperature=1.0)
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=0)


def test_inputs_are_left_alone_and_bad_ones_are_named() -> None:
    logits, tangent = _case(0.1)
    kept = logits.clone(), tangent.clone()
    predicted_kl(logits, tangent, temperature=1.0)
    exact_kl(logits, tangent, temperature=1.0)
    assert torch.equal(logits, kept[0]) and torch.equal(tangent, kept[1])
    assert predicted_kl(logits.index_fill(0, torch.tensor([1]), torch.nan), tangent).isnan().tolist() == [
        False,
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        predicted_kl(logits, tangent, temperature=0.0)
    with pytest.raises(ValueError, match="of one shape"):
        predicted_kl(logits, tangent[:2])
