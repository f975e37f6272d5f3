"""What a worker sends to others in a step, in bytes, by strategy and reduction."""

import math

from mingpt.plan.memory import are_updates_sharded, gathered_bytes
from mingpt.plan.workload import BFLOAT_BYTES, FLOAT_BYTES, Workload


def bytes_sent(work: Workload) -> int:
    """Of the worker that has most partial sums to send, else a mean over the workers.

    A collective of n bytes of which each worker keeps 1 / W costs n (W - 1) / W.
    Gradients, weights and Muon's updates; not the few bytes of losses and norms.
    """
    if work.workers == 1:
        return 0
    elements = fsdp_bytes(work) if work.config.trainer.parallel == "fsdp" else ddp_bytes(work)
    return math.ceil((elements + muon_bytes(work)) * (work.workers - 1) / work.workers)


def ddp_bytes(work: Workload) -> int:
    """Partial sums to the workers that add them, and sums, or updated weights, from these: a ring's bytes.

    A worker whose micro-batches are no whole subtree sends several partial sums.
    """
    whole = FLOAT_BYTES * work.parameters
    if work.config.trainer.reduction == "fast":
        gathers = 2 if not work.config.trainer.shard_optimizer else 3
        return gathers * whole
    return work.parts_sent() * whole + whole


def fsdp_bytes(work: Workload) -> int:
    """In each round weights before the forward pass, blocks again before the backward, then gradients."""
    again = work.parameters - work.root_parameters if work.config.trainer.fsdp_reshard else 0
    weights = gathered_bytes(work) * (work.parameters + again)
    return work.rounds * (weights + FLOAT_BYTES * work.parameters)


def muon_bytes(work: Workload) -> int:
    """Updates in bfloat16, from the worker that computes them to all.

    Where rows are sharded, each worker sends its rows of the momentum there, and gets those of the update.
    """
    whole = BFLOAT_BYTES * work.muon_elements
    return 2 * whole // work.workers if are_updates_sharded(work) else whole
