"""Hostile and foreign snapshots: what train.py, sample.py, init_from and eval_only make of each kind.

    python benchmarks/hostile.py                          # all; needs Linux; an hour on two cores
    python benchmarks/hostile.py --kinds NaN FIFO --programs train --older yes     # a minute

A small run has snapshots of steps 2 and 4. In a trial, a bad snapshot of a kind in hostile_kinds.py replaces
the snapshot of step 4. If the snapshot of step 2 is there, the program must use it and end with exit code 0.
Otherwise the program must end with one sentence and exit code 2. "init file" is train.py with
snapshot.init_from=step_00000004.safetensors; it must refuse each bad file. Kinds called "valid" may be used
or refused. No traceback may appear, and no payload may be executed. Peak memory may exceed the peak on the
valid snapshot by --slack_mb plus the size of the bad files. Kinds with 4 MB of JSON may take 120 MB more.
Prints a row per trial, as JSON; exit code 1 if a trial has a problem. `--kinds` takes parts of kinds' names.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Tally, argument_parser, row, work_folder
from hostile_kinds import KINDS, VALID_FIELDS, forge, read

from mingpt.tools.jobs import ROOT, clean_environment

PROGRAMS = ("train", "sample", "init", "init file", "eval")
SETTINGS = (
    "data.block_size=32", "model.n_layer=2", "model.n_embd=32", "trainer.batch_size=4", "trainer.workers=1",
    "trainer.sample_tokens=0", "trainer.device=cpu", "snapshot.every=2",
    "snapshot.memory_every=0",
)  # fmt: skip
MB = 1e6
PARSED_MB = 120  # of memory, for 4 MB of JSON once they are parsed


@dataclass(frozen=True)
class Outcome:
    """The end of a program: exit code, output and peak memory."""

    code: int
    out: str
    err: str
    peak: int  # of the program's resident memory, in bytes


def execute(command: Sequence[str], timeout_s: float = 120) -> Outcome:
    """Run a program to its end, or kill it after `timeout_s`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        words = ["timeout", "--signal=KILL", str(timeout_s), *command]
        process = subprocess.Popen(words, cwd=ROOT, env=clean_environment(), stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Outcome(process.returncode, texts[0], texts[1], usage.ru_maxrss * 1024)


def command(program: str, run_dir: Path, text: Path, fresh: Path) -> list[str]:
    """Return the command of a program on the snapshots of `run_dir`; `fresh` is the folder of a new run."""
    train = [sys.executable, "train.py", f"data.path={text}", *SETTINGS]
    if program == "sample":
        return [sys.executable, "sample.py", str(run_dir), "--tokens", "5"]
    if program == "train":
        return [*train, f"run_dir={run_dir}", "trainer.max_steps=4"]
    if program == "eval":
        return [*train, f"run_dir={run_dir}", "trainer.max_steps=4", "trainer.eval_only=true"]
    origin = run_dir if program == "init" else run_dir / "snapshots" / "step_00000004.safetensors"
    return [*train, f"run_dir={fresh}", f"snapshot.init_from={origin}", "trainer.max_steps=0"]


class Range:
    """Tries the programs, each on a copy of one run with valid snapshots."""

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
        """Return the peak memory, in bytes. train.py goes on from step 2, others from a faultless forgery."""
        if program not in self.clean_peaks:
            run_dir = self.copy()
            snapshots = run_dir / "snapshots"
            manifest = snapshots / "step_00000004.json"
            self.forge("valid: unchanged", manifest, manifest.with_suffix(".safetensors"))
            for path in snapshots.glob("step_00000004.*" if program == "train" else "step_00000002.*"):
                path.unlink()
            outcome = self.start(program, run_dir)
            if outcome.code:
                raise RuntimeError(outcome.err)
            self.clean_peaks[program] = outcome.peak
        return self.clean_peaks[program]

    def forge(self, kind: str, manifest: Path, tensors: Path) -> None:
        """Replace a snapshot by a bad snapshot of this kind, in a child process."""
        child = os.fork()
        if child == 0:
            forgery = read(manifest, tensors, self.canary)
            forge(kind, forgery)
            forgery.write(manifest, tensors)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, "the forgery failed"

    def trial(self, kind: str, program: str, older: bool) -> bool:
        """Try a program, with a snapshot of step 2 if `older`; print a row; return whether all went well."""
        clean_peak, run_dir = self.clean_peak(program), self.copy()
        snapshots = run_dir / "snapshots"
        paths = snapshots / "step_00000004.json", snapshots / "step_00000004.safetensors"
        self.forge(kind, *paths)
        for path in snapshots.iterdir():
            if not older and "step_00000004" not in path.name:
                path.unlink()
        size = sum(path.lstat().st_blocks * 512 for path in (*paths, paths[1].with_suffix(".tokenizer")))
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
    """Return the problems of a program that was given a bad snapshot of step 4."""
    lines = outcome.err.splitlines()
    if has_older:
        named = [line for line in lines if "snapshot of step 4 " in line]
        wrong = [] if outcome.code == 0 else [f"exit code {outcome.code}, not 0"]
        return wrong + ([] if len(named) == 1 else [f"named in {len(named)} lines"])
    wrong = [] if outcome.code == 2 else [f"exit code {outcome.code}, not 2"]
    sentences = [line for line in lines if line.startswith("error: ")]
    return wrong + ([] if len(sentences) == 1 else [f"{len(sentences)} sentences"])


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
