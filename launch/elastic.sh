#!/bin/bash
# Runs torchrun on a cluster in which any node may die, join or leave during the run. Start it on every node:
#
#   launch/elastic.sh --nnodes MIN:MAX --nproc N --rdzv PATH|HOST:PORT[,HOST:PORT...] --local_addr A -- train.py ...
#
# --help explains the options, which are those of `python -m anynode`. Nothing has to be installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$(command -v python || command -v python3)}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m anynode "$@"
