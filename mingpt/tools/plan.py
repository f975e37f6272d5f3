"""Estimate the memory that a worker of a run needs with each strategy, and say which strategy fits.

    python -m mingpt plan [CONFIG.yaml] [section.key=value ...] [--workers N] [--gpu_memory 80GB]
    python -m mingpt plan [CONFIG.yaml] [section.key=value ...] --time 5m [--workers N]

Without --time, no model is trained or allocated. Weights, optimizer and snapshots are counted; gradients,
exchanges and activations are estimated. Activations are those of Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models". The total is right to within a third. With
--gpu_memory, which trainer.device=cuda requires, each worker has a GPU; without it, all workers share this
machine's memory. With data.vocab_size=N the data are not read.

With --time, the command says instead how many steps fit into this time on this machine. Its last line is a
setting, such as trainer.max_steps=1200. The command trains 20 steps in a temporary folder, with as many
workers as plain `python train.py` starts, or with N. It counts the time of the start and the end of a job and
the steps, but no evaluation, sample or snapshot in between. trainer.compile=auto compiles so few steps only
for a large model; give true to measure compiled steps. Other work on the machine makes steps slower, so the
number varies from call to call.

The exit code is 0, even if no strategy or no step fits; it is 2 if the settings, options or data cannot be
used, or if the 20 steps cannot be trained.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import temporary_folder
from mingpt.base.rows import RowMap
from mingpt.config import Config, check_workers
from mingpt.config.cli import parse, read_arguments
from mingpt.config.settings import to_seconds
from mingpt.data import TOKENIZERS, load_named_tokenizer, tokenize
from mingpt.data.corpus import open_data, tokenizer_file
from mingpt.distributed.device import resolve_dtype
from mingpt.model.operations import MAX_LOGITS
from mingpt.parallel.ddp import BUCKET_BYTES
from mingpt.report import read_records
from mingpt.tools.jobs import clean_environment
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
STEPS, FIRST_MEASURED = 20, 6  # of the job that measures the time of a step; the first steps are slower
# The settings of that job: it evaluates one window, and saves nothing before its end.
MEASURING = {
    "trainer.max_steps": STEPS, "trainer.log_every": 1, "trainer.eval_every": STEPS,
    "trainer.eval_windows": 1, "trainer.eval_at_start": False, "trainer.sample_tokens": 0,
    "trainer.pause_after": "null", "snapshot.every": STEPS, "snapshot.memory_every": 0,
    "snapshot.path": "null", "snapshot.resume": "auto", "report.tensorboard": False,
    "report.tracker": "null",
}  # fmt: skip


def estimate(config: Config, vocab_size: int, workers: int, on_cpu: bool, element: int) -> dict[str, float]:
    """Return the bytes of memory that worker 0 needs at its peak, {purpose: bytes}, with their "total".

    Worker 0 is chosen because it writes snapshots. With `on_cpu` the total includes the copies of the state
    for snapshots. Otherwise each worker has a GPU, and these copies are in the host's memory and not in
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
    """Estimate the bytes of a micro-batch's forward pass that the blocks keep for the backward pass.

    A block keeps 34 bytes for each number of its input in bfloat16, and twice that in float32. This assumes
    that attention, like FlashAttention, does not keep its scores. With recomputation each block keeps only
    its input, and the other activations are those of one block. `element` is as in `estimate`.
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


def fit_steps(words: Sequence[str], workers: int | str, limit_s: float) -> list[str]:
    """Train STEPS steps; return the lines to print: seconds per step, and how many steps fit into `limit_s`.

    `words` are the configuration on the command line, `workers` is as trainer.workers, and `limit_s` is in
    seconds. Raises UserError if the STEPS steps cannot be trained.
    """
    path, given = read_arguments(words)
    with temporary_folder() as folder:
        settings = given | MEASURING | {"run_dir": f"{folder}/run", "trainer.workers": workers}
        command = [sys.executable, "-m", "mingpt.launch.train", *([path] if path else [])]
        command += [f"{key}={value}" for key, value in settings.items()]
        began = time.monotonic()
        job = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
        job_s = time.monotonic() - began
        if job.returncode:
            raise UserError(f"{STEPS} steps cannot be trained: {job.stderr.strip().rpartition('error: ')[2]}")
        records = list(read_records(Path(folder, "run/metrics.jsonl")))
    step_s = statistics.median(
        one["step_s"] for one in records if "step_s" in one and one["step"] >= FIRST_MEASURED
    )
    rest_s = job_s - STEPS * step_s
    return [
        f"a step takes {step_s:.3g} s, the median of steps {FIRST_MEASURED} to {STEPS}",
        f"the start and the end of the job take {rest_s:.1f} s",
        f"{limit_s:g} s are enough, without evaluations, samples and snapshots in between, for",
        f"trainer.max_steps={max(0, int((limit_s - rest_s) / step_s))}",
    ]


def size(text: str) -> int:
    return TypeAdapter(ByteSize).validate_python(text)  # type: ignore[no-any-return]


def duration(text: str) -> float:
    return to_seconds(text)


def main(arguments: Sequence[str]) -> int:
    usage = "%(prog)s [CONFIG.yaml] [section.key=value ...] [options]"
    parser = CommandParser("python -m mingpt plan", __doc__, usage)
    parser.add_argument(
        "--workers", type=int, metavar="N", help="workers of the job (default 1; with --time trainer.workers)"
    )
    parser.add_argument("--gpu_memory", type=size, metavar="SIZE", help="of each worker's GPU, such as 80GB")
    parser.add_argument(
        "--time", type=duration, metavar="TIME", help="how many steps fit into it? As in 5h30m"
    )
    options, words = parser.parse_known_args(arguments)
    config, gpu = parse(words), options.gpu_memory
    workers = 1 if options.workers is None else options.workers
    if workers < 1:
        raise UserError(f"--workers must be at least 1, not {workers}")
    if options.time is not None:
        write_lines(fit_steps(words, options.workers or config.trainer.workers, options.time))
        return 0
    if not gpu and config.trainer.device == "cuda":
        raise UserError("how much memory does a GPU have? Give --gpu_memory, such as --gpu_memory 80GB")
    check_workers(config, workers)
    vocab_size = config.data.vocab_size or find_vocab_size(config)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers
    write_lines(render(config, vocab_size, workers, gpu or machine, not gpu))
    return 0
