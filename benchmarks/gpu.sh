#!/usr/bin/env bash
# What only a GPU can tell, in about ten minutes of one: is attention right, does training run, what does FP8 bring. With
# several GPUs also: do collectives in branches end, and the same model sharded.
#
#     benchmarks/gpu.sh [FOLDER]      # prints everything; JSON goes into FOLDER (default: runs/gpu)
#
# Nothing of it was run on a GPU so far: no machine of ours had one. tests/test_gpu_script.py runs it with commands that
# are checked and not carried out. What it prints belongs into docs/measurements.md.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-runs/gpu}
mkdir -p "$out"
make setup || exit 1
python=${VENV:-.venv}/bin/python
failed=()

# part NAME SECONDS COMMAND...: runs a command under a heading and a time limit, notes a failure and goes on. A run that is
# told to end saves its state first.
part() {
    local name=$1 limit=$2
    shift 2
    printf '\n=== %s\n' "$name"
    timeout --kill-after=60 "$limit" "$@" || failed+=("$name ($?)")
}

part "machine" 30 nvidia-smi -L

# One GPU, of those that this shell may use.
allowed=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
export CUDA_VISIBLE_DEVICES=${allowed%%,*}
part "ceilings" 60 "$python" benchmarks/gpu_ceilings.py --json="$out/ceilings.json"
part "attention by cuDNN" 150 "$python" benchmarks/gpu_attention.py --json="$out/attention.json"
part "a run" 100 "$python" -m sharded_train train --config=configs/quickstart.py --workdir="$out/quickstart" \
    --config.mesh.tensor=1 --config.precision.recipe=bf16 --config.train.num_steps=200 --config.evaluate.every=0

# A Llama of about a billion parameters in every recipe: step time, tokens/s, MFU, FP8 products counted, loss over 50 steps;
# and what a rehearsal says of the same step.
llama=(--config=configs/quickstart.py --config.mesh.tensor=1 --config.zero.stage=0 --config.model.num_layers=16
    --config.model.d_model=2048 --config.model.d_ff=8192 --config.model.num_heads=32 --config.model.num_kv_heads=8
    --config.train.global_batch_size=8 --config.train.sequence_length=2048 --config.train.remat=selective
    --config.train.num_steps=50 --config.schedule.warmup_steps=10 --config.schedule.learning_rate=3e-4
    --config.evaluate.every=0 --config.evaluate.num_batches=1 --config.checkpoint.every=0 --config.log.every=5)
recipes=(bf16 fp8_delayed fp8_current)
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
[[ $capability == [1-9][0-9].* ]] && recipes+=(mxfp8) # 10.0 is Blackwell: tensor cores that know scales of blocks
for recipe in "${recipes[@]}"; do
    part "1B in $recipe" 180 "$python" -m sharded_train train "${llama[@]}" --config.precision.recipe="$recipe" \
        --workdir="$out/1b_$recipe"
    rm -rf "$out/1b_$recipe/checkpoints" # 12 GB each
done
part "FP8 scales" 30 "$python" -m sharded_train precision --workdir="$out/1b_fp8_delayed" --html="$out/precision.html"
for recipe in bf16 fp8_delayed; do
    part "1B in $recipe, rehearsed" 60 "$python" -m sharded_train rehearse "${llama[@]}" --cluster=h200:1x1 \
        --config.precision.recipe="$recipe" --json="$out/rehearsed_$recipe.json"
done

part "beside each other, and the goals" 30 "$python" benchmarks/gpu_summary.py "$out"

# Several GPUs: their links, conditional collectives, and the same model sharded.
if [[ $allowed == *,* ]]; then
    export CUDA_VISIBLE_DEVICES=$allowed
    part "collectives" 60 "$python" -m sharded_train collectives "${llama[@]}" --config.precision.recipe=bf16 \
        --json="$out/collectives.json"
    part "collectives in branches" 150 "$python" benchmarks/gpu_branches.py --json="$out/branches.json"
    for way in "zero.stage=3" "zero.stage=1 mesh.data=1 mesh.tensor=-1"; do
        changes=()
        for change in $way; do changes+=("--config.$change"); done
        for recipe in bf16 fp8_delayed; do
            folder="$out/sharded_${way//[ =.]/_}_$recipe"
            part "1B in $recipe, $way" 120 "$python" -m sharded_train train "${llama[@]}" "${changes[@]}" \
                --config.precision.recipe="$recipe" --config.train.num_steps=20 --workdir="$folder"
            rm -rf "$folder/checkpoints"
        done
    done
fi

if ((${#failed[@]})); then
    printf '\n=== failed: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
