#!/bin/bash
# The agent of one node, started by srun once per node; its arguments are those of train.py.
set -euo pipefail

# The address by which Slurm knows this node, not that of a loopback interface to which its own name may
# resolve; failing that, its first address. LOCAL_ADDR sets it for one node.
name=$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
address=$(getent ahostsv4 "$name" | awk -v name="$name" '$1 !~ /^127\./ || $1 == name { print $1; exit }')
first=$(hostname -I | cut -d ' ' -f 1)

exec bash launch/elastic.sh --nnodes "$MIN_NODES:$SLURM_NNODES" \
    --nproc "${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_PER_TASK}" \
    --rdzv "${RENDEZVOUS:-$PWD/out/rendezvous}" --rdzv_id "$SLURM_JOB_ID" \
    --local_addr "${LOCAL_ADDR:-${address:-$first}}" -- train.py "$@"
