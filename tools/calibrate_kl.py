#!/usr/bin/env python
"""Measures how well predicted KLs come true on a model: in fp32, and in bf16, where arithmetic limits the measurement.

    torchrun --nproc-per-node 8 tools/calibrate_kl.py --hf-checkpoint DIR --train-data FILE --output DIR [flags]

Trains --steps iterations from the checkpoint in each precision, with the trainer's own rollouts, updates and
synchronisation, and compares after every update

    predicted   alpha^2 KL_pred, the scaled prediction that the step size was chosen by
    actual      KL(policy before || policy after) over the whole vocabulary, on the same probe

A bf16 update is measured in three ways: in bf16 as training does it (`--kl-measure-interval`); in fp32 arithmetic
between the fp32 masters before and after; and in fp32 arithmetic between the bf16 weights, which move where a master
crosses a rounding boundary. Its rounding floor is KL(fp32 || bf16 arithmetic) with equal weights: two bf16 evaluations
whose roundings are independent differ by about twice that, whatever the update.

Writes kl_calibration.json and kl_calibration.png. The exit code is 0 if every ratio actual / predicted lies within
[0.9, 1.1] in fp32, and within [0.8, 1.25] for bf16 masters measured in fp32; 1 if not; 2 for settings that cannot be.

All other flags are those of training (`python -m megatron_logra.train --help`); what belongs to logging, evaluation and
checkpoints has no effect. The fp32 copy of a bf16 policy takes 4 more bytes a parameter, and sketches of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

# Megatron-Core says at import what is not installed.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\b")

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from plot_run import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, STYLE, VERMILION, format_power, plt
from torch import Tensor

from megatron_logra.arguments import parse_arguments
from megatron_logra.config import Config, ConfigError, build_config, iterate_settings
from megatron_logra.config_validation import validate_config, validate_paths
from megatron_logra.mcore.build import build_optimizer, build_policy
from megatron_logra.mcore.initialize import shutdown_distributed, shutdown_model_parallel
from megatron_logra.mcore.tangent import compute_actual_kl, compute_predicted_kl
from megatron_logra.mcore.weights import read_master
from megatron_logra.optim.split_master import round_to_bf16
from megatron_logra.rl.advantages import response_advantages
from megatron_logra.run import Run, SetUpError, build_run, policy_settings
from megatron_logra.step_metrics import mean_over_probe, measure_kl
from megatron_logra.synchronise import synchronise
from megatron_logra.train import configure_process
from megatron_logra.train_step import UpdateOutcome
from megatron_logra.trainer import attach_old_values, sample, update, update_batches

BANDS = {"fp32": (0.9, 1.1), "bf16_masters_in_fp32": (0.8, 1.25)}
# Name in the file, precision of the run, key of the measured KL, and what it is.
MEASUREMENTS = (
    ("fp32", "fp32", "actual_kl", "fp32"),
    ("bf16_masters_in_fp32", "bf16", "actual_kl_masters_in_fp32", "bf16, masters measured in fp32"),
    ("bf16_weights_in_fp32", "bf16", "actual_kl_weights_in_fp32", "bf16, rounded weights measured in fp32"),
    ("bf16_in_bf16", "bf16", "actual_kl", "bf16, measured in bf16"),
)
PRECISIONS = ("fp32", "bf16")
COLORS = dict(zip((name for name, *_ in MEASUREMENTS), (BLUE, GREEN, ORANGE, VERMILION), strict=True))
SECTIONS_WITHOUT_EFFECT = ("checkpoint", "evaluation", "logging")
JSON_FILE, PNG_FILE = "kl_calibration.json", "kl_calibration.png"

Row = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate; returns the exit code, the same on all ranks."""
    options, rest = _parse(argv)
    try:
        configs = {precision: _configure(rest, options, precision) for precision in options.precisions}
    except ConfigError as error:
        return _refuse(error)
    configure_process(next(iter(configs.values())))

    try:
        rows = {precision: calibrate(config) for precision, config in configs.items()}
    except SetUpError as error:
        return _refuse(error)
    finally:
        shutdown_distributed()
    summary = summarise(rows)
    if os.environ.get("RANK", "0") == "0":
        _write(options.output, configs, rows, summary)
        print(format_summary(summary, rows))
    return 0 if all(one["within"] for one in summary.values() if "within" in one) else 1


