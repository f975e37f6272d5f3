"""Checks and measurements that need a GPU, in one command. Please send the table; see docs/RESULTS.md.

    python benchmarks/gpu.py                                   # half an hour, the parts of most worth first
    python benchmarks/gpu.py --only tests speed --minutes 8    # some parts; --list names them

Prints each measurement as a row of JSON, and a table after each part; --out keeps both. A measurement that
fails is a row with the reason. `held` is false if something is not as it must be. `host_waits` is the number
of calls per step that wait for the GPU. `seconds` is a duration: from a signal to the next step, of a run's
steps, or of a wait for a save. The program looks for nanoGPT and tinyshakespeare.txt in the folder that has
the project's folder, and one level below both.

With --tiny, and on the stand-in for CUDA in tests/support/cuda, models are tiny. Rows of the stand-in have no
rates and are not kept. Exit code 2 without a GPU, 1 if something did not hold, else 0.
"""

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
from start import seconds_to_recover
from steps_against import BIG, copy_peer, peer_step_s
from support.jobs import Job, last_step, read_history, read_metric
from support.shards import write_nanogpt

from mingpt.base import events
from mingpt.config.cli import build, parse, read_file
from mingpt.data import CharTokenizer
from mingpt.tools.jobs import ROOT
from mingpt.tools.plan import CUDA_BYTES, estimate

STAND_IN = "CUDA stand-in"
LIMIT = 0.02  # of the relative difference between losses in two types, or on two devices
BEST_LOSS = 1.4697  # nanoGPT's with 10.65 M parameters
FACTS = """import json, os, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
card = torch.cuda.get_device_properties(0) if gpus else None
print(json.dumps({"gpus": gpus} | ({"card": card.name, "memory_gb": round(card.total_memory / 2**30),
    "capability": [card.major, card.minor], "torch": torch.__version__, "cuda": torch.version.cuda,
    "nccl": torch.cuda.nccl.version(), "cores": os.cpu_count()} if gpus else {})))
"""
TINY = {
    "data.block_size": 16, "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 32, "trainer.batch_size": 4,
    "trainer.micro_batch_size": 2, "trainer.max_steps": 8, "trainer.eval_windows": 4, "trainer.log_every": 1,
}  # fmt: skip
ALL = {"trainer.device": "cuda", "trainer.timeout_s": 60, "snapshot.keep_best": False}
STEPS = common.STEPS_ALONE | {"trainer.log_every": 5}
# Written down before a GPU ran it: shakespeare_char.yaml's optimizer, at nanoGPT's size and batch.
RECIPE = {
    "model.arch": "modern", "trainer.compile": True, "optimizer.name": "muon",
    "optimizer.learning_rate": 0.01, "optimizer.schedule": "linear", "optimizer.min_lr_fraction": 0.0,
    "optimizer.warmup_steps": 50, "trainer.max_steps": 600, "snapshot.every": 200, "data.val_fraction": 0.1,
}  # fmt: skip
# The settings of each size; --tiny puts those of TINY over them.
SIZES: dict[str, dict[str, Any]] = {
    "default": {"trainer.log_every": 1, "trainer.sample_tokens": 0},
    "char": read_file(str(ROOT / "configs/shakespeare_char.yaml"))
    | {**STEPS, "data.sha256": "null", "trainer.max_steps": 300},
    "10M": BIG | STEPS | {"trainer.micro_batch_size": 64, "trainer.max_steps": 200},
    "recipe": BIG | STEPS | {"trainer.micro_batch_size": 64} | RECIPE,
    "124M": read_file(str(ROOT / "configs/gpt2.yaml"))
    | {**STEPS, "trainer.batch_size": 256, "trainer.micro_batch_size": 32}
    | {"trainer.max_steps": 20, "trainer.log_every": 1},
}
PROFILED = (2, 5)  # completed steps between which host waits are counted, before the steps that are timed
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
DEVICE, CODE = "device.json", "import gpu; gpu.observe(sys.argv[1:])"
Row = dict[str, Any]
NONE: Row = {}


class LeftOut(Exception):
    """A measurement cannot be made here; the text says why."""


