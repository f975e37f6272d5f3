"""The costs of a worker by strategy: memory, and bytes sent in a step.

Memory is the bytes that a worker holds throughout, and those that each phase of a step adds. The terms of a
micro-batch are the tensors of mingpt/model, one by one; a test counts the tensors that are alive. N is the
tokens of a micro-batch, C = n_embd, V = vocab_size, e the bytes of an element in the type of the products.
The residual stream is float32. B is the bytes of the parameters in float32, W the number of workers. Figures
are for the first worker, which has the staging buffer from which snapshots are written. Terms below 1 % are
left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mingpt.model import cpu_ops, gpt, loss
from mingpt.parallel.ddp import BUCKET_BYTES
from mingpt.tools.plan.workload import BFLOAT_BYTES, FLOAT_BYTES, Workload
from mingpt.training.evaluate import MIN_BATCH_TOKENS

# Measured by plan_memory.py of commit 496a4e0. PROCESS_BYTES: Python, torch, data, report. BUFFER_BYTES:
# buffers of kernels and messages, with a model that is not tiny.
PROCESS_BYTES = {"ddp": 345_000_000, "fsdp": 380_000_000}
BUFFER_BYTES = {"ddp": 150_000_000, "fsdp": 40_000_000}
CUDA_CONTEXT_BYTES = 1_000_000_000  # not measured here


def kept(work: Workload) -> int:
    """Return the activation bytes that the whole forward pass keeps for the backward pass."""
    model, e = work.config.model, work.element_bytes
    stream = work.tokens_per_micro_batch * model.n_embd  # N C
    # A mask; the input of ln_f; its result, which is the input of the head; the bytes that the loss keeps.
    around = (e * stream if model.dropout else 0) + (FLOAT_BYTES + e) * stream + loss_kept(work)
    if work.config.trainer.recompute == "block":
        return model.n_layer * FLOAT_BYTES * stream + around  # each block's input
    return model.n_layer * block(work) + around


def block(work: Workload) -> int:
    """Return the activation bytes that one block saves for its backward pass, without recomputation."""
    model, e = work.config.model, work.element_bytes
    stream = work.tokens_per_micro_batch * model.n_embd
    # The inputs of c_attn, of the attention's c_proj, of c_fc, and of the MLP's c_proj, which is 4 C wide;
    # the input of the activation.
    products = (1 + 1 + 1 + 4 + 4) * e * stream
    norms = 2 * FLOAT_BYTES * stream if model.arch == "gpt2" else 0  # LayerNorm keeps its input
    masks = 2 * e * stream if model.dropout else 0
    return products + norms + attention(work) + masks


def attention(work: Workload) -> int:
    """Return the bytes that a block's attention keeps for its backward pass, between c_attn and c_proj."""
    model, e = work.config.model, work.element_bytes
    tokens, length = work.tokens_per_micro_batch, work.config.data.block_size
    stream = tokens * model.n_embd
    heads = work.config.trainer.micro_batch_size * model.n_head
    # Rotated and normed queries and keys, and the scales of their norms.
    rotary = 2 * e * stream + 2 * FLOAT_BYTES * tokens * model.n_head if model.arch == "modern" else 0
    result = 3 * e * stream + rotary
    if work.on_cpu and length <= gpt.MAX_MATH_ATTENTION:
        ends = [min(first + cpu_ops.ROWS, length) for first in range(0, length, cpu_ops.ROWS)]
        seen = sum((end - first) * end for first, end in zip([0, *ends], ends, strict=False))
        return result + heads * seen * e * (2 if model.dropout else 1)
    if model.arch == "modern":
        result += e * stream  # a copy in another layout
        if work.on_cpu and e != FLOAT_BYTES:
            result += 2 * FLOAT_BYTES * stream  # the norm computes in float32
    return result + FLOAT_BYTES * heads * length  # and a sum for each row


def is_chunked(work: Workload) -> bool:
    return work.tokens_per_micro_batch * work.vocab_size > loss.MAX_LOGITS


def loss_kept(work: Workload) -> int:
    """Return the bytes that the loss keeps for its backward pass: log-softmax or, if chunked, gradients."""
    width = work.config.model.n_embd
    if not is_chunked(work):
        return FLOAT_BYTES * work.tokens_per_micro_batch * work.vocab_size
    head = FLOAT_BYTES * work.vocab_size * width
    return head + work.element_bytes * work.tokens_per_micro_batch * width


def loss_work(work: Workload) -> int:
    """Return the loss's temporary bytes: the logits' gradients or, if chunked, a chunk's and the head's."""
    cast = 0 if work.element_bytes == FLOAT_BYTES else work.element_bytes
    if not is_chunked(work):
        return work.tokens_per_micro_batch * work.vocab_size * (2 * FLOAT_BYTES + cast)
    head = work.vocab_size * work.config.model.n_embd
    return 4 * FLOAT_BYTES * loss.MAX_LOGITS + (FLOAT_BYTES + cast) * head


