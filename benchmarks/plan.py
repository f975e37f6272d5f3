"""The memory that `python -m mingpt plan` estimates for worker 0, beside the peak that the trainer prints.

    python benchmarks/plan.py [--sizes default 10M 12x768]       # a quarter of an hour on two cores

Trains a few steps with two workers on CPUs, by each strategy without recomputation. Both figures are in MB,
without the imported libraries. The exit code is 1 if any estimate differs from its peak by more than a third.
"""

import itertools
import re
import subprocess
import sys
from typing import Any

import common
from steps_against import BIG

from mingpt.config.cli import build
from mingpt.tools.jobs import ROOT
from mingpt.tools.plan import LIBRARY_BYTES, estimate

FEW = {"trainer.batch_size": 8, "trainer.micro_batch_size": 2, "trainer.max_steps": 2}
WIDE = FEW | {"model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768}
SIZES: dict[str, Any] = {"default": {"trainer.max_steps": 4}, "10M": BIG | FEW, "12x768": BIG | WIDE}
ALL = {"trainer.device": "cpu", "trainer.dtype": "float32", "trainer.timeout_s": 300, "snapshot.every": 2}
ALL |= {"trainer.eval_windows": 4, "trainer.sample_tokens": 5, "snapshot.memory_every": 1}
STRATEGIES: list[dict[str, Any]] = [{}, {"trainer.shard_optimizer": True}, {"trainer.parallel": "fsdp"}]
IMPORTS = "import matplotlib.figure, mingpt.training.trainer"
PEAK = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"


def main() -> int:
    parser, is_good = common.argument_parser(__doc__), True
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    for size, strategy in itertools.product(parser.parse_args().sizes, STRATEGIES):
        settings = SIZES[size] | ALL | strategy
        imports = f"{IMPORTS}{', torch.distributed.fsdp' if 'trainer.parallel' in strategy else ''}; {PEAK}"
        libraries = int(subprocess.check_output([sys.executable, "-c", imports], cwd=ROOT)) * 1024
        with common.work_folder() as folder:
            common.train(folder / "run", settings)
            (peak,) = re.findall(r"at most ([\d,]+) MB of memory", (folder / "run/log.txt").read_text())
        measured = round(float(peak.replace(",", "")) - libraries / 1e6)
        planned = round((estimate(build(settings), 50, 2, True, 4)["total"] - LIBRARY_BYTES) / 1e6)
        common.row(
            size=size, **strategy, planned=planned, measured=measured, ratio=round(planned / measured, 3)
        )
        is_good = is_good and abs(planned / measured - 1) <= 1 / 3
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
