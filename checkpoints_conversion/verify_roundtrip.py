"""Checks that a Hugging Face folder survives the way to a Megatron checkpoint and back without losing a bit.

The checkpoint is really written, in a temporary folder that is deleted, and read back one tensor at a time, each being
compared with what is in the folder. No GPU, no ranks; the temporary folder takes the size of the weights.

    python checkpoints_conversion/verify_roundtrip.py --hf-checkpoint DIR --tensor-model-parallel-size 2

With --against-bridge the shards of every rank, and the rows of its factors, are compared with Megatron-Bridge's too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_logra.checkpoint.command import add_layout_flags, layout_of, run_command
from megatron_logra.checkpoint.convert import find_differences, open_hf
from megatron_logra.checkpoint.placement import Layout, name_map
from megatron_logra.mcore.bridge import compare_with_bridge
from megatron_logra.mcore.bridge_family import find_family


def main() -> int:
    """Compare all tensors; returns 0 when every bit is the same, 1 when not, 2 for a folder or layout that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="Hugging Face folder")
    add_layout_flags(parser)
    parser.add_argument("--scratch", type=Path, help="where the temporary folder is made (default: the system's)")
    parser.add_argument("--against-bridge", action="store_true", help="compare with Megatron-Bridge too")
    parser.add_argument("--dry-run", action="store_true", help="print the map of names and stop")
    return run_command(parser, verify)


def verify(options: argparse.Namespace) -> int:
    """Do what `main` says with parsed options."""
    layout = layout_of(options)
    if options.dry_run:
        print("\n".join(name_map(open_hf(options.hf_checkpoint, find_other=find_family)[0], layout)))
        return 0
    different, checked = find_differences(options.hf_checkpoint, layout, options.scratch, find_other=find_family)
    for name in different:
        print(f"DIFFERENT  {name}")
    sizes = f"TP {layout.tensor_model_parallel_size} x PP {layout.pipeline_model_parallel_size}"
    print(f"{checked - len(different)} of {checked} tensors are the same to the last bit at {sizes}")
    if options.against_bridge:
        different += _compare_with_bridge(options.hf_checkpoint, layout, sizes)
    return 1 if different else 0


def _compare_with_bridge(folder: Path, layout: Layout, sizes: str) -> list[str]:
    found = compare_with_bridge(
        folder,
        open_hf(folder, find_other=find_family)[0],
        tp_size=layout.tensor_model_parallel_size,
        pp_size=layout.pipeline_model_parallel_size,
        make_vocab_size_divisible_by=layout.make_vocab_size_divisible_by,
    )
    for line in found.differences:
        print(f"OTHERWISE IN BRIDGE  {line}")
    print(
        f"{found.num_shards} shards and {found.num_factor_maps} row maps of factors were compared with Megatron-Bridge "
        f"at {sizes}: {len(found.differences)} differences"
    )
    return list(found.differences)


if __name__ == "__main__":
    sys.exit(main())
