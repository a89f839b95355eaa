#!/usr/bin/env bash
# What only a GPU can tell, in about ten minutes: is attention right, do collectives in branches end, does training run, what
# does FP8 bring.
#
#     benchmarks/gpu.sh [FOLDER]      # prints everything; JSON goes into FOLDER (default: runs/gpu)
#
# Nothing of it was run so far: no machine of ours had a GPU. What it prints belongs into docs/measurements.md.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-runs/gpu}
mkdir -p "$out"
make setup || exit 1
python=${VENV:-.venv}/bin/python
failed=()

# part NAME SECONDS COMMAND...: runs a command under a heading and a time limit, notes a failure and goes on.
part() {
    local name=$1 limit=$2
    shift 2
    printf '\n=== %s\n' "$name"
    timeout "$limit" "$@" || failed+=("$name ($?)")
}

part "machine" 30 nvidia-smi -L
part "ceilings" 60 "$python" benchmarks/gpu_ceilings.py --json="$out/ceilings.json"
part "attention by cuDNN" 150 "$python" benchmarks/gpu_attention.py
part "collectives in branches" 150 "$python" benchmarks/gpu_branches.py --json="$out/branches.json"
part "a run" 100 "$python" -m sharded_train train --config=configs/quickstart.py --workdir="$out/quickstart" \
    --config.precision.recipe=bf16 --config.train.num_steps=200 --config.evaluate.every=0

# A Llama of about a billion parameters in every recipe: step time, tokens/s, MFU, FP8 products counted, loss over 50 steps;
# and what a rehearsal says of the same step.
llama=(--config=configs/quickstart.py --config.mesh.tensor=1 --config.zero.stage=0 --config.model.num_layers=16
    --config.model.d_model=2048 --config.model.d_ff=8192 --config.model.num_heads=32 --config.model.num_kv_heads=8
    --config.train.global_batch_size=8 --config.train.sequence_length=2048 --config.train.remat=selective
    --config.train.num_steps=50 --config.schedule.warmup_steps=10 --config.schedule.learning_rate=3e-4
    --config.evaluate.every=0 --config.checkpoint.every=0 --config.log.every=5)
recipes=(bf16 fp8_delayed fp8_current)
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
((${capability%%.*} >= 10)) && recipes+=(mxfp8) # Blackwell: tensor cores that know scales of blocks
for recipe in "${recipes[@]}"; do
    part "1B in $recipe" 120 "$python" -m sharded_train train "${llama[@]}" --config.precision.recipe=$recipe \
        --workdir="$out/1b_$recipe"
    rm -rf "$out/1b_$recipe/checkpoints" # 12 GB each
done
part "FP8 scales" 30 "$python" -m sharded_train precision --workdir="$out/1b_fp8_delayed" --html="$out/precision.html"
for recipe in bf16 fp8_delayed; do
    part "1B in $recipe, rehearsed" 60 "$python" -m sharded_train rehearse "${llama[@]}" --cluster=h200:1x1 \
        --config.precision.recipe=$recipe --json="$out/rehearsed_$recipe.json"
done

part "beside each other, and the goals" 30 "$python" benchmarks/gpu_summary.py "$out"

# Several GPUs: their links, and the same model sharded.
if (($(nvidia-smi -L | wc -l) > 1)); then
    part "collectives" 60 "$python" -m sharded_train collectives "${llama[@]}" --config.mesh.data=-1 --json="$out/collectives.json"
    for way in "zero.stage=3" "zero.stage=1 mesh.data=1 mesh.tensor=-1"; do
        changes=()
        for change in $way; do changes+=("--config.$change"); done
        part "1B, $way" 90 "$python" -m sharded_train train "${llama[@]}" "${changes[@]}" \
            --config.train.num_steps=20 --workdir="$out/sharded_${way//[ =.]/_}"
        rm -rf "$out/sharded_${way//[ =.]/_}/checkpoints"
    done
fi

if ((${#failed[@]})); then
    printf '\n=== failed: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
