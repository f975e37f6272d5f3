"""Estimate the memory that a worker of a run needs with each strategy, and say which strategy fits.

    python -m mingpt plan [CONFIG.yaml] [section.key=value ...] [--workers N] [--gpu_memory 80GB]

Nothing is trained. The bytes of weights, optimizer, gradients and snapshots are counted; sharded tensors
count as if all workers had equal parts. Activations are estimated by equation 2 of Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models". The total is right to within a third. With
--gpu_memory, which trainer.device=cuda requires, each worker has a GPU; without it, all workers share this
machine's memory. With data.vocab_size=N the data are not read. The exit code is 0, even if no strategy fits;
it is 2 if the settings, options or data cannot be used.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.config import Config, check_workers
from mingpt.config.cli import parse
from mingpt.data import TOKENIZERS, load_named_tokenizer, tokenize
from mingpt.data.corpus import open_data, tokenizer_file
from mingpt.distributed.device import resolve_dtype
from mingpt.model import parameter_shapes
from mingpt.model.operations import attention_bytes, logits_bytes
from mingpt.optim import state_shapes
from mingpt.parallel.ddp import BUCKET_BYTES, fits_one_bucket
from mingpt.parallel.tree import cover
from mingpt.training.evaluate import eval_batch_size

# From the simplest strategy to the one that needs least memory.
STRATEGIES = [
    "trainer.parallel=ddp",
    "trainer.parallel=ddp trainer.shard_optimizer=true",
    "trainer.parallel=fsdp",
    "trainer.parallel=fsdp trainer.recompute=block",
]
# Memory on CPUs, measured with benchmarks/plan.py: that of Python and its imports; and that of the process,
# which also has the text, pictures and the kernels' buffers.
LIBRARY_BYTES, PROCESS_BYTES = 280e6, 360e6
CUDA_BYTES = 1e9  # of a CUDA context, not measured
FRAGMENTED = 1.5  # glibc keeps freed memory that lies between activations; torch's CUDA allocator reuses it


def nbytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of float32 tensors of these shapes."""
    return 4 * sum(map(math.prod, shapes.values()))