def calibrate(config: Config) -> list[Row]:
    """Train as configured; one row for each update that moved the policy, equal on all ranks. Collective."""
    run = build_run(config)
    twin = Float32Twin(run) if config.training.bf16 else None
    rows: list[Row] = []
    while run.step < config.training.train_iters:
        responses = attach_old_values(run, sample(run).responses)
        advantages = response_advantages(responses).tolist()
        for number, indices in enumerate([*update_batches(config)] * config.grpo.grpo_iterations):
            if twin is not None:
                twin.remember_()
            batch = [responses[index] for index in indices]
            outcome, factors = update(run, batch, [advantages[index] for index in indices], is_first=number == 0)
            # Without any advantage there is no update, and nothing to predict.
            if outcome.metrics["logra/scaled_predicted_kl"] > 0:
                measured = {} if twin is None else twin.measure(outcome, factors)
                rows.append(_row(run.version, outcome.metrics) | measured)
                if run.is_first_rank:
                    print(_format_row("bf16" if config.training.bf16 else "fp32", rows[-1]), flush=True)
            synchronise(run, factors)
        run.step += 1
    del run, twin
    gc.collect()
    shutdown_model_parallel()
    return rows


class Float32Twin:
    """The policy of a bf16 run in fp32 arithmetic, in the same layout, with its masters or its rounded weights."""

    def __init__(self, run: Run) -> None:
        assert run.optimizer is not None

        settings = replace(policy_settings(run.config, run.inputs.shape), dtype=torch.float32, shard_master=False)
        self.run = run
        self.policy = build_policy(run.inputs.shape, settings, run.groups)
        self.optimizer = build_optimizer(self.policy, run.optimizer.settings)

    def remember_(self) -> None:
        """Take the policy's masters and projections of now: those before the update that comes."""
        self._load_masters_()
        self.optimizer.num_updates = self.run.version
        self.optimizer.draw_projections()

    def measure(self, outcome: UpdateOutcome, factors: Mapping[str, Tensor]) -> Row:
        """KLs in nats per token of the update made since `remember_`; the twin then holds the weights after it.

        Args:
            outcome: of the update.
            factors: `U`, already scaled by alpha, by Megatron parameter name.
        """
        policy, probe, metrics = self.policy, outcome.probe_batch, outcome.metrics
        temperature = self.run.config.rollout.rollout_temperature
        decays = {target.name: target.decay for target in self.run.policy.targets}
        for target in policy.targets:
            target.require_sketch().copy_(factors[target.name])
            target.decay = metrics["logra/alpha"] * decays[target.name]
        predicted = mean_over_probe(policy, probe, compute_predicted_kl(policy, probe, temperature=temperature))
        masters_before = policy.compute_hidden(probe)
        self._round_targets_()
        weights_before = policy.compute_hidden(probe)
        self._load_masters_()
        masters = measure_kl(policy, probe, masters_before, temperature, metrics)
        self._round_targets_()
        weights = measure_kl(policy, probe, weights_before, temperature, metrics)

        exact, rounded = policy.compute_hidden(probe), self.run.policy.compute_hidden(probe)
        total = None
        if exact is not None and rounded is not None:
            total = compute_actual_kl(policy, exact, rounded, temperature=temperature, other=self.run.policy)
        return {
            "predicted_kl_in_fp32": predicted,
            "actual_kl_masters_in_fp32": masters["logra/actual_kl"],
            "actual_kl_weights_in_fp32": weights["logra/actual_kl"],
            "rounding_floor": mean_over_probe(policy, probe, total),
        }

    def _load_masters_(self) -> None:
        """Copy every parameter with all the bits that the run keeps of it."""
        with torch.no_grad():
            for parameter in self.run.policy.parameters:
                weight = self.policy.model.get_parameter(parameter.entry.megatron_name)
                weight.copy_(read_master(self.run.policy, parameter.entry))

    def _round_targets_(self) -> None:
        """Replace the masters by the bf16 weights that the run computes with."""
        for target in self.policy.targets:
            target.weight.copy_(round_to_bf16(target.weight))