class Bench:
    def __init__(self, folder: Path, facts: Row, is_tiny: bool) -> None:
        self.folder, self.facts, self.is_tiny, self.deadline = folder, facts, is_tiny, 0.0
        self.jobs, self.losses, self.undisturbed = list[Job](), list[float](), dict[str, Path]()
        self.text = find_beside("tinyshakespeare.txt", "data/tinyshakespeare.txt")
        (folder / "tokens").mkdir()
        for name, count in (("train", 10**5 if is_tiny else 10**7), ("val", 10**5)):
            tokens = 50257 * np.random.default_rng(0).random(count) ** 4  # small numbers are frequent
            write_nanogpt(folder / "tokens" / f"{name}.bin", tokens)
        characters = CharTokenizer("".join(map(chr, range(50257))))
        (folder / "tokens" / "tokenizer.json").write_bytes(characters.to_bytes())

    def left_s(self) -> float:
        left_s = self.deadline - time.monotonic()
        if left_s < 1:
            raise LeftOut("no time is left for it in this part")
        return left_s

    def settings(self, size: str, more: Row) -> Row:
        data = self.folder / "tokens" if size == "124M" else self.text or ROOT / "data/input.txt"
        small = {"trainer.micro_batch_size": 4} if size == "124M" and self.facts["memory_gb"] < 40 else {}
        return SIZES[size] | ALL | {"data.path": str(data)} | small | (TINY if self.is_tiny else {}) | more

    def start(self, run_dir: Path, settings: Row, workers: int = 1) -> Job:
        program = common.changed_program(self.folder, CODE)
        self.jobs.append(common.start(run_dir, settings, workers=workers, restarts=3, program=program))
        return self.jobs[-1]

    def train(self, size: str, more: Row = NONE) -> Path:
        run_dir = self.folder / f"run{len(self.jobs)}"
        common.wait_for_success(self.start(run_dir, self.settings(size, more)), self.left_s())
        return run_dir

    def once(self, size: str, more: Row) -> Path:
        key = json.dumps([size, more])
        self.undisturbed[key] = self.undisturbed.get(key) or self.train(size, more)
        return self.undisturbed[key]


def find_beside(*names: str) -> Path | None:
    places = (ROOT.parent, *ROOT.parent.iterdir(), *ROOT.iterdir())
    return next((place / name for place in places for name in names if (place / name).exists()), None)


def figures(run_dir: Path) -> Row:
    rate, share = (common.median_metric(run_dir, name) for name in ("tokens_per_s", "mfu"))
    failed = [line for line in Path(f"{run_dir}.err").read_text().splitlines() if " failed (" in line]
    row = {"held": not failed, "tokens_per_s": rate, "share_of_peak": share, "failed": failed}
    return row | json.loads((run_dir / DEVICE).read_text())


def speed(bench: Bench, size: str, more: Row) -> Row:
    return figures(bench.train(size, more))


def same_hash(bench: Bench, how: str = "", size: str = "default", workers: int = 1, more: Row = NONE) -> Row:
    """Train a run that `how` disturbs: "" nothing, "STOP" a file STOP, or a signal."""
    if workers > bench.facts["gpus"]:
        raise LeftOut("NCCL refuses two workers on one card, and gloo does not train on GPUs")
    settings, runs = bench.settings(size, more), [bench.once(size, more)]
    step, row = int(settings.get("trainer.max_steps", 340)) // 3, Row()
    runs.append(bench.folder / f"run{len(bench.jobs)}")
    job = bench.start(runs[1], settings, workers)
    if how == "STOP":
        job.wait_until(lambda: last_step(runs[1]) >= step, bench.left_s())
        (runs[1] / "STOP").touch()
        common.wait_for_success(job, bench.left_s())
        job = bench.start(runs[1], settings, workers)
    elif how:
        row["import_torch_s"] = common.seconds_to_import_torch()
        rng, number = random.Random(step), signal.Signals[how]
        row["seconds"] = seconds_to_recover(job, runs[1], step, rng, row["import_torch_s"], number)
    common.wait_for_success(job, bench.left_s())
    hashes, generations = [common.short_hash(run) for run in runs], read_history(runs[1])["generations"]
    row |= {"ends": [entry["end"] for entry in generations], "start_s": generations[-1]["phases"]["start_s"]}
    return {"held": hashes[0] == hashes[1] != "none", "hash": hashes, **row}


def beside(bench: Bench, ours: Row, theirs: Row, size: str = "default", metric: str = "train/loss") -> Row:
    one, other = (read_metric(bench.once(size, more), metric) for more in (ours, theirs))
    worst = max(abs(one[step] / other[step] - 1) for step in other)
    return {"held": worst <= LIMIT, "metric": metric, "worst": worst, "records": len(other)}


