#!/bin/bash
# Runs torchrun on a cluster in which any node may die, join or leave during the run. Start it on every node:
#
#   launch/elastic.sh --nnodes MIN:MAX --nproc N --rdzv PATH|HOST:PORT[,HOST:PORT...] --local_addr A -- train.py ...
#
# --help explains the options. The script prints a torchrun command with its environment, and executes it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$(command -v python || command -v python3)}
# torchrun finds the rendezvous among the entry points on this path, so nothing has to be installed.
export PYTHONPATH="$root:$root/launch/plugin${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m mingpt.launch.elastic.command "$@"