def _row(number: int, metrics: Mapping[str, float]) -> Row:
    return {
        "update": number,
        "proposed_kl": metrics["logra/predicted_kl"],
        "alpha": metrics["logra/alpha"],
        "update_ratio": metrics["logra/update_ratio"],
        "predicted_kl": metrics["logra/scaled_predicted_kl"],
        "actual_kl": metrics["logra/actual_kl"],
    }


def summarise(rows: dict[str, list[Row]]) -> dict[str, dict[str, Any]]:
    """Smallest, mean and largest ratio of each measurement to the prediction, and whether all lie within its band."""
    summary: dict[str, dict[str, Any]] = {}
    for name, precision, key, label in MEASUREMENTS:
        ratios = [row[key] / row["predicted_kl"] for row in rows.get(precision, ())]
        if precision not in rows:
            continue
        summary[name] = {"label": label, "updates": len(ratios)}
        if ratios:
            summary[name] |= {"min": min(ratios), "mean": math.fsum(ratios) / len(ratios), "max": max(ratios)}
        if name in BANDS:
            low, high = BANDS[name]
            # Nothing measured is nothing shown.
            within = bool(ratios) and all(low <= ratio <= high for ratio in ratios)
            summary[name] |= {"band": [low, high], "within": within}
    return summary


def format_summary(summary: dict[str, dict[str, Any]], rows: dict[str, list[Row]]) -> str:
    """The table of ratios, and what bf16 arithmetic does to prediction and measurement."""
    lines = [f"{'actual / predicted KL':<40} {'min':>8} {'mean':>8} {'max':>8}  updates"]
    for one in summary.values():
        numbers = " ".join(f"{one[key]:>8.3f}" for key in ("min", "mean", "max")) if "min" in one else f"{'none':>26}"
        verdict = ""
        if "within" in one:
            verdict = f"  {'within' if one['within'] else 'OUTSIDE'} [{one['band'][0]:g}, {one['band'][1]:g}]"
        lines.append(f"{one['label']:<40} {numbers}  {one['updates']:>7}{verdict}")
    if bf16 := rows.get("bf16"):
        floors = [row["rounding_floor"] for row in bf16]
        biases = [row["predicted_kl"] / row["predicted_kl_in_fp32"] for row in bf16]
        lines.append(
            f"bf16 rounding floor {min(floors):.1e} to {max(floors):.1e} nats a token; predicted in bf16 / in fp32 "
            f"{min(biases):.3f} to {max(biases):.3f}"
        )
    return "\n".join(lines)


def _format_row(precision: str, row: Row) -> str:
    text = f"{precision} update {row['update']:>3}  predicted {row['predicted_kl']:.3e}"
    for _, run_precision, key, label in MEASUREMENTS:
        if run_precision == precision:
            text += f"  {label.removeprefix('bf16, ')} {row[key] / row['predicted_kl']:.3f}"
    return text + (f"  floor {row['rounding_floor']:.1e}" if "rounding_floor" in row else "")


def _write(
    folder: Path, configs: dict[str, Config], rows: dict[str, list[Row]], summary: dict[str, dict[str, Any]]
) -> None:

    record = {
        "settings": {precision: config.flat() for precision, config in configs.items()},
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "summary": summary,
        "updates": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON_FILE).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draw(rows, folder / PNG_FILE)


