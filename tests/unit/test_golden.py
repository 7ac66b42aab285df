"""Everything that other implementations must reproduce, against the reference values in `tests/golden`."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_logra.kl.controller import KLController, scheduled_budget, step_scale
from megatron_logra.kl.predicted_kl import predicted_kl
from megatron_logra.optim.row_adam import row_adam_direction
from megatron_logra.sketch.projection import make_projection, philox4x32, projection_key

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "logra_golden.json").read_text())


def _float64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN["philox_known_answers"])
def test_philox_gives_the_known_answers_of_random123(case: dict[str, Any]) -> None:
    counter = tuple(torch.tensor([word], dtype=torch.int64) for word in case["counter"])
    words = philox4x32(counter, tuple(case["key"]))  # type: ignore[arg-type]
    assert " ".join(f"{int(word):08x}" for word in words) == case["words"]


@pytest.mark.parametrize("case", GOLDEN["projection"], ids=lambda case: f"{case['name']}-{case['rank']}")
def test_projections_have_the_agreed_bits(case: dict[str, Any]) -> None:
    arguments = (case["base_seed"], case["update"], case["name"])
    assert list(projection_key(*arguments)) == case["key"]
    rank, width = case["rank"], case["width"]
    proj_RI = make_projection(*arguments, rank, width, dtype=torch.float64)
    signs = proj_RI.sign().to(torch.int64)
    assert torch.equal(proj_RI.abs(), torch.full_like(proj_RI, 1 / math.sqrt(rank)))
    assert int(signs.sum()) == case["sum_of_signs"]
    # The hash is over the bits (1 is +), row after row, eight to a byte, the first in the highest place.
    packed = np.packbits((signs > 0).numpy())
    assert hashlib.sha256(packed.tobytes()).hexdigest() == case["sign_sha256"]
    if "signs" in case:
        assert signs.tolist() == case["signs"]
    middle = slice(width // 3, width - 1)
    part = make_projection(*arguments, rank, width, columns=middle, dtype=torch.float64)
    assert torch.equal(part, proj_RI[:, middle])


@pytest.mark.parametrize(("name", "rule"), [("row_adam_paper", "paper"), ("row_adam_plain", "lr")])
def test_row_adam_directions(name: str, rule: str) -> None:
    case = GOLDEN[name]
    moment2_O = torch.zeros(len(case["steps"][0]["sketch"]), dtype=torch.float64)
    for step in case["steps"]:
        direction = row_adam_direction(
            _float64(step["sketch"]),
            moment2_O,
            step=step["step"],
            beta2=case["beta2"],
            epsilon=case["epsilon"],
            rule=rule,
        )
        torch.testing.assert_close(direction, _float64(step["direction"]), rtol=1e-12, atol=1e-300)
        torch.testing.assert_close(moment2_O, _float64(step["second_moment"]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", GOLDEN["predicted_kl"], ids=lambda case: f"temperature{case['temperature']}")
def test_predicted_kl(case: dict[str, Any]) -> None:
    kl_T = predicted_kl(_float64(case["logits"]), _float64(case["tangent"]), temperature=case["temperature"])
    torch.testing.assert_close(kl_T, _float64(case["kl"]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", GOLDEN["step_scale"], ids=lambda case: str(case["predicted_kl"]))
def test_step_scale(case: dict[str, Any]) -> None:
    alpha = step_scale(case["predicted_kl"], budget=case["budget"], alpha_max=case["alpha_max"])
    assert alpha == pytest.approx(case["alpha"], rel=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9])
def test_a_prediction_that_no_update_has_is_an_error(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="nothing was applied"):
        step_scale(bad, budget=1e-4)


@pytest.mark.parametrize("case", GOLDEN["budget_schedule"], ids=lambda case: str(case["update"]))
def test_budget_schedule(case: dict[str, Any]) -> None:
    budget = scheduled_budget(case["update"], budget=2e-4, budget_final=2e-5, schedule_steps=300)
    assert budget == pytest.approx(case["budget"], rel=1e-14)


def test_mismatch_lowers_the_budget_down_to_its_floor() -> None:
    case = GOLDEN["mismatch"]
    controller = KLController(
        budget=case["budget"],
        budget_final=case["budget"],
        mismatch_weight=case["weight"],
        budget_floor=case["floor"],
    )
    for step in case["sequence"]:
        controller.observe_mismatch(step["observed"])
        assert controller.mismatch_ema == pytest.approx(step["ema"], rel=1e-12)
        assert controller.effective_budget(0) == pytest.approx(step["effective_budget"], rel=1e-12)
    resumed = KLController()
    resumed.load_state_dict(controller.state_dict())
    assert resumed.mismatch_ema == controller.mismatch_ema
