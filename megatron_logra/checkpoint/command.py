"""What the conversion command lines share: flags of the layout, exit codes, errors and warnings as plain lines.

0 done    1 a difference was found, or writing failed    2 a folder or a setting is wrong
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable

from megatron_logra.checkpoint.placement import Layout


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `Layout`, named as in training."""
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="shards of a layer (default 1)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="stages (default 1)")
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128, help="as in training (default 128)")


def layout_of(options: argparse.Namespace) -> Layout:
    """The layout that was given. Raises ValueError for a size below 1."""
    return Layout(
        options.tensor_model_parallel_size, options.pipeline_model_parallel_size, options.make_vocab_size_divisible_by
    )


def run_command(parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int]) -> int:
    """Parse the command line and do `work` with it; returns the exit code."""
    options, name = parser.parse_args(), parser.prog.removesuffix(".py")

    def report(kind: str, text: object) -> None:
        print(f"{name}: {kind}: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: report("warning", message)
        try:
            return work(options)
        except (ValueError, OSError, RuntimeError) as error:
            report("error", error)
            return 2 if isinstance(error, ValueError) else 1
