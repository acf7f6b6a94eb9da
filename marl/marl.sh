#!/usr/bin/env bash
# bash marl/marl.sh key=value …
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
exec python -m marl.main "$@"
