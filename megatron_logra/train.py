"""The command that trains: reads the command line, checks it without loading torch, and runs the trainer.

Start one process per rank:  torchrun --nproc-per-node N -m megatron_logra.train --hf-checkpoint DIR ...
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_logra.arguments import parse_arguments
from megatron_logra.config import Config
from megatron_logra.config_validation import validate_config, validate_paths


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status, 2 when configuration, model folder or data are wrong (nothing is written)."""
    try:
        config = parse_arguments(argv, prog="megatron-logra train")
        validate_config(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        validate_paths(config)
    except ValueError as error:
        return _refuse(error)
    configure_process(config)
    from megatron_logra.mcore.initialize import shutdown_distributed
    from megatron_logra.run import SetUpError
    from megatron_logra.trainer import train

    try:
        train(config)
    except SetUpError as error:
        return _refuse(error)
    finally:
        shutdown_distributed()
    return 0


def _refuse(error: Exception) -> int:
    """Say what is wrong, once a node: the ranks of a node read the same files and find the same."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or getattr(error, "is_own", False):
        print(f"megatron-logra train: error: {error}", file=sys.stderr, flush=True)
    return 2


def configure_process(config: Config) -> None:
    """Settings that must stand before torch and transformers are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.parallel.tensor_model_parallel_size > 1:
        # Lets the tensor-parallel collective start before the sketch product, as Megatron asks for.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Advice to developers of the libraries below us, which a person who trains cannot act on.
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\b")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if is_first else logging.WARNING,
        format="%(message)s" if is_first else f"[rank {os.environ.get('RANK')}] %(message)s",
    )


if __name__ == "__main__":
    sys.exit(main())
