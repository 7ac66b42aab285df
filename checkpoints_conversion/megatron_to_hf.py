"""Converts a Megatron checkpoint (`torch_dist`) to a Hugging Face folder, whatever parallel sizes it was written at.

It may come from `hf_to_megatron.py`, from a training run of this package or from Megatron itself. Config, tokenizer and
chat template are copied from --hf-reference, whose config.json must describe the model; its weights are not read.
Tensors are converted one at a time; no GPU, no ranks.

    python checkpoints_conversion/megatron_to_hf.py --load IN --hf-reference DIR --save OUT
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megatron_logra.checkpoint.command import run_command
from megatron_logra.checkpoint.convert import convert_to_hf
from megatron_logra.checkpoint.reader import MegatronCheckpoint
from megatron_logra.mcore.bridge_family import find_family, read_shape

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> int:
    """Convert, or print the map of names; returns the exit code of `checkpoint.command`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="checkpoint, or folder of checkpoints (the newest)")
    parser.add_argument("--hf-reference", type=Path, required=True, help="Hugging Face folder with the config.json")
    parser.add_argument("--save", type=Path, required=True, help="Hugging Face folder to write")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="keep", help="of the weights (default keep)")
    parser.add_argument("--master", action="store_true", help="the fp32 masters of a training run, everything in fp32")
    parser.add_argument("--dry-run", action="store_true", help="check the checkpoint, print the map of names and stop")
    return run_command(parser, convert)


def convert(options: argparse.Namespace) -> int:
    """Do what `main` says with parsed options."""
    dtype = DTYPES[options.dtype]
    if options.master and dtype == torch.bfloat16:
        raise ValueError("--master writes fp32: leave out --dtype bf16, or --master for the bf16 weights")
    if options.dry_run:
        shape = read_shape(options.hf_reference)
        print("\n".join(MegatronCheckpoint(options.load, shape, master=options.master).name_map()))
        return 0
    convert_to_hf(
        options.load,
        options.hf_reference,
        options.save,
        dtype=dtype,
        master=options.master,
        find_other=find_family,
    )
    print(f"wrote {options.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