def draw(rows: dict[str, list[Row]], output: Path) -> None:
    """All ratios with their bands, those near 1 once more on a linear axis, and the KLs themselves, as one PNG."""
    with plt.rc_context(cast(Any, STYLE)):
        figure, (ratios, near, kls) = plt.subplots(3, 1, figsize=(9, 12), dpi=90, sharex=True)
        _draw_ratios(ratios, rows)
        ratios.set_title("Actual over predicted KL of an update", pad=44)
        ratios.set_yscale("log")
        ratios.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ratios.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ratios.yaxis.set_minor_formatter(NullFormatter())
        ratios.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.1)
        _draw_ratios(near, rows)
        near.set_title("The same near 1", pad=8)
        near.set_ylim(0.7, 1.4)
        _draw_kls(kls, rows)
        figure.subplots_adjust(hspace=0.3)
        figure.savefig(output, format="png", bbox_inches="tight")
        plt.close(figure)


def _draw_ratios(axes: Axes, rows: dict[str, list[Row]]) -> None:
    for (name, band), color in zip(reversed(BANDS.items()), ("#e4e4e4", "#c4dff0"), strict=True):
        text = f"{band[0]:g} to {band[1]:g}, wanted in {name.partition('_')[0]}"
        axes.axhspan(*band, color=color, linewidth=0, zorder=0, label=text)
    for name, precision, key, label in MEASUREMENTS:
        ratios = [row[key] / row["predicted_kl"] for row in rows.get(precision, ())]
        axes.plot(_numbers(rows, precision), ratios, color=COLORS[name], marker="o", label=label)
    axes.set_ylabel("ratio")


def _draw_kls(axes: Axes, rows: dict[str, list[Row]]) -> None:
    for name, precision, key, _ in MEASUREMENTS:
        axes.plot(
            _numbers(rows, precision), [row[key] for row in rows.get(precision, ())], color=COLORS[name], marker="o"
        )
    others = (
        ("fp32", "predicted_kl", "predicted, fp32", {"color": SKY, "linestyle": "--"}),
        ("bf16", "predicted_kl", "predicted, bf16", {"color": GREY, "linestyle": "--"}),
        ("bf16", "rounding_floor", "rounding floor of bf16", {"color": BLACK, "linestyle": ":"}),
    )
    for precision, key, label, style in others:
        values = [row[key] for row in rows.get(precision, ())]
        axes.plot(_numbers(rows, precision), values, label=label, **cast(Any, style))
    axes.set_title("KL, colours as above", pad=26)
    axes.set_ylabel("nats a token")
    axes.set_xlabel("update")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_power(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.1)


def _numbers(rows: dict[str, list[Row]], precision: str) -> list[float]:
    return [row["update"] for row in rows.get(precision, ())]


def _configure(argv: Sequence[str], options: argparse.Namespace, precision: str) -> Config:
    """The trainer's configuration for one precision; settings of what does not happen here stay at their default."""
    given = parse_arguments(argv, prog="calibrate_kl")
    if given.trains_densely:
        raise ConfigError(
            ["optimizer adam and logra_train_non_targets change weights that no KL is predicted of: leave them out"]
        )
    if "bf16" in given.explicit:
        raise ConfigError(["bf16 has no effect here: choose with --precisions, or leave out --bf16"])
    without_effect = {spec.name for spec in iterate_settings() if spec.section in SECTIONS_WITHOUT_EFFECT}
    chosen: dict[str, object] = {
        "train_iters": options.steps,
        "kl_measure_interval": 1,
        "eval_data": None,
        "bf16": precision == "bf16",
    }
    if precision == "fp32":  # whose weights are their own masters
        chosen |= {"logra_master": None, "use_distributed_optimizer": False}
    values = {name: value for name, value in given.flat().items() if name not in without_effect} | chosen
    config = build_config(values, explicit=given.explicit - without_effect - chosen.keys())
    validate_config(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    validate_paths(config)
    return config


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {JSON_FILE} and {PNG_FILE}")
    parser.add_argument("--steps", type=int, default=20, help="iterations of each precision (default %(default)s)")
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="what to run (default: both)"
    )
    return parser.parse_known_args(argv)


def _refuse(error: Exception) -> int:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"calibrate_kl: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
