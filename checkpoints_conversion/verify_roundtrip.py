"""Checks that a Hugging Face folder survives the way to Megatron's shards and back without losing a bit.

For every pipeline stage and tensor-parallel rank the shards are assembled as training would load them, joined again as
an export would, and compared with what is on disk. One parameter is in memory at a time; no GPU, no ranks.

    python checkpoints_conversion/verify_roundtrip.py --hf-checkpoint DIR --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megatron_logra.hf.assemble import assemble_local, merge_shards
from megatron_logra.hf.config import read_model_shape
from megatron_logra.hf.rows import local_columns, local_rows, local_shape, padded_vocab_size, validate_layout
from megatron_logra.hf.safetensors_io import HFReader, validate_checkpoint
from megatron_logra.hf.table import parameter_table


def main() -> int:
    """Compare all tensors; returns 0 when every bit is the same, 1 when not, 2 for a folder or layout that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="shards of a layer (default 1)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="stages (default 1)")
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128, help="as in training (default 128)")
    parser.add_argument("--dry-run", action="store_true", help="print the map of names and stop")
    options = parser.parse_args()
    try:
        return verify(options)
    except ValueError as error:
        print(f"verify_roundtrip: error: {error}", file=sys.stderr)
        return 2


def verify(options: argparse.Namespace) -> int:
    """Do what `main` says with parsed options."""
    shape, reader = read_model_shape(options.hf_checkpoint), HFReader(options.hf_checkpoint)
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    validate_layout(shape, tp_size=tp, pp_size=pp)
    validate_checkpoint(reader, shape)
    padded = padded_vocab_size(shape.vocab_size, options.make_vocab_size_divisible_by, tp)
    per_stage = shape.num_layers // pp
    different, checked = [], 0
    for stage in range(pp):
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        for entry in parameter_table(shape, layers=layers, embedding=stage == 0, final=stage == pp - 1):
            if options.dry_run:
                print(f"stage {stage}  {entry.megatron_name}  <-  {', '.join(entry.hf_names)}")
                continue
            shards = [
                assemble_local(
                    entry,
                    local_rows(entry, shape, rank, tp, padded),
                    local_columns(entry, rank, tp),
                    reader.read,
                    local_shape(entry, tp, padded),
                )
                for rank in range(tp)
            ]
            for name, tensor in merge_shards(entry, shape, shards, padded).items():
                checked += 1
                if not torch.equal(tensor, reader.read(name).to(tensor.dtype)):
                    different.append(name)
    if options.dry_run:
        return 0
    for name in different:
        print(f"DIFFERENT  {name}")
    print(f"{checked - len(different)} of {checked} tensors are the same to the last bit at TP {tp} x PP {pp}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
