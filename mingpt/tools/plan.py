"""Estimate the memory that a worker of a run needs with each strategy, and say which strategy fits.

    python -m mingpt plan [CONFIG.yaml] [section.key=value ...] [--workers N] [--gpu_memory 80GB]

Nothing is trained or allocated. Weights, optimizer and snapshots are counted; gradients, exchanges and
activations are estimated. Activations are those of Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models". The total is right to within a third. With --gpu_memory, which
trainer.device=cuda requires, each worker has a GPU; without it, all workers share this machine's memory. With
data.vocab_size=N the data are not read. The exit code is 0, even if no strategy fits; it is 2 if the
settings, options or data cannot be used.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.rows import RowMap
from mingpt.config import Config, check_workers
from mingpt.config.cli import parse
from mingpt.data import TOKENIZERS, load_named_tokenizer, tokenize
from mingpt.data.corpus import open_data, tokenizer_file
from mingpt.distributed.device import resolve_dtype
from mingpt.model.operations import MAX_LOGITS
from mingpt.parallel.ddp import BUCKET_BYTES
from mingpt.training.contents import tensor_shapes
from mingpt.training.evaluate import eval_batch_size

# {column of the table: settings}, from the simplest strategy to the one that needs least memory.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp", "shard_optimizer": "false"},
    "ddp sharded": {"parallel": "ddp", "shard_optimizer": "true"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp block": {"parallel": "fsdp", "recompute": "block"},
}
PROCESS_BYTES = 360e6  # of a process on CPUs: Python, its imports, the text and pictures; measured
CUDA_BYTES = 1e9  # of a CUDA context, not measured
FRAGMENTED = 1.5  # glibc keeps freed memory that lies between activations; torch's CUDA allocator reuses it
LOGIT_BYTES = 12  # of a logit and its gradients


def estimate(config: Config, vocab_size: int, workers: int, on_cpu: bool, element: int) -> dict[str, float]:
    """Return the bytes of memory that worker 0 needs at its peak, {purpose: bytes}, with their "total".

    Worker 0 needs the most, because it writes snapshots. With `on_cpu` the total includes the copies of the
    state for snapshots. Otherwise each worker has a GPU, and these copies are in the host's memory and not in
    the total. `element` is the number of bytes of a number in matrix products.
    """
    trainer, shapes = config.trainer, tensor_shapes(config, vocab_size)
    is_fsdp = trainer.parallel == "fsdp"
    sharded = {"model.": is_fsdp, "optimizer.": is_fsdp or trainer.shard_optimizer}
    rows = RowMap(shapes, workers, tuple(kind for kind in sharded if sharded[kind]))
    weights, optimizer = (
        4 * sum(rows.numel(name)[0] for name in shapes if name.startswith(kind)) for kind in sharded
    )
    # The worker's partial sums are like the digits of a binary counter of its micro-batches.
    micro_batches = math.ceil(trainer.batch_size / trainer.micro_batch_size / workers)
    sums = (micro_batches - 1).bit_length() if trainer.reduction == "exact" else 0
    # A bucket's gradients, and what is sent and received for it. A unit of FSDP2 is about as large, and also
    # has gathered weights.
    sizes = [4 * math.prod(shapes[name]) for name in shapes if name.startswith("model.")]
    bucket = min(sum(sizes), BUCKET_BYTES + max(sizes))
    exchanged = 3 * bucket
    if is_fsdp:
        exchanged += bucket if trainer.fsdp_reshard else sum(sizes)
    # An evaluation has at least as many logits as a micro-batch.
    logits = min(eval_batch_size(config) * config.data.block_size * vocab_size, MAX_LOGITS)
    needs = {
        "weights": weights,
        "optimizer": optimizer,
        "gradients": (1 + sums) * weights,
        "exchanges": exchanged if workers > 1 else 0,
        "activations": activations(config, element) * (FRAGMENTED if on_cpu else 1) + LOGIT_BYTES * logits,
        "process": PROCESS_BYTES if on_cpu else CUDA_BYTES,
    }
    # Worker 0 copies its rows, and has two whole states in its node's memory.
    whole = 4 * sum(math.prod(shape) for shape in shapes.values())
    copies = {
        "host: copy for snapshots": weights + optimizer,
        "host: snapshots in memory": 2 * whole if config.snapshot.memory_every else 0,
    }
    total = sum(needs.values()) + (sum(copies.values()) if on_cpu else 0)
    return needs | copies | {"total": total}


def activations(config: Config, element: int) -> float:
    """Return the bytes that the blocks keep of a micro-batch's forward pass.

    A block keeps 34 bytes for each number of its input in bfloat16, and twice that in float32. Attention
    keeps no more than that, as FlashAttention does. With recomputation the blocks keep only their inputs, and
    one of them is computed again. `element` is as in `estimate`.
    """
    model, trainer = config.model, config.trainer
    stream = trainer.micro_batch_size * config.data.block_size * model.n_embd
    if trainer.recompute == "block":
        return stream * (4 * model.n_layer + 17 * element)
    return stream * model.n_layer * 17 * element


def render(config: Config, vocab_size: int, workers: int, limit: float, on_cpu: bool) -> list[str]:
    """Return the lines to print: memory with each strategy, and the first strategy that fits.

    A strategy fits if it needs at most `limit` bytes for worker 0. `on_cpu` is as in `estimate`.
    """
    element = 2  # of bfloat16 or float16
    if on_cpu or config.trainer.dtype != "auto":
        element = getattr(torch, resolve_dtype(config.trainer.dtype, torch.device("cpu"))).itemsize
    last = "none fits: take more workers, a smaller trainer.micro_batch_size or model"
    plans = dict[str, dict[str, float]]()
    for name, settings in reversed(STRATEGIES.items()):
        one = replace(config, trainer=replace(config.trainer, **settings))
        plans[name] = estimate(one, vocab_size, workers, on_cpu, element)
        if plans[name]["total"] <= limit:
            last = " ".join([*(f"trainer.{key}={value}" for key, value in settings.items()), "fits"])
    table = [["", *STRATEGIES]]
    table += [[name, *(spelled(plans[one][name]) for one in STRATEGIES)] for name in plans["ddp"]]
    return [
        f"memory of worker 0 of {workers:,}, right to within a third; it has {spelled(limit)}",
        *("{:26}{:>12}{:>12}{:>12}{:>12}".format(*cells) for cells in table),
        last,
    ]


def spelled(size: float) -> str:
    """Return `size`, in bytes, with a suitable unit, as in "1.5GB"."""
    return ByteSize(size).human_readable(decimal=True)


def find_vocab_size(config: Config) -> int:
    """Return the size of the data's vocabulary; if need be, make a tokenizer from the text.

    Raises UserError if the data or the tokenizer cannot be used, or if snapshot.init_from is set and
    data.tokenizer is auto.
    """
    if config.snapshot.init_from and config.data.tokenizer == "auto":
        raise UserError("with snapshot.init_from a plan needs the weights' vocabulary: set data.vocab_size=N")
    data, name = open_data(config.data), config.data.tokenizer
    path = tokenizer_file(data) if name == "auto" else name
    is_file = path is not None and path not in TOKENIZERS
    tokenizer = load_named_tokenizer(str(path)) if is_file else data.train_tokenizer(name)
    return tokenize(data, config.data, tokenizer).vocab_size


def size(text: str) -> int:
    return TypeAdapter(ByteSize).validate_python(text)  # type: ignore[no-any-return]


def main(arguments: Sequence[str]) -> int:
    usage = "%(prog)s [CONFIG.yaml] [section.key=value ...] [options]"
    parser = CommandParser("python -m mingpt plan", __doc__, usage)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers of the job (default 1)")
    parser.add_argument("--gpu_memory", type=size, metavar="SIZE", help="of each worker's GPU, such as 80GB")
    options, words = parser.parse_known_args(arguments)
    config, workers, gpu = parse(words), options.workers, options.gpu_memory
    if workers < 1:
        raise UserError(f"--workers must be at least 1, not {workers}")
    if not gpu and config.trainer.device == "cuda":
        raise UserError("how much memory does a GPU have? Give --gpu_memory, such as --gpu_memory 80GB")
    check_workers(config, workers)
    vocab_size = config.data.vocab_size or find_vocab_size(config)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers
    write_lines(render(config, vocab_size, workers, gpu or machine, not gpu))
    return 0
