#!/usr/bin/env bash
# Trains one tiny policy with and without KL control and with dense Adam, at a step that is too large and at a safe one,
# draws the rewards and prints the final ones. Arguments are passed on to the trainer of every run.
#   OUT          where the results go (default: runs/kl_stability)
#   RATIOS       proposed steps, |update| / |weights| (default: 1e-1 1e-2)
#   ARMS         of: controlled uncontrolled adam (default: all)
#   SEEDS        of the data order, of sampling and of the projections (default: 1 2 3)
#   JOBS         runs at a time, one core each (default: 2)
#   MODEL_STEPS  supervised training steps of the policy that all runs start from (default: 200)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cd "$root"

PATH="$root/.venv/bin:$PATH"
OUT=${OUT:-runs/kl_stability}
RATIOS=${RATIOS:-1e-1 1e-2}
ARMS=${ARMS:-controlled uncontrolled adam}
SEEDS=${SEEDS:-1 2 3}
JOBS=${JOBS:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
inputs="$OUT/inputs"

# Flags of an arm at a step. Adam's first update changes every weight by its learning rate, so that its relative size is
# learning rate / root mean square of the weights.
arm_flags() {
    local arm=$1 ratio=$2 seed=$3
    local logra="--logra-rank 32 --logra-seed $seed --logra-update-ratio $ratio"
    case $arm in
        controlled) echo "$logra --kl-schedule constant --kl-alpha-max 1" ;;
        uncontrolled) echo "$logra --kl-control off" ;;
        adam) echo "--optimizer adam --lr $(awk "BEGIN { printf \"%.3g\", $ratio * $(cat "$inputs/weight_rms") }")" ;;
        *) echo "run.sh: unknown arm $arm: choose of controlled, uncontrolled and adam" >&2; return 1 ;;
    esac
}

# One run: [FLAG ...] ARM RATIO SEED. Status 255 makes xargs start no other.
train() {
    local arm=${*: -3:1} ratio=${*: -2:1} seed=${*: -1} flags
    set -- "${@:1:$#-3}"
    local folder="$OUT/step_$ratio/$arm/seed_$seed" started=$SECONDS
    flags=$(arm_flags "$arm" "$ratio" "$seed") || return 255
    mkdir -p "$folder"
    # shellcheck disable=SC2086  # flags are words
    if ! python -m megatron_logra.train --config "$here/run.yaml" --hf-checkpoint "$inputs/model" \
        --train-data "$inputs/train.jsonl" --seed "$seed" --save "$folder" $flags "$@" >"$folder/log.txt" 2>&1; then
        tail -n 20 "$folder/log.txt" >&2
        echo "run.sh: the run in $folder failed" >&2
        return 255
    fi
    echo "step $ratio  $arm  seed $seed  ($((SECONDS - started)) s)"
}

python "$here/make_model.py" --output "$inputs" --steps "${MODEL_STEPS:-200}"
export here OUT inputs
export -f arm_flags train
for ratio in $RATIOS; do
    for seed in $SEEDS; do
        for arm in $ARMS; do
            echo "$arm $ratio $seed"
        done
    done
done | xargs -P "$JOBS" -L 1 bash -c 'train "$@"' train "$@"
python "$here/plot.py" "$OUT"
