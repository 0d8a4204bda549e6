#!/usr/bin/env bash
# Starts one process on each host: bash docs/cluster/ssh.sh HOST HOST ... -- --preset 80gb --run /shared/runs/first
# ssh.md explains it.
set -uo pipefail

python=${PYTHON:-$PWD/.venv/bin/python}
port=${PORT:-12321}

hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
if [ ${#hosts[@]} -lt 2 ] || [ $# -lt 1 ]; then
    echo "usage: bash $0 HOST HOST ... -- arguments of course_lib.train" >&2
    exit 2
fi
shift

started=()
trap 'kill "${started[@]}"' INT TERM
for number in "${!hosts[@]}"; do
    place=(--coordinator "${hosts[0]}:$port" --process "$number" --processes "${#hosts[@]}")
    command=$(printf '%q ' "$python" -u -m course_lib.train "$@" "${place[@]}")
    ssh -tt -o BatchMode=yes "${hosts[number]}" "cd $(printf '%q' "$PWD") && exec $command" </dev/null &
    started+=($!)
done

code=0
for each in "${started[@]}"; do
    wait "$each" || code=$?
done
exit "$code"