def beside_nanogpt(bench: Bench) -> Row:
    """In the row, `ratio` is nanoGPT's time per step divided by ours."""
    checkout = find_beside("nanoGPT")
    if checkout is None or bench.is_tiny:
        raise LeftOut("no nanoGPT beside this folder" if checkout is None else "it has no tiny size here")
    steps, tokens, copy = SIZES["10M"]["trainer.max_steps"], 64 * 256, bench.folder / "nanoGPT"
    copy_peer(checkout, (bench.text or ROOT / "data/input.txt").read_text(), copy)
    variants = {
        "theirs": lambda: peer_step_s(copy, "10M", "compiled", "cuda", steps, bench.left_s()),
        "ours": lambda: common.median_metric(bench.train("10M", COMPILED), "step_s") or 0.0,
    }
    found = common.measure_in_turns(variants, 3)
    rates = {name: round(tokens / statistics.median(times)) for name, times in found.items()}
    return {"tokens_per_s": rates, **common.median_and_spread(common.paired(found, *variants))}


def recipe(bench: Bench, seed: int) -> Row:
    run_dir = bench.train("recipe", {"seed": seed})
    bench.losses += list(read_metric(run_dir, "val/loss").values())[-1:]
    last = read_history(run_dir)["generations"][-1]
    seconds = last["seconds"] - last["phases"]["evaluation_s"] - last["phases"]["snapshot_wait_s"]
    losses = {"val_loss": bench.losses[-1], "mean": statistics.fmean(bench.losses)}
    is_comparable = bench.text is not None and not bench.is_tiny
    held = {"held": bench.losses[-1] <= BEST_LOSS if is_comparable else None}
    return {**figures(run_dir), **held, "seconds": seconds, **losses, "text": str(bench.text)}


def large(bench: Bench, more: Row) -> Row:
    """In the row, `over_plan` is torch's peak memory divided by the planned memory."""
    row, config = speed(bench, "124M", more), build(bench.settings("124M", more))
    planned = estimate(config, 50257, 1, on_cpu=False, element=2)["total"] - CUDA_BYTES
    return row | {"over_plan": row["peak_bytes"] / planned}


def saves(bench: Bench, memory_every: int) -> Row:
    more = {"snapshot.every": 5, "snapshot.memory_every": memory_every}
    row = speed(bench, "124M", PLAIN | more)
    return row | {"seconds": {kind: statistics.median(times) for kind, times in row.pop("saves").items()}}


def sanitized(bench: Bench, *prefix: str, **env: str) -> Row:
    if prefix and shutil.which(prefix[0]) is None:
        raise LeftOut(f"no {prefix[0]} on PATH")
    run_dir, more = bench.folder / f"run{len(bench.jobs)}", TINY | {"trainer.max_steps": 10}
    words = common.arguments_of(bench.settings("default", more) | {"run_dir": run_dir, "trainer.workers": 1})
    job = Job([*prefix, sys.executable, "train.py", *words], run_dir, cwd=ROOT, **env)
    bench.jobs.append(job)
    code = job.wait(bench.left_s())
    found = [line for line in (job.err() + job.out()).splitlines() if re.search("data race|ERROR SUM", line)]
    return {"held": code == 0 and not any("race" in line for line in found), "code": code, "found": found[:3]}


def sampling(bench: Bench) -> Row:
    run_dir, lengths, rates = bench.once("124M", PLAIN), (4, 12) if bench.is_tiny else (16, 272), Row()
    for samples in (1, 16):
        times = []
        for length in lengths:
            options = ["--prompt=a", f"--tokens={length}", f"--num_samples={samples}"]
            command = [sys.executable, "sample.py", str(run_dir), "--dtype=bfloat16", *options]
            began = time.monotonic()
            common.wait_for_success(Job(command, bench.folder / "sample"), bench.left_s())
            times.append(time.monotonic() - began)
        rates[str(samples)] = round(samples * (lengths[1] - lengths[0]) / (times[1] - times[0]))
    return {"tokens_per_s": rates}


