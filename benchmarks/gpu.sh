#!/usr/bin/env bash
# What only a GPU can tell, in under ten minutes: is attention right, do collectives in branches end, does training run.
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
part "attention by cuDNN" 150 "$python" benchmarks/gpu_attention.py
part "collectives in branches" 150 "$python" benchmarks/gpu_branches.py --json="$out/branches.json"
part "a run" 200 "$python" -m sharded_train train --config=configs/quickstart.py --workdir="$out/quickstart" \
    --config.precision.recipe=bf16 --config.train.num_steps=200 --config.evaluate.every=0

if ((${#failed[@]})); then
    printf '\n=== failed: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
