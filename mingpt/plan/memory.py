"""The memory of a worker by strategy: what it holds throughout, and what each phase of a step adds, in bytes.

The figures are those of the first worker, which holds most: the largest share of what is sharded, and the
staging buffer from which snapshots are written. B is the parameters in float32, W the workers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mingpt.distributed.device import keeps_freed_memory
from mingpt.parallel.buckets import BUCKET_BYTES
from mingpt.plan.activations import backward_work, casts, evaluation_work, kept, loss_work
from mingpt.plan.workload import BFLOAT_BYTES, FLOAT_BYTES, Workload

# Measured by benchmarks/plan_memory.py: Python, torch, data, report; then, beside a model that is not tiny,
# buffers of kernels and messages.
PROCESS_BYTES = {"ddp": 345_000_000, "fsdp": 380_000_000}
BUFFER_BYTES = {"ddp": 150_000_000, "fsdp": 40_000_000}
CUDA_CONTEXT_BYTES = 1_000_000_000  # not measured here


@dataclass(frozen=True)
class Memory:
    """Bytes by name: `held` from the first step to the last, and each phase's own."""

    held: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    def terms(self) -> dict[str, int]:
        """Those at the peak."""
        return {**self.held, **self.phases[self.largest_phase]}

    @property
    def peak_bytes(self) -> int:
        return sum(self.terms().values())


def estimate(work: Workload) -> Memory:
    """That of the job's own strategy."""
    held = {
        "process": process(work),
        "weights": weights(work),
        "optimizer": optimizer(work),
        "snapshots": host_snapshots(work) if work.on_cpu else 0,
    }
    phases = fsdp_phases(work) if work.config.trainer.parallel == "fsdp" else ddp_phases(work)
    phases["update"] = {"gradients": gradient(work), "work": update_work(work)}
    phases["evaluation"] = {"activations": evaluation_work(work), "gathered": gathered(work)}
    return Memory(held, phases)


def process(work: Workload) -> int:
    """Beside everything that follows from the model."""
    if not work.on_cpu:
        return CUDA_CONTEXT_BYTES
    parallel = work.config.trainer.parallel
    return PROCESS_BYTES[parallel] + min(BUFFER_BYTES[parallel], 3 * FLOAT_BYTES * work.parameters)


def share(work: Workload, is_sharded: bool) -> float:
    return work.first_share if is_sharded else 1.0


def are_updates_sharded(work: Workload) -> bool:
    trainer = work.config.trainer
    return trainer.parallel == "fsdp" or (trainer.shard_optimizer and work.workers > 1)


def weights(work: Workload) -> int:
    """B, or B / W under fsdp."""
    is_sharded = work.config.trainer.parallel == "fsdp"
    return math.ceil(FLOAT_BYTES * work.parameters * share(work, is_sharded))


def optimizer(work: Workload) -> int:
    """2 B under adamw, B for matrices under muon; / W where updates are sharded."""
    return math.ceil(FLOAT_BYTES * work.optimizer_elements * share(work, are_updates_sharded(work)))


def host_snapshots(work: Workload) -> int:
    """What snapshots need of the host's memory: a copy of the worker's part, and two in files in memory.

    From the first one a snapshot is written. The first worker of a node maps the others, so they are its own.
    """
    copies = 3 if work.config.snapshot.memory_every else 1
    return copies * (weights(work) + optimizer(work))


def gradient(work: Workload) -> int:
    """That of the parameters that the worker updates, summed over all workers."""
    return math.ceil(FLOAT_BYTES * work.parameters * share(work, are_updates_sharded(work)))


def update_work(work: Workload) -> int:
    """Muon's matrices in bfloat16: momentum, iteration and updates of the worker's share of them.

    Where workers hold matrices whole, the updates of all others too.
    """
    own = math.ceil(work.muon_elements / work.workers)
    others = 0 if are_updates_sharded(work) else work.muon_elements - own
    return BFLOAT_BYTES * (4 * own + others)


def ddp_phases(work: Workload) -> dict[str, dict[str, int]]:
    """Each worker computes whole gradients."""
    whole = FLOAT_BYTES * work.parameters
    sums = work.partial_sums()
    head = FLOAT_BYTES * work.vocab_size * work.config.model.n_embd
    if work.config.trainer.reduction == "fast" and work.workers > 1:
        sums += 1  # DistributedDataParallel keeps gradients in its buckets
    backward = {
        "gradients": sums * whole,
        "activations": kept(work) + casts(work),
        "work": max(loss_work(work), backward_work(work) + head),
    }
    if work.on_cpu and keeps_freed_memory(work.config.trainer):
        # Freed blocks of other sizes are of no use to the last micro-batch's gradient and to the copies that
        # are sent, received and gathered, bucket by bucket.
        backward["freed"] = (4 if work.workers > 1 else 1) * whole
    return {
        "backward begins": backward,
        "backward ends": {"gradients": max(sums, 1) * whole, "work": backward_work(work) + head},
        "reduction": {"gradients": whole, "work": in_flight(work)},
    }


def in_flight(work: Workload) -> int:
    """Of a bucket what is sent, received and gathered."""
    largest = FLOAT_BYTES * max(map(math.prod, work.shapes.values()))
    bucket = min(FLOAT_BYTES * work.parameters, BUCKET_BYTES + largest)
    return 3 * bucket if work.workers > 1 else 0


def gathered(work: Workload) -> int:
    """Weights that a worker has whole at a time under fsdp: the root's, and those of two blocks."""
    if work.config.trainer.parallel != "fsdp" or work.workers == 1:
        return 0
    if not work.config.trainer.fsdp_reshard:
        return gathered_bytes(work) * work.parameters
    return gathered_bytes(work) * (
        work.root_parameters + min(2, work.config.model.n_layer) * work.block_parameters
    )


def gathered_bytes(work: Workload) -> int:
    """Of an element of gathered weights."""
    return BFLOAT_BYTES if work.config.trainer.fsdp_param_dtype else FLOAT_BYTES


def fsdp_phases(work: Workload) -> dict[str, dict[str, int]]:
    """Blocks one after the other: a block's gradient, what is sent of it, and what is received."""
    sums, own = work.partial_sums() * gradient(work), gradient(work)
    copies = 3 if work.workers > 1 else 1
    root = FLOAT_BYTES * work.root_parameters
    block = FLOAT_BYTES * work.block_parameters
    return {
        "backward begins": {
            "gradients": sums + root,
            "activations": kept(work) + casts(work),
            "gathered": gathered(work),
            "work": max(loss_work(work), backward_work(work) + copies * block),
        },
        "backward ends": {
            "gradients": sums + own + copies * root,
            "gathered": gathered(work),
            "work": backward_work(work) + copies * block,
        },
    }