def estimate(config: Config, vocab_size: int, workers: int, on_cpu: bool, element: int) -> dict[str, float]:
    """Return the bytes of memory that worker 0 needs at its peak, {purpose: bytes}, with their "total".

    Worker 0 needs the most, because it writes snapshots. With `on_cpu` the total includes the copies of the
    state for snapshots. Otherwise each worker has a GPU, and these copies are in the host's memory and not in
    the total. `element` is the number of bytes of a number in matrix products.
    """
    trainer = config.trainer
    shapes = parameter_shapes(config.model, vocab_size=vocab_size, block_size=config.data.block_size)
    whole, optimizer = nbytes(shapes), nbytes(state_shapes(shapes, config.optimizer))
    count, is_fsdp = trainer.batch_size // trainer.micro_batch_size, trainer.parallel == "fsdp"
    if is_fsdp:
        block = nbytes({name: shape for name, shape in shapes.items() if name.startswith("h.0.")})
        block = 0 if fits_one_bucket(whole) else block  # a small model is gathered at once
        root = whole - config.model.n_layer * block
        gathered = root + block * (2 if trainer.fsdp_reshard else config.model.n_layer)
        exchanged = gathered / (2 if trainer.fsdp_param_dtype else 1) + 3 * (root + block)
        # The most partial sums that a rank holds when a round (a micro-batch on each rank) begins.
        sums = max(first.bit_count() for first in range(0, count, workers))
    else:
        shares = [range(rank * count // workers, (rank + 1) * count // workers) for rank in range(workers)]
        sums = max(len(cover(range(share.start, last), count)) for share in shares for last in share)
        exchanged = 3 * min(whole, BUCKET_BYTES + 4 * max(map(math.prod, shapes.values())))
    weights = whole / workers if is_fsdp else whole
    state = weights + optimizer / (workers if is_fsdp or trainer.shard_optimizer else 1)
    needs = {
        "weights": weights,
        "optimizer": state - weights,
        "gradients": (1 + sums * (trainer.reduction == "exact")) * weights,
        "exchanges": exchanged if workers > 1 else 0,
        "activations": activations(config, vocab_size, on_cpu, element),
        "process": PROCESS_BYTES if on_cpu else CUDA_BYTES,
    }
    copies = {
        "host: snapshot for disk": state,
        "host: snapshots in memory": 3 * state if config.snapshot.memory_every else 0,
    }
    total = sum(needs.values()) + (sum(copies.values()) if on_cpu else 0)
    return needs | copies | {"total": total}


def activations(config: Config, vocab_size: int, on_cpu: bool, element: int) -> float:
    """Return the bytes that a micro-batch's forward pass keeps, with the logits and their gradients.

    The source is equation 2 of Korthikanti et al. 2022. But `attention_bytes`, which knows the kernels that
    are used here, replaces the equation's term for attention, 5 a s / h. `element` is as in `estimate`.
    """
    model, length = config.model, config.data.block_size
    tokens = config.trainer.micro_batch_size * length
    stream = tokens * model.n_embd
    block = 34 * stream * element / 2
    block += tokens * attention_bytes(model.n_head, length, model.dropout, element, on_cpu)
    kept = model.n_layer * block
    if config.trainer.recompute == "block":
        kept = model.n_layer * 4 * stream + block  # the blocks' inputs, and what is computed again
    rows = length * eval_batch_size(config)  # an evaluation has at least as many logits as a micro-batch
    return kept * (FRAGMENTED if on_cpu else 1) + logits_bytes(rows, vocab_size)


def render(config: Config, vocab_size: int, workers: int, limit: float, on_cpu: bool) -> list[str]:
    """Return the lines to print: memory with each strategy, and the first strategy that fits.

    A strategy fits if it needs at most `limit` bytes for worker 0. `on_cpu` is as in `estimate`.
    """
    element = 2  # of bfloat16 or float16
    if on_cpu or config.trainer.dtype != "auto":
        element = resolve_dtype(config.trainer.dtype, torch.device("cpu")).itemsize
    plain = {"parallel": "ddp", "shard_optimizer": "false", "recompute": config.trainer.recompute}
    columns, fitting = [], []
    for words in STRATEGIES:
        settings: dict[str, Any] = plain | dict(
            word.removeprefix("trainer.").split("=") for word in words.split()
        )
        one = replace(config, trainer=replace(config.trainer, **settings))
        needs = estimate(one, vocab_size, workers, on_cpu, element)
        columns.append(settings | {name: spelled(size) for name, size in needs.items() if size})
        fitting += [f"{words} fits"] if needs["total"] <= limit else []
    return [
        f"memory of worker 0 of {workers:,}, right to within a third; it has {spelled(limit)}",
        "",
        *align([[name, *(column[name] for column in columns)] for name in columns[0]]),
        "",
        [*fitting, "none fits: take more workers, a smaller trainer.micro_batch_size or model"][0],
    ]


def spelled(size: float) -> str:
    """Return `size`, in bytes, rounded to two significant digits, with a suitable unit, as in "1.5 GB"."""
    return ByteSize(float(f"{size:.2g}")).human_readable(decimal=True, separator=" ").replace(".0 ", " ")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


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
    if gpu is not None and gpu < 1e6:
        raise UserError(f"--gpu_memory is {gpu} bytes; give a unit, such as --gpu_memory 80GB")
    if not gpu and config.trainer.device == "cuda":
        raise UserError("how much memory does a GPU have? Give --gpu_memory, such as --gpu_memory 80GB")
    check_workers(config, workers)
    vocab_size = config.data.vocab_size or find_vocab_size(config)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers
    write_lines(render(config, vocab_size, workers, gpu or machine, not gpu))
    return 0
