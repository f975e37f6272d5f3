#!/bin/bash
# Starts torchrun's agent on one node; a batch script in this folder runs this by srun, once per node. The
# arguments are those of train.py, or of MINGPT_PROGRAM if that is set. The batch script sets MIN_NODES and
# FIRST_NODE.
set -euo pipefail

# The address at which Slurm knows this node, because the node's own name may resolve to a loopback address.
# If there is none, it is the node's first address. LOCAL_ADDR sets the address for a job of one node.
name=$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
address=$(getent ahostsv4 "$name" | awk -v name="$name" '$1 !~ /^127\./ || $1 == name { print $1; exit }')
first=$(hostname -I | cut -d ' ' -f 1)

trap : TERM # the agent gets SIGTERM, too, and ends in order
# MINGPT_PROGRAM is not quoted, because it may be several words: -m mingpt doctor
bash launch/elastic.sh --nnodes "$MIN_NODES:$SLURM_NNODES" \
    --nproc "${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_PER_TASK}" \
    --rdzv "${RENDEZVOUS:-$PWD/out/rendezvous}" --rdzv_id "$SLURM_JOB_ID" \
    --local_addr "${LOCAL_ADDR:-${address:-$first}}" -- ${MINGPT_PROGRAM:-train.py} "$@" &
agent=$! code=0
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent" && code=0 || code=$?
done

# The batch script ran on the first node. If that node is gone, nothing ends the job (--no-kill), so requeue
# the job: it goes on with the run, or finds it finished and exits.
job=$(scontrol show job "$SLURM_JOB_ID")
nodes=$(scontrol show hostnames "$(sed -n 's/^ *NodeList=//p' <<<"$job")")
if [[ $job == *JobState=RUNNING* ]] && ! grep -qx "$FIRST_NODE" <<<"$nodes"; then
    scontrol requeue "$SLURM_JOB_ID" || true # another node may have requeued it
fi
exit "$code"
