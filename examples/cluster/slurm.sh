#!/usr/bin/env bash
# sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh <the keys of the run>
#
# Starts Ray on every machine of the job, with a token of the job's own, trains, and stops Ray again. Runs from the repository,
# which all machines share; its environment is .venv, or the one that ENVIRONMENT names.
#SBATCH --job-name=marl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

# shellcheck disable=SC1091
source "${ENVIRONMENT:-.venv}/bin/activate"
port="${RAY_PORT:-6379}"
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${machines[0]}"

# a file that its owner alone can read, as mktemp makes it, in the folder that the machines share
RAY_AUTH_TOKEN_PATH="$(mktemp "$PWD/.ray_token.XXXXXX")"
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH RAY_USAGE_STATS_ENABLED=0

started=()
stop() {
    kill "${started[@]}" 2> /dev/null || true
    wait || true
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap stop EXIT

address_of() { getent ahostsv4 "$1" | awk '{print $1; exit}'; }

there=(srun --nodes=1 --ntasks=1 --overlap)

on_machine() { # machine, command
    "${there[@]}" --nodelist="$1" "${@:2}"
}

start_ray() { # machine, further words of ray start
    "${there[@]}" --nodelist="$1" ray start --block --node-ip-address="$(address_of "$1")" "${@:2}" & # no function: $! is srun's
    started+=("$!")
}

wait_until() { # description of the condition, command that succeeds once it holds
    for _ in $(seq 60); do
        if "${@:2}"; then return; fi
        sleep 2
    done
    echo "$1: not within 60 attempts" >&2
    exit 1
}

start_ray "$head" --head --port="$port" --dashboard-host=127.0.0.1
RAY_ADDRESS="$(address_of "$head"):$port"
export RAY_ADDRESS
wait_until "an answer of the head on $head, port $port" on_machine "$head" ray health-check --address "$RAY_ADDRESS"
for machine in "${machines[@]:1}"; do
    start_ray "$machine" --address="$RAY_ADDRESS"
done
everybody="import ray; ray.init(log_to_driver=False); raise SystemExit(sum(n['Alive'] for n in ray.nodes()) < ${#machines[@]})"
wait_until "all ${#machines[@]} machines" on_machine "$head" python -c "$everybody"

# the driver joins the cluster on the head's machine, where there is a Ray node
on_machine "$head" python -m marl.main \
    hardware=gpu trainer.nnodes="${#machines[@]}" trainer.n_gpus_per_node="${SLURM_GPUS_ON_NODE:-8}" "$@"
