#!/usr/bin/env bash
# Open MPI: launch/openmpi.sh HOSTFILE --config=FILE.py --workdir=SHARED_DIR [--config.KEY=VALUE ...]
# HOSTFILE names a host a line, host 0 first. One supervised process on each drives all its GPUs; logs by process lie in
# SHARED_DIR/logs. SIGTERM to this script: all save and it ends with code 75; the same command goes on from there.
set -uo pipefail

# Waits for what was started last, passing SIGTERM on to it: to mpirun as SIGUSR1, which that forwards to all hosts.
attend() {
    trap "kill -$1 $!; told=yes" TERM USR1
    while told=; wait $!; code=$?; [[ $told ]]; do :; done  # a signal ends a wait, not what is waited for
}

if [[ ${1:-} == --on-host ]]; then  # what mpirun starts; it signals all that belongs to it, so USR1 is for this alone
    (trap '' USR1 && exec sharded-train launch "${@:3:$2}" --host-index="$OMPI_COMM_WORLD_RANK" -- train "${@:$2 + 3}") &
    attend TERM
    ((code == 0)) || sleep 20  # mpirun ends all when one has failed: the others are about to end by themselves
    exit "$code"
fi

hostfile=$1
shift
mapfile -t hosts < <(sed -n -E 's/^[[:space:]]*([^#[:space:]]+).*/\1/p' "$hostfile")
where=(--processes=1)
if ((${#hosts[@]} > 1)); then
    where+=(--hosts="${#hosts[@]}" --coordinator="${hosts[0]}:${PORT:-8476}")
fi
mpirun --hostfile "$hostfile" -np "${#hosts[@]}" --map-by ppr:1:node --bind-to none \
    "$0" --on-host "${#where[@]}" "${where[@]}" "$@" &
attend USR1
exit "$code"