def backward_work(work: Workload) -> int:
    """Return the temporary bytes of a block's backward pass: gradients of its widest tensor and of its input.

    With recompute=block, also the block's recomputed activations and autocast's copies of its weights.
    """
    stream = work.tokens_per_micro_batch * work.config.model.n_embd
    again = 0
    if work.config.trainer.recompute == "block":
        again = block(work) + cast_bytes(work) * work.block_parameters
    return 2 * 4 * work.element_bytes * stream + 2 * FLOAT_BYTES * stream + again


def cast_bytes(work: Workload) -> int:
    """Return the bytes per element of the copy that autocast makes of a weight; 0 if it makes none."""
    is_cast = work.element_bytes != FLOAT_BYTES and not work.config.trainer.fsdp_param_dtype
    return work.element_bytes if is_cast else 0


def casts(work: Workload) -> int:
    """Return the bytes of weights that autocast copies and keeps; with recompute=block only the head's."""
    head = work.vocab_size * work.config.model.n_embd
    return cast_bytes(work) * (head if work.config.trainer.recompute == "block" else work.matrices)


def evaluation_work(work: Workload) -> int:
    """Return the temporary bytes of a validation batch, which has no backward pass."""
    block_size = work.config.data.block_size
    windows = max(work.config.trainer.micro_batch_size, MIN_BATCH_TOKENS // block_size)
    tokens = windows * block_size
    logits = min(tokens * work.vocab_size, loss.MAX_LOGITS) * (2 * FLOAT_BYTES + work.element_bytes)
    wide = tokens * work.config.model.n_embd * (FLOAT_BYTES + 8 * work.element_bytes)
    return logits + wide


@dataclass(frozen=True)
class Memory:
    """A worker's bytes by name: `held` throughout a run, and what each phase of a step adds."""

    held: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]

    def terms(self) -> dict[str, int]:
        """Return {name: bytes} at the peak: all that is held, and the terms of the largest phase."""
        largest = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        return {**self.held, **self.phases[largest]}

    @property
    def peak_bytes(self) -> int:
        return sum(self.terms().values())


def estimate(work: Workload) -> Memory:
    """Return the first worker's memory, on its device, under the job's strategy; a GPU has no snapshots."""
    own = {"process": process(work)} | held(work)
    if not work.on_cpu:
        own["snapshots"] = 0
    phases = fsdp_phases(work) if work.config.trainer.parallel == "fsdp" else ddp_phases(work)
    phases["update"] = {"gradients": gradient(work), "work": update_work(work)}
    phases["evaluation"] = {"activations": evaluation_work(work), "gathered": gathered(work)}
    return Memory(own, phases)


def process(work: Workload) -> int:
    """Return the bytes of Python, libraries and their buffers or, for a GPU, of its CUDA context."""
    if not work.on_cpu:
        return CUDA_CONTEXT_BYTES
    parallel = work.config.trainer.parallel
    return PROCESS_BYTES[parallel] + min(BUFFER_BYTES[parallel], 3 * FLOAT_BYTES * work.parameters)


def are_updates_sharded(work: Workload) -> bool:
    trainer = work.config.trainer
    return trainer.parallel == "fsdp" or (trainer.shard_optimizer and work.workers > 1)


def held(work: Workload) -> dict[str, int]:
    """Return the bytes of a worker's state by name: on its device, but `snapshots` in the host's memory.

    Weights take B = 4 bytes per parameter; the optimizer's state 2 B under adamw, B for matrices under muon.
    Sharded tensors are shared evenly. Snapshots on disk need a staging buffer for the worker's part; those in
    memory (`snapshot.memory_every`) two files of that size. Copies of another node's parts are not counted.
    """
    trainer = work.config.trainer
    weights = FLOAT_BYTES * work.parameters // (work.workers if trainer.parallel == "fsdp" else 1)
    optimizer = FLOAT_BYTES * work.optimizer_elements // (work.workers if are_updates_sharded(work) else 1)
    copies = 3 if work.config.snapshot.memory_every else 1
    return {"weights": weights, "optimizer": optimizer, "snapshots": copies * (weights + optimizer)}


def gradient(work: Workload) -> int:
    """Return the bytes of the reduced gradient with which a worker updates: all of it, or its shard."""
    return FLOAT_BYTES * work.parameters // (work.workers if are_updates_sharded(work) else 1)


def update_work(work: Workload) -> int:
    """Return the temporary bytes of Muon's update, in bfloat16: momentum, iteration and updates; 0 for adamw.

    They are those of the worker's share of the matrices and, unless updates are sharded, the updates that
    it receives from all other workers.
    """
    own = math.ceil(work.muon_elements / work.workers)
    others = 0 if are_updates_sharded(work) else work.muon_elements - own
    return BFLOAT_BYTES * (4 * own + others)


