#!/bin/sh
# Healthy: the cluster's head answers, where the container is a node of one (RAY_HEAD); else its Python finds the package.
set -eu
if [ -n "${RAY_HEAD:-}" ]; then
    exec ray health-check --address "$RAY_HEAD"
fi
exec python3 -c "import marl.types"
