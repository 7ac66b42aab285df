"""Converts a Hugging Face folder to a Megatron checkpoint (`torch_dist`), which loads at any parallel sizes.

Weights are written under Megatron's names with the types they have, one parameter at a time; no GPU, no ranks. OUT
gets `iter_0000000` and `latest_checkpointed_iteration.txt`, so it is what `--load` of Megatron expects.

    python checkpoints_conversion/hf_to_megatron.py --hf-checkpoint DIR --save OUT --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_logra.checkpoint.command import add_layout_flags, layout_of, run_command
from megatron_logra.checkpoint.convert import convert_from_hf, open_hf
from megatron_logra.checkpoint.placement import name_map
from megatron_logra.mcore.bridge_family import find_family


def main() -> int:
    """Convert, or print the map of names; returns the exit code of `checkpoint.command`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--save", type=Path, required=True, help="folder of the Megatron checkpoint")
    add_layout_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="check the folder, print the map of names and stop")
    return run_command(parser, convert)


def convert(options: argparse.Namespace) -> int:
    """Do what `main` says with parsed options."""
    layout = layout_of(options)
    if options.dry_run:
        print("\n".join(name_map(open_hf(options.hf_checkpoint, find_other=find_family)[0], layout)))
        return 0
    place = convert_from_hf(options.hf_checkpoint, options.save, layout, find_other=find_family)
    print(f"wrote {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