def ddp_phases(work: Workload) -> dict[str, dict[str, int]]:
    """Return {phase of a step under ddp: {term: bytes}}; each worker computes whole gradients."""
    whole = FLOAT_BYTES * work.parameters
    sums = work.partial_sums()
    head = FLOAT_BYTES * work.vocab_size * work.config.model.n_embd
    if work.config.trainer.reduction == "fast" and work.workers > 1:
        sums += 1  # DistributedDataParallel keeps gradients in its buckets
    return {
        "backward begins": {
            "gradients": sums * whole,
            "activations": kept(work) + casts(work),
            "work": max(loss_work(work), backward_work(work) + head),
            "freed": freed(work),
        },
        "backward ends": {"gradients": max(sums, 1) * whole, "work": backward_work(work) + head},
        "reduction": {"gradients": whole, "work": in_flight(work)},
    }


def freed(work: Workload) -> int:
    """Return the freed bytes that glibc still keeps: about a gradient and half of the activations.

    0 on a GPU. With this term, measured peaks at 10.65 M and 85 M parameters were 0.86 to 1.04 of estimates.
    """
    return FLOAT_BYTES * work.parameters + (kept(work) + casts(work)) // 2 if work.on_cpu else 0


def in_flight(work: Workload) -> int:
    """Return the bytes of the largest bucket as it is sent, received and gathered; 0 for one worker."""
    largest = FLOAT_BYTES * max(map(math.prod, work.shapes.values()))
    bucket = min(FLOAT_BYTES * work.parameters, BUCKET_BYTES + largest)
    return 3 * bucket if work.workers > 1 else 0


def gathered(work: Workload) -> int:
    """Return the bytes of whole weights that a worker holds at once under fsdp; 0 under ddp, or if alone.

    They are those outside of the blocks and those of two blocks, or of all blocks without fsdp_reshard.
    """
    trainer = work.config.trainer
    if trainer.parallel != "fsdp" or work.workers == 1:
        return 0
    blocks = min(2, work.config.model.n_layer) if trainer.fsdp_reshard else work.config.model.n_layer
    return gathered_bytes(work) * (work.root_parameters + blocks * work.block_parameters)


def gathered_bytes(work: Workload) -> int:
    """Return the bytes per element of gathered weights."""
    return BFLOAT_BYTES if work.config.trainer.fsdp_param_dtype else FLOAT_BYTES


def fsdp_phases(work: Workload) -> dict[str, dict[str, int]]:
    """Return {phase of a step under fsdp: {term: bytes}}; gradients are reduced block by block."""
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
            "freed": freed(work),
        },
        "backward ends": {
            "gradients": sums + own + copies * root,
            "gathered": gathered(work),
            "work": backward_work(work) + copies * block,
        },
    }


def bytes_sent(work: Workload) -> int:
    """Return the bytes that the worker with most partial sums sends per step; Muon's updates are a mean.

    A collective of n bytes of which each worker keeps 1 / W costs n (W - 1) / W. Gradients, weights and
    Muon's updates count; the few bytes of losses and norms do not.
    """
    if work.workers == 1:
        return 0
    elements = fsdp_bytes(work) if work.config.trainer.parallel == "fsdp" else ddp_bytes(work)
    return math.ceil((elements + muon_bytes(work)) * (work.workers - 1) / work.workers)


def ddp_bytes(work: Workload) -> int:
    """Return the bytes that the worker with most partial sums gives to a step's collectives under ddp.

    The factor (W - 1) / W of `bytes_sent` and Muon's updates are not in it. Partial sums go to the workers
    that add them; sums, or updated weights, go to all, as in a ring. A worker whose micro-batches are not
    exactly a subtree of the tree of additions sends several partial sums.
    """
    whole = FLOAT_BYTES * work.parameters
    if work.config.trainer.reduction == "fast":
        gathers = 2 if not work.config.trainer.shard_optimizer else 3
        return gathers * whole
    return work.parts_sent() * whole + whole


def fsdp_bytes(work: Workload) -> int:
    """Return the bytes of a step's collectives under fsdp: per round the weights and the gradients.

    If fsdp_reshard is set, the blocks' weights count twice. The factor (W - 1) / W and Muon's updates are not
    in it.
    """
    again = work.parameters - work.root_parameters if work.config.trainer.fsdp_reshard else 0
    weights = gathered_bytes(work) * (work.parameters + again)
    return work.rounds * (weights + FLOAT_BYTES * work.parameters)


def muon_bytes(work: Workload) -> int:
    """Return the bytes (bfloat16) that Muon's updates add to a worker's collectives per step; 0 under adamw.

    The worker that computes an update sends it to all. If updates are sharded, each worker sends its rows of
    the momentum to that worker, and gets its rows of the update. The factor (W - 1) / W of
    `bytes_sent` is not in it.
    """
    whole = BFLOAT_BYTES * work.muon_elements
    return 2 * whole // work.workers if are_updates_sharded(work) else whole
