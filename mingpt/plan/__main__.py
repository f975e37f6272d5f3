"""What does a run need, and what fits: memory per worker, bytes sent, disk and time, by strategy.

    python -m mingpt.plan [CONFIG.yaml] [section.key=value ...] [--workers N] [--gpu_memory 80GB]
                          [--gpu NAME] [--measure]

Nothing is trained and no large tensor allocated. With --gpu_memory, or trainer.device=cuda, workers are GPUs;
else they share this machine's memory. --gpu names one whose rate is known, for the time per step; --measure
takes the rates of this machine's CPU instead, in a few seconds. Exit code 0, also where nothing fits; 2 for a
mistake.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence

from mingpt.cli import CommandParser, parse
from mingpt.config import Config
from mingpt.errors import UserError
from mingpt.redact import redact

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m mingpt.plan",
        usage="%(prog)s [CONFIG.yaml] [section.key=value ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="of the job (default 1)")
    parser.add_argument("--gpu_memory", metavar="SIZE", help="of each worker's GPU, such as 80GB")
    parser.add_argument("--gpu", metavar="NAME", help="such as H100, for the time per step")
    parser.add_argument("--measure", action="store_true", help="the rates of this machine's CPU")
    return parser


def parse_size(text: str) -> int:
    """Bytes of "80GB", "79.6 GiB" or a plain number. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper())
    unit = found[2] if found else "?"
    unit = unit + "B" if unit in ("K", "M", "G") else unit
    if not found or unit not in UNITS or float(found[1]) == 0:
        raise UserError(f"--gpu_memory must be a size such as 80GB, not {text!r}")
    return int(float(found[1]) * UNITS[unit])


def machine_bytes() -> int:
    """Of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan(config: Config, arguments: argparse.Namespace) -> list[str]:
    """The lines to print. Raises UserError."""
    from mingpt.config import check_workers
    from mingpt.plan import Workload, measure_data
    from mingpt.plan.speed import known_rates, measure_rates
    from mingpt.plan.table import render

    if arguments.workers < 1:
        raise UserError(f"--workers must be at least 1, not {arguments.workers}")
    check_workers(config, arguments.workers)
    limit, source, on_cpu = memory_limit(config, arguments)
    vocab_size, train_tokens = measure_data(config)
    dtype = planned_dtype(config, on_cpu)
    work = Workload(config, vocab_size, arguments.workers, on_cpu, dtype, train_tokens)
    rates = known_rates(arguments.gpu) if arguments.gpu else None
    if arguments.gpu and rates is None:
        raise UserError(f"the rate of a GPU {arguments.gpu!r} is not known: leave --gpu out, or see --help")
    if arguments.measure:
        if not on_cpu:
            raise UserError("--measure measures this machine's CPU, and the workers are GPUs: use --gpu NAME")
        rates = measure_rates(work)
    return render(work, limit, source, rates)


def memory_limit(config: Config, arguments: argparse.Namespace) -> tuple[int, str, bool]:
    """Bytes for a worker, in words where from, and whether it is a CPU's. Raises UserError."""
    device = config.trainer.device
    if arguments.gpu_memory is not None:
        if device == "cpu":
            raise UserError("--gpu_memory contradicts trainer.device=cpu: leave one of them out")
        return parse_size(arguments.gpu_memory), "a GPU has", False
    if device == "cuda" or arguments.gpu:
        raise UserError("how much memory does a GPU have? Give --gpu_memory, such as --gpu_memory 80GB")
    share = machine_bytes() // arguments.workers
    return share, f"this machine's among {arguments.workers:,}:", True


def planned_dtype(config: Config, on_cpu: bool) -> str:
    """What trainer.dtype=auto becomes: bfloat16 on a GPU, and on a CPU that has it."""
    import torch

    from mingpt.distributed.device import resolve_dtype

    if not on_cpu and config.trainer.dtype == "auto":
        return "bfloat16"
    return str(resolve_dtype(config.trainer.dtype, torch.device("cpu"))).removeprefix("torch.")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; `argv` has the arguments, None those of the command line."""
    try:
        arguments, settings = make_parser().parse_known_args(argv)
        lines = plan(parse(settings), arguments)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        return 2
    sys.stdout.write(redact("".join(f"{line}\n" for line in lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
