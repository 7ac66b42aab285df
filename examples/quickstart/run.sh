#!/usr/bin/env bash
# Trains the quick start on this machine's CPU and draws its curves. Arguments are passed on to the trainer.
#   MODEL  Hugging Face folder to start from (default: .cache/smollm2-135m-instruct, see tools/prepare_smollm2.py)
#   OUT    where the results go (default: runs/quickstart)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cd "$root"

PATH="$root/.venv/bin:$PATH"
MODEL=${MODEL:-.cache/smollm2-135m-instruct}
OUT=${OUT:-runs/quickstart}
RANKS=${RANKS:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

mkdir -p "$OUT"
python -m megatron_logra.rl.arithmetic --train-data "$OUT/train.jsonl" --eval-data "$OUT/heldout.jsonl"
torchrun --nproc-per-node "$RANKS" -m megatron_logra.train \
    --config "$here/run.yaml" \
    --hf-checkpoint "$MODEL" \
    --train-data "$OUT/train.jsonl" \
    --eval-data "$OUT/heldout.jsonl" \
    --save "$OUT" \
    "$@"
python tools/plot_run.py "$OUT"
