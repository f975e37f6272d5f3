"""Hostile and foreign snapshots: what train.py, sample.py, init_from and eval_only make of each kind.

    python benchmarks/hostile.py                          # all; needs Linux; an hour on two cores
    python benchmarks/hostile.py --kinds NaN FIFO --programs train --older yes     # a minute

A bad snapshot of a kind in hostile_kinds.py replaces the newer one of two snapshots. If the older one is
there, the program must use it and end with exit code 0. Otherwise it must end with one sentence and exit code
2. The program "init file" begins with the bad tensor file, and must refuse it. Kinds called "valid" may be
used or refused. No traceback may appear, and no payload may be executed. Peak memory may exceed that on the
valid snapshot by --slack_mb plus the size of the bad files, and 120 MB for 4 MB of JSON. Prints a row per
trial, as JSON; exit code 1 if a trial has a problem.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Tally, argument_parser, row, work_folder
from hostile_kinds import KINDS, VALID_FIELDS, forge, read
from support.jobs import Job

from mingpt.tools.jobs import ROOT

PROGRAMS = ("train", "sample", "init", "init file", "eval")
SETTINGS = (
    "data.block_size=32", "model.n_layer=2", "model.n_embd=32", "trainer.batch_size=4", "trainer.workers=1",
    "trainer.sample_tokens=0", "trainer.device=cpu", "snapshot.every=2", "snapshot.memory_every=0",
)  # fmt: skip
MB = 1e6
PARSED_MB = 120  # of memory, for 4 MB of JSON once they are parsed


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    peak: int  # of the program's resident memory, in bytes


def execute(command: Sequence[str], timeout_s: float = 120) -> Outcome:
    with work_folder() as folder:
        job = Job(["timeout", "--signal=KILL", str(timeout_s), *command], folder / "job")
        _, status, usage = os.wait4(job.pid, 0)
        job.process.returncode = os.waitstatus_to_exitcode(status)
        return Outcome(job.process.returncode, job.out(), job.err(), usage.ru_maxrss * 1024)


def command(program: str, run_dir: Path, text: Path, fresh: Path) -> list[str]:
    train = [sys.executable, "train.py", f"data.path={text}", *SETTINGS]
    if program == "sample":
        return [sys.executable, "sample.py", str(run_dir), "--tokens", "5"]
    if program in ("train", "eval"):
        return [*train, f"run_dir={run_dir}", "trainer.max_steps=4", f"trainer.eval_only={program == 'eval'}"]
    origin = run_dir if program == "init" else run_dir / "snapshots" / "step_00000004.safetensors"
    return [*train, f"run_dir={fresh}", f"snapshot.init_from={origin}", "trainer.max_steps=0"]


class Range:
    def __init__(self, folder: Path, slack_mb: float) -> None:
        self.folder, self.slack_mb = folder, slack_mb
        self.text, self.whole, self.canary = folder / "text", folder / "whole", folder / "canary"
        self.text.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
        outcome = execute(command("train", self.whole, self.text, self.whole))
        if outcome.code:
            raise RuntimeError(outcome.err)
        self.clean_peaks: dict[str, int] = {}

    def copy(self) -> Path:
        run_dir = self.folder / "run"
        for left in (run_dir, self.folder / "fresh"):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(self.whole, run_dir)
        return run_dir

    def start(self, program: str, run_dir: Path) -> Outcome:
        return execute(command(program, run_dir, self.text, self.folder / "fresh"))

    def clean_peak(self, program: str) -> int:
        if program not in self.clean_peaks:
            run_dir = self.copy()
            snapshots = run_dir / "snapshots"
            self.forge("valid: unchanged", snapshots)
            for path in snapshots.glob("step_00000004.*" if program == "train" else "step_00000002.*"):
                path.unlink()
            outcome = self.start(program, run_dir)
            if outcome.code:
                raise RuntimeError(outcome.err)
            self.clean_peaks[program] = outcome.peak
        return self.clean_peaks[program]

    def forge(self, kind: str, snapshots: Path) -> None:
        paths = snapshots / "step_00000004.json", snapshots / "step_00000004.safetensors"
        child = os.fork()
        if child == 0:
            forgery = read(*paths, self.canary)
            forge(kind, forgery)
            forgery.write(*paths)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, "the forgery failed"

    def trial(self, kind: str, program: str, older: bool) -> bool:
        clean_peak, run_dir = self.clean_peak(program), self.copy()
        snapshots = run_dir / "snapshots"
        self.forge(kind, snapshots)
        for path in snapshots.iterdir():
            if not older and "step_00000004" not in path.name:
                path.unlink()
        size = sum(path.lstat().st_blocks * 512 for path in snapshots.glob("step_00000004.*"))
        before = sorted(path.name for path in snapshots.iterdir())
        outcome = self.start(program, run_dir)
        after = sorted(path.name for path in snapshots.iterdir())
        wrong = problems(outcome, older and program != "init file") if kind in KINDS else []
        if kind in VALID_FIELDS and outcome.code not in (0, 2):
            wrong.append(f"exit code {outcome.code}")
        is_renamed = any(name.startswith("damaged-1-step_00000004") for name in after)
        if kind in KINDS and is_renamed != (program == "train" and older):
            wrong.append("renamed" if is_renamed else "not renamed")
        if program != "train" and before != after:
            wrong.append("the folder has changed")
        if "Traceback" in outcome.err + outcome.out:
            wrong.append("a traceback")
        if self.canary.exists():
            wrong.append("a payload was executed")
            self.canary.unlink()
        excess_mb = (outcome.peak - clean_peak - size) / MB
        if excess_mb > self.slack_mb + PARSED_MB * ("small values" in kind):
            wrong.append("memory")
        said = (outcome.err.strip().splitlines() or [""])[-1 if wrong else 0]
        row(kind=kind, program=program, older=older, code=outcome.code, peak_mb=round(outcome.peak / MB, 1),
            excess_mb=round(excess_mb, 1), wrong=wrong, said=said[:300])  # fmt: skip
        return not wrong


def problems(outcome: Outcome, has_older: bool) -> list[str]:
    lines, expected = outcome.err.splitlines(), 0 if has_older else 2
    wrong = [] if outcome.code == expected else [f"exit code {outcome.code}, not {expected}"]
    if has_older:
        named = sum("snapshot of step 4 " in line for line in lines)
        return wrong + ([] if named == 1 else [f"named in {named} lines"])
    sentences = sum(line.startswith("error: ") for line in lines)
    return wrong + ([] if sentences == 1 else [f"{sentences} sentences"])


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--kinds", nargs="*", default=[""], help="words in their names")
    parser.add_argument("--programs", nargs="*", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--older", nargs="*", default=["yes", "no"], choices=["yes", "no"])
    parser.add_argument("--slack_mb", type=float, default=8.0, help="how much peaks differ from run to run")
    arguments = parser.parse_args()
    kinds = [kind for kind in (*KINDS, *VALID_FIELDS) if any(word in kind for word in arguments.kinds)]
    tally = Tally()
    with work_folder() as folder:
        place = Range(folder, arguments.slack_mb)
        for kind in kinds:
            for program in arguments.programs:
                for older in arguments.older:
                    tally.add(place.trial(kind, program, older == "yes"))
    return tally.exit_code(kinds=len(kinds))


if __name__ == "__main__":
    sys.exit(main())
