"""From the start of the process to the first completed step, beside a bare `import torch`, in turns.

    python benchmarks/start.py
    python benchmarks/start.py --launch plain           # python train.py, which starts two workers itself
    python benchmarks/start.py --launch torchrun        # two workers
    python benchmarks/start.py --against CHECKOUT       # also the start of another commit of this project

The default run, as `python train.py` with one worker unless told otherwise, without its first evaluation. A
row per round, as JSON, then medians of the paired ratios: with --against, our time over the other checkout's;
last, our time over that of the import. Exit code 1 unless the last is at most 2.5.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import arguments_of, row, seconds_to_import_torch, spread, wait_for_success

from mingpt.tools.jobs import ROOT, Job, clean_environment, torchrun

POLL_S = 0.002
SETTINGS = {
    "trainer.eval_at_start": False,
    "trainer.log_every": 1,
    "trainer.max_steps": 3,
    "trainer.sample_tokens": 0,
    "trainer.device": "cpu",
}


def one_worker(checkout: Path) -> list[str]:
    """The setting for a single process; an older commit, which lacks it, has no other way to train."""
    command = [sys.executable, "train.py", "--help"]
    done = subprocess.run(
        command, cwd=checkout, env=clean_environment(), capture_output=True, text=True, check=True
    )
    return ["trainer.workers=1"] if "trainer.workers=" in done.stdout else []


def beginning(launch: str, checkout: Path) -> tuple[list[str], list[str]]:
    """What stands before train.py in the command line, and more settings."""
    if launch == "torchrun":
        return torchrun(2), []
    return [sys.executable], ["trainer.workers=2"] if launch == "plain" else one_worker(checkout)


def seconds_to_first_step(checkout: Path, run_dir: Path, launch: tuple[list[str], list[str]]) -> float:
    """Until the first step is on record. Raises RuntimeError if the run fails."""
    program, more = launch
    command = [*program, "train.py", f"run_dir={run_dir}", *arguments_of(SETTINGS), *more]
    record = run_dir / "metrics.jsonl"
    began = time.monotonic()
    job = Job(command, run_dir, cwd=checkout)
    while job.is_running() and not (record.exists() and record.read_text().endswith("\n")):
        time.sleep(POLL_S)
    took = time.monotonic() - began
    wait_for_success(job)
    assert json.loads(record.read_text().splitlines()[0])["step"] == 1
    return took


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--launch", choices=("one", "plain", "torchrun"), default="one")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    checkouts = {"first_step_s": ROOT}
    if arguments.against:
        checkouts["other_first_step_s"] = arguments.against.resolve()
    launches = {kind: beginning(arguments.launch, checkout) for kind, checkout in checkouts.items()}
    over_import, over_other = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        for number in range(arguments.rounds):
            times = {"import_torch_s": seconds_to_import_torch()}
            for kind in reversed(checkouts) if number % 2 else checkouts:
                run_dir = Path(name, f"{kind}-{number}")
                times[kind] = seconds_to_first_step(checkouts[kind], run_dir, launches[kind])
            over_import.append(times["first_step_s"] / times["import_torch_s"])
            rounded = {kind: round(seconds, 3) for kind, seconds in times.items()}
            ratios = {"ratio": round(over_import[-1], 3)}
            if arguments.against:
                over_other.append(times["first_step_s"] / times["other_first_step_s"])
                ratios["ratio_to_other"] = round(over_other[-1], 3)
            row(round=number, **rounded, **ratios)
    if over_other:
        row(ratio_to_other=round(statistics.median(over_other), 3), **spread(over_other, 3))
    row(ratio=round(statistics.median(over_import), 3), **spread(over_import, 3))
    return 0 if statistics.median(over_import) <= 2.5 else 1


if __name__ == "__main__":
    sys.exit(main())
