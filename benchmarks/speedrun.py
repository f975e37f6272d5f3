"""A board of short trainings that anybody can check. docs/speedrun.md has the tracks and the rules.

    python benchmarks/speedrun.py run 1.88 NAME CONFIG [section.key=value ...] [--text FILE]
    python benchmarks/speedrun.py check benchmarks/speedrun/1.88-NAME [--text FILE]

`run` trains by CONFIG with the checkout's last commit and its uncommitted changes, in a copy, and makes an
entry. `check` trains an entry again, and prints "same bits", or "same loss within 0.003" on another kind of
machine, or what differs; the exit code is then 1. FILE is tiny Shakespeare, which train.py else downloads.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import argument_parser, wait_for_success, work_folder
from support.jobs import Job, read_history, read_metric

from mingpt.config import flatten, to_dict
from mingpt.config.cli import build, read_file
from mingpt.tools.compare import compare, read_run
from mingpt.tools.jobs import ROOT

# {track: (the validation loss to reach, kind of device, number of cores or GPUs)}
TRACKS = {"1.88": (1.88, "cpu", 2), "1.47": (1.47, "cpu", 2), "gpu": (1.47, "cuda", 1)}
RULES = {  # of every track: the text, its last tenth as a whole for validation, and weights drawn at random
    "data.sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    "data.val_fraction": 0.1,
    "trainer.eval_windows": None,
    "snapshot.init_from": None,
}
SAME_LOSS = 0.003


def output_of(*words: str, cwd: Path = ROOT) -> str:
    return subprocess.run(words, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_copy(folder: Path, entry: Path, commit: str) -> Path:
    copy, patch = folder / "copy", entry.resolve() / "code.patch"
    output_of("git", "clone", "-q", str(ROOT), str(copy))
    output_of("git", "checkout", "-q", commit, cwd=copy)
    if patch.exists():
        output_of("git", "apply", str(patch), cwd=copy)
    return copy


def train(copy: Path, entry: Path, text: Path | None) -> float:
    words = [sys.executable, "train.py", str(entry.resolve() / "config.yaml"), "run_dir=out"]
    if text:
        shutil.copy(text, copy / "tinyshakespeare.txt")
        words.append("data.path=tinyshakespeare.txt")
    began = time.monotonic()
    wait_for_success(Job(words, copy / "out", cwd=copy))
    return time.monotonic() - began


def breaches(entry: Path) -> list[str]:
    about, run = json.loads((entry / "entry.json").read_text()), read_history(entry)
    config = flatten(to_dict(build(read_file(str(entry / "config.yaml")))))
    losses = read_metric(entry, "val/loss")
    (limit, device, count), steps = TRACKS[about["track"]], config["trainer.max_steps"]
    found = [f"the rules say {key}={value}" for key, value in RULES.items() if config.get(key) != value]
    if losses.get(steps) != about["val_loss"]:
        found.append(f"val/loss at step {steps} is {losses.get(steps)} in metrics.jsonl")
    if not about["val_loss"] <= limit:
        found.append(f"{about['val_loss']} is above {limit}")
    if run["weights_sha256"] != about["weights_sha256"]:
        found.append("the SHA-256 of the weights in entry.json is not that of run.json")
    if (run["inputs"]["software"]["device_type"], about["count"]) != (device, count):
        found.append(f"the track is for {count} of {device}")
    return found


def make_entry(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    name, commit = f"{options.track}-{options.name}", output_of("git", "rev-parse", "HEAD").strip()
    target = ROOT / "benchmarks/speedrun" / name
    if target.exists():
        raise SystemExit(f"error: {target} exists: choose another NAME, or remove it")
    words = [sys.executable, "train.py", str(options.config.resolve()), *options.settings, "--print_config"]
    with work_folder() as folder:
        entry = folder / name
        entry.mkdir()
        if patch := output_of("git", "diff", "HEAD"):
            (entry / "code.patch").write_text(patch)
        copy = make_copy(folder, entry, commit)
        (entry / "config.yaml").write_text(output_of(*words, cwd=copy))
        seconds = train(copy, entry, options.text)
        for record in ("run.json", "metrics.jsonl"):
            shutil.copy(copy / "out" / record, entry)
        about = describe(entry, options.track, commit, seconds)
        (entry / "entry.json").write_text(json.dumps(about, indent=1) + "\n")
        shutil.copytree(entry, target)
    said = f"{target.relative_to(ROOT)}: {about['val_loss']:.4f} in {seconds:.0f} s"
    return [said], breaches(target)


def describe(entry: Path, track: str, commit: str, seconds: float) -> dict[str, Any]:
    run, cpu = read_history(entry), re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    workers, is_on_gpu = run["generations"][-1]["workers"], track == "gpu"
    return {
        "track": track, "val_loss": [*read_metric(entry, "val/loss").values()][-1],
        "seconds": round(seconds, 1), "weights_sha256": run["weights_sha256"], "commit": commit,
        "cpu": cpu[1] if cpu else "unknown", "count": workers if is_on_gpu else os.cpu_count(),
    }  # fmt: skip


def check_entry(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    about, wrong = json.loads((options.entry / "entry.json").read_text()), breaches(options.entry)
    if wrong:
        return [], wrong
    with work_folder() as folder:
        copy = make_copy(folder, options.entry, about["commit"])
        seconds, run = train(copy, options.entry, options.text), copy / "out"
        found = compare(read_run(str(options.entry)), read_run(str(run)))
        lines = [len((one / "metrics.jsonl").read_text().splitlines()) for one in (options.entry, run)]
        weights, losses = read_history(run)["weights_sha256"], [*read_metric(run, "val/loss").values()]
    said = [f"{seconds:.0f} s; the entry has {about['seconds']} s", *filter(None, found.facts)]
    is_other_machine = any("software." in one and "software.code" not in one for one in found.facts)
    different = [*found.differences]
    if lines[0] != lines[1]:
        different.append(f"{lines[0]} records in metrics.jsonl, and {lines[1]} when trained again")
    if weights == about["weights_sha256"] and not different:
        said.append("same bits")
    elif is_other_machine and lines[0] == lines[1] and abs(losses[-1] - about["val_loss"]) <= SAME_LOSS:
        said.append(f"same loss within {SAME_LOSS}")
    else:
        wrong += different or [f"weights {weights}, the entry says {about['weights_sha256']}"]
    return said, wrong


def main() -> int:
    parser = argument_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    run, check = commands.add_parser("run"), commands.add_parser("check")
    run.add_argument("track", choices=TRACKS)
    run.add_argument("name")
    run.add_argument("config", type=Path)
    run.add_argument("settings", nargs="*")
    run.set_defaults(work=make_entry)
    check.add_argument("entry", type=Path)
    check.set_defaults(work=check_entry)
    for command in (run, check):
        command.add_argument("--text", type=Path)
    options = parser.parse_args()
    said, wrong = options.work(options)
    print("\n".join([*said, *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