PLAIN, COMPILED = Row({"trainer.compile": False}), Row({"trainer.compile": True})
FSDP, FAST = Row({"trainer.parallel": "fsdp"}), COMPILED | {"trainer.reduction": "fast"}
FLOAT, HALF, BRAIN = (Row({"trainer.dtype": dtype}) for dtype in ("float32", "float16", "bfloat16"))
FEW = {**PLAIN, "trainer.max_steps": 10, "trainer.eval_windows": 8}
MORE, ON_CPU = FEW | {"trainer.max_steps": 40, "trainer.log_every": 1}, FLOAT | {"trainer.device": "cpu"}
KINDS: dict[str, Row] = {
    f"{arch}, {name} beside CPU": {"model.arch": arch, "optimizer.name": name} | FEW | FLOAT
    for arch in ("gpt2", "modern") for name in ("adamw", "muon")
}  # fmt: skip
bind = functools.partial
# {part: (minutes, what it is about, {row: measurement})}, by worth
PARTS: dict[str, tuple[int, str, dict[str, Callable[[Bench], Row]]]] = {
    "tests": (6, "model, loss and optimizers beside the CPU; whole jobs and their hashes", {
        "same run twice": same_hash, "one kill": bind(same_hash, how="SIGKILL"),
        "one stop": bind(same_hash, how="STOP"), "2 workers": bind(same_hash, workers=2),
        "2 workers, fsdp": bind(same_hash, workers=2, more=FSDP), "float16 twice": bind(same_hash, more=HALF),
        "float16 beside bfloat16": bind(beside, ours=HALF, theirs=BRAIN, metric="val/loss"),
        **{what: bind(beside, ours=more, theirs=more | ON_CPU) for what, more in KINDS.items()},
    }),
    "speed": (4, "configs/shakespeare_char.yaml: plain and compiled; its losses on the CPU", {
        "plain": bind(speed, size="char", more=PLAIN), "compiled": bind(speed, size="char", more=COMPILED),
        "losses beside CPU": bind(beside, size="char", ours=MORE, theirs=MORE | ON_CPU),
    }),
    "recovery": (4, "a signal to the next step: killed, frozen, with a sibling under NCCL", {
        "killed, plain": bind(same_hash, how="SIGKILL", more=PLAIN),
        "killed, compiled": bind(same_hash, how="SIGKILL", more=COMPILED),
        "killed, of 2 workers": bind(same_hash, how="SIGKILL", workers=2),
        "frozen, of 2 workers": bind(same_hash, how="SIGSTOP", workers=2, more={"trainer.timeout_s": 10}),
    }),
    "nanogpt": (6, "10.65 M parameters: steps beside nanoGPT's, and the loss of a recipe with five seeds", {
        "steps beside nanoGPT": beside_nanogpt,
        **{f"recipe, seed {seed}": bind(recipe, seed=seed) for seed in range(1, 6)},
    }),
    "large": (5, "GPT-2 with 124 M parameters: speed, and memory beside the plan's", {
        "ddp, compiled": bind(large, more=COMPILED), "ddp, plain": bind(large, more=PLAIN),
        "fsdp, compiled": bind(large, more=COMPILED | FSDP),
    }),
    "snapshots": (5, "a save's and a resume's cost at 124 M; exact over fast; sanitizers", {
        "saves, memory on": bind(saves, memory_every=2), "saves, memory off": bind(saves, memory_every=0),
        "fast, not exact": bind(speed, size="124M", more=FAST),
        "torch's sanitizer": bind(sanitized, TORCH_CUDA_SANITIZER="1"),
        "compute-sanitizer": lambda bench: sanitized(bench, "compute-sanitizer", "--error-exitcode=99"),
        "killed at 124 M": bind(same_hash, how="SIGKILL", size="124M", more=PLAIN),
    }),
    "sampling": (2, "tokens per second at 124 M with the cache", {"1 and 16 samples": sampling}),
}  # fmt: skip
COLUMNS = {
    "on": 11, "part": 11, "what": 26, "held": 6, "tokens_per_s": 15, "share_of_peak": 15, "host_waits": 12,
    "seconds": 12,
}  # fmt: skip


