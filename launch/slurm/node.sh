#!/bin/bash
# The agent of one node, which a batch script here starts by srun once per node. It gets the arguments of
# train.py, or of MINGPT_PROGRAM if that is set, and MIN_NODES and FIRST_NODE from the batch script.
set -euo pipefail

# The address by which Slurm knows this node, not that of a loopback interface to which its own name may
# resolve; failing that, its first address. LOCAL_ADDR sets it for one node.
name=$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
address=$(getent ahostsv4 "$name" | awk -v name="$name" '$1 !~ /^127\./ || $1 == name { print $1; exit }')
first=$(hostname -I | cut -d ' ' -f 1)

trap : TERM # the agent gets it too, and ends in order
# MINGPT_PROGRAM is not quoted, since it may be several words: -m mingpt doctor
bash launch/elastic.sh --nnodes "$MIN_NODES:$SLURM_NNODES" \
    --nproc "${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_PER_TASK}" \
    --rdzv "${RENDEZVOUS:-$PWD/out/rendezvous}" --rdzv_id "$SLURM_JOB_ID" \
    --local_addr "${LOCAL_ADDR:-${address:-$first}}" -- ${MINGPT_PROGRAM:-train.py} "$@" &
agent=$! code=0
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent" && code=0 || code=$?
done

# The batch script ran on the first node. If that node is gone, nothing ends the job (--no-kill), so requeue
# it: it goes on, or finds the run finished and exits.
job=$(scontrol show job "$SLURM_JOB_ID")
nodes=$(scontrol show hostnames "$(sed -n 's/^ *NodeList=//p' <<<"$job")")
if [[ $job == *JobState=RUNNING* ]] && ! grep -qx "$FIRST_NODE" <<<"$nodes"; then
    scontrol requeue "$SLURM_JOB_ID" || true # another node may have done it
fi
exit "$code"