class Report:
    def __init__(self, machine: str, out: Path | None) -> None:
        self.machine, self.out, self.rows = machine, out, list[Row]()

    def add(self, part: str, what: str, values: Row) -> None:
        row: Row = {"on": self.machine, "part": part, "what": what, **values}
        if self.machine == "stand-in":
            row |= dict.fromkeys(row.keys() & {"tokens_per_s", "share_of_peak"}, "-")
        self.rows.append(row)
        common.row(**row)
        if self.out:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in self.rows))
            (self.out / "table.txt").write_text(self.table())

    def table(self) -> str:
        text = "".join(name.ljust(width) for name, width in COLUMNS.items()) + "more\n"
        for row in self.rows:
            cells = [spelled(row.get(name)).ljust(width - 1) + " " for name, width in COLUMNS.items()]
            more = (f"{key} {spelled(value)}" for key, value in row.items() if key not in COLUMNS)
            text += "".join(cells) + "; ".join(more) + "\n"
        return text


def spelled(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {spelled(one)}" for key, one in value.items())
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "NO"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_part(name: str, bench: Bench, report: Report, factor: float, left_s: float) -> None:
    minutes, _, checks = PARTS[name]
    bench.deadline = time.monotonic() + min(60 * factor * minutes, left_s)
    if left_s < 30 * factor * minutes:
        report.add(name, "all", {"reason": f"left out: {left_s:.0f} s are left and do not suffice"})
        return
    for what, check in checks.items():
        try:
            with contextlib.redirect_stdout(sys.stderr):  # rows of other programs
                row = check(bench)
        except LeftOut as left_out:
            row = {"reason": f"left out: {left_out}"}
        except Exception as error:  # a measurement that fails must not keep back the next ones
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            told = next((line for line in lines if line.startswith("error: ")), lines[-1])
            held = None if time.monotonic() > bench.deadline - 1 else False  # None: the time has run out
            row = {"held": held, "reason": f"{type(error).__name__}: {lines[0]} {told}"[:400]}
        for job in filter(Job.is_running, bench.jobs):
            job.kill()
        report.add(name, what, row)
    print(report.table(), flush=True)


def observe(arguments: list[str]) -> None:
    import torch

    path = Path(parse(arguments).run_dir, DEVICE)
    profile, began = torch.profiler.profile(), dict[str, float]()
    found: Row = {"host_waits": None, "saves": {}}

    def start_step(step: int) -> None:
        if step == PROFILED[0]:
            began["profile"] = time.perf_counter()
            profile.start()

    def end_step(step: int) -> None:
        if step != PROFILED[1] or "profile" not in began:
            return
        profile.stop()
        names, steps = [event.name for event in profile.events()], PROFILED[1] - PROFILED[0]
        calls = {name: round(names.count(name) / steps, 2) for name in WAITS}
        if any(name.startswith("cudaLaunchKernel") for name in names):  # else CUDA's calls are not seen
            pageable = round(sum("Pageable" in name for name in names) / steps, 2)
            found.update(host_waits=sum(calls.values()), calls=calls, pageable_copies=pageable)

    def end_save(kind: str, step: int) -> None:
        found["saves"].setdefault(kind, []).append(round(time.perf_counter() - began["save"], 4))

    def leave(state: Any) -> None:
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(found | {"peak_bytes": torch.cuda.max_memory_allocated()}))

    events.subscribe("save_start", lambda **_: began.update(save=time.perf_counter()))
    events.subscribe("step_start", start_step)
    events.subscribe("step_end", end_step)
    events.subscribe("save_end", end_save)
    events.subscribe("run_end", leave)


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="for all parts (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this program")
    parser.add_argument("--out", type=Path, help="folder (default: benchmarks/results/<date>_gpu)")
    options, began = parser.parse_args(), time.monotonic()
    if options.list:
        print("\n".join(f"{name:10} {minutes} min  {about}" for name, (minutes, about, _) in PARTS.items()))
        return 0
    asked = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True)
    facts: Row = json.loads(asked.stdout.splitlines()[-1]) if asked.returncode == 0 else {"gpus": 0}
    if not facts["gpus"]:
        sys.stderr.write("error: torch sees no CUDA GPU here, and this program measures nothing else\n")
        return 2
    is_stand_in = facts["card"] == STAND_IN
    out = options.out or ROOT / "benchmarks/results" / time.strftime("%Y-%m-%d_gpu")
    report = Report("stand-in" if is_stand_in else facts["card"], None if is_stand_in else out)
    report.add("machine", "facts", facts)
    with common.work_folder() as folder:
        bench = Bench(folder, facts, options.tiny or is_stand_in)
        for name in options.only:
            left_s = 60 * options.minutes - (time.monotonic() - began)
            run_part(name, bench, report, max(1.0, options.minutes / 30), left_s)
    return 1 if any(row.get("held") is False for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
