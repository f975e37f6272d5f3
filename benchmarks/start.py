"""The time from the start of the process, or from SIGKILL, to the next step, beside a bare `import torch`.

    python benchmarks/start.py                          # python train.py with one worker, a minute
    python benchmarks/start.py --launch plain           # with two workers; or torchrun
    python benchmarks/start.py --against CHECKOUT       # also the start of another commit of this project
    python benchmarks/start.py --kills 30               # from SIGKILL of a random worker: 5 minutes
    python benchmarks/start.py --kills 1 --steps 30     # half a minute
    python benchmarks/start.py --path                   # what a start calls on rank 0 of two: a minute

Uses the default run, on two cores; starts are without its first evaluation. Prints a row per round or kill,
as JSON, then medians of paired ratios: our time over the other checkout's (with --against), and over the time
to import torch. Exit code 1 unless the last ratio is at most 2.5 for a start, 1.25 after a kill. Runs with
kills must end with the bits of an undisturbed run.
"""

import argparse
import ast
import functools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import common
from support.jobs import Job, last_step, read_history

from mingpt.base import events
from mingpt.tools.jobs import ROOT

SETTINGS = {
    "trainer.eval_at_start": False, "trainer.log_every": 1, "trainer.max_steps": 3,
    "trainer.sample_tokens": 0, "trainer.device": "cpu",
}  # fmt: skip
# {name: (the launch of `common.start`, the number of workers)}
LAUNCHES = {"one": ("plain", 1), "plain": ("plain", 2), "torchrun": ("torchrun", 2)}
KILLS_PER_RUN, IMPORTS, POLL_S = 8, 5, 0.002
MAX_START, MAX_RECOVERY = 2.5, 1.25
PACKAGE = str(ROOT / "mingpt") + os.sep
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single",
    "barrier", "broadcast", "gather", "reduce", "reduce_scatter_tensor", "scatter",
)  # fmt: skip


def seconds_to_first_step(folder: Path, launch: str, checkout: Path) -> float:
    begin, workers = LAUNCHES[launch]
    run_dir, began = folder / f"run{len(list(folder.iterdir()))}", time.monotonic()
    job = common.start(run_dir, SETTINGS, workers=workers, launch=begin, checkout=checkout)
    record = run_dir / "metrics.jsonl"
    while job.is_running() and not (record.exists() and "\n" in record.read_text()):
        time.sleep(POLL_S)
    took = time.monotonic() - began
    common.wait_for_success(job)
    return took


def measure_starts(folder: Path, arguments: argparse.Namespace) -> int:
    first_step = functools.partial(seconds_to_first_step, folder, arguments.launch)
    variants = {"import_torch_s": common.seconds_to_import_torch, "first_step_s": lambda: first_step(ROOT)}
    if arguments.against:
        variants["other_first_step_s"] = lambda: first_step(arguments.against.resolve())
    found = common.measure_in_turns(variants, arguments.rounds, digits=3)
    if arguments.against:
        over_other = common.paired(found, "first_step_s", "other_first_step_s")
        common.row(**common.median_and_spread(over_other, name="ratio_to_other"))
    last = common.median_and_spread(common.paired(found, "first_step_s", "import_torch_s"))
    common.row(**last)
    return 0 if last["ratio"] <= MAX_START else 1


def stamp(run_dir: Path) -> list[tuple[int, int]]:
    """Return a value that changes with a run's records. Reading all records would slow the workers down."""
    files = [(run_dir / name).stat() for name in ("run.json", "metrics.jsonl")]
    return [(file.st_mtime_ns, file.st_size) for file in files]


def seconds_to_recover(
    job: Job, run_dir: Path, step: int, rng: random.Random, import_s: float, signum: int = signal.SIGKILL
) -> float:
    job.wait_until(lambda: last_step(run_dir) >= step, 300)
    time.sleep(rng.uniform(0, 0.2))  # a random moment in a step
    pids, before = job.workers(), len(read_history(run_dir)["generations"])
    if not pids:
        raise RuntimeError(f"no worker was there to be killed around step {step}:\n{job.err()[-3000:]}")
    victim, began = rng.randrange(len(pids)), time.monotonic()
    os.kill(pids[victim], signum)
    seen: list[tuple[int, int]] = []

    def goes_on() -> bool:
        nonlocal seen
        before_reading, seen = seen, stamp(run_dir)
        if seen == before_reading:
            return False
        generations = read_history(run_dir)["generations"]
        return len(generations) > before and last_step(run_dir) > generations[-1]["from_step"]

    job.wait_until(goes_on, 60)
    took = time.monotonic() - began
    last, now = read_history(run_dir)["generations"][-2:]
    times = {"seconds": round(took, 3), "ratio": round(took / import_s, 3)}
    common.row(victim=victim, **times, died_at=last["to_step"], resumed_from=now["from_step"])
    return took


def measure_recoveries(folder: Path, arguments: argparse.Namespace) -> int:
    rng, tally = random.Random(arguments.seed), common.Tally()
    took, ratios = list[float](), list[float]()
    # Each step has a record, so that a completed step is seen.
    settings = {"trainer.log_every": 1, "trainer.max_steps": arguments.steps}
    expected = common.train_undisturbed(folder, settings)
    while len(took) < arguments.kills:
        run_dir = folder / f"run{tally.trials}"
        kills = min(KILLS_PER_RUN, arguments.kills - len(took))
        import_s = statistics.median(common.seconds_to_import_torch() for _ in range(IMPORTS))
        common.row(run=tally.trials, import_torch_s=round(import_s, 3))
        launch = LAUNCHES[arguments.launch][0]
        job = common.start(run_dir, settings, workers=2, restarts=100, launch=launch)
        for step in sorted(rng.sample(range(5, arguments.steps - 10), kills)):
            took.append(seconds_to_recover(job, run_dir, step, rng, import_s))
            ratios.append(took[-1] / import_s)
        tally.add(common.exit_code(job, 600) == 0 and common.short_hash(run_dir) == expected, job)
    last = common.median_and_spread(ratios)
    ordered = sorted(took)
    p95_s = ordered[-(-95 * len(ordered) // 100) - 1]  # the least time that 95 % do not exceed
    seconds = common.median_and_spread(took, name="median") | {"p95": round(p95_s, 3)}
    code = tally.exit_code(kills=len(took), **last, seconds=seconds)
    return code if last["ratio"] <= MAX_RECOVERY else 1


def trace(output: Path) -> None:
    if os.environ["RANK"] != "0":
        return
    import torch.distributed

    entered, called = set[tuple[str, int]](), list[str]()

    def note_call(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            entered.add((code.co_filename, code.co_firstlineno))

    def write(step: int, micro_batch: int) -> None:
        sys.setprofile(None)
        if not output.exists():
            output.write_text(json.dumps({"entered": sorted(entered), "collectives": len(called)}))

    def call(collective: Any, *args: Any, **options: Any) -> Any:
        called.append(collective.__name__)
        return collective(*args, **options)

    for name in COLLECTIVES:
        if hasattr(torch.distributed, name):
            wrapped = functools.partial(call, getattr(torch.distributed, name))
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                setattr(module, name, wrapped)
    events.subscribe("forward_end", write)
    threading.setprofile(note_call)
    sys.setprofile(note_call)


def count_path(folder: Path) -> int:
    settings = {"trainer.compile": False, "snapshot.every": 2, "snapshot.resume": "changed"}
    for start, max_steps in (("fresh", 4), ("resumed", 6)):
        code = f"import pathlib, start; start.trace(pathlib.Path({str(folder / start)!r}))"
        program = common.changed_program(folder, code)
        common.train(folder / "run", settings | SETTINGS, f"trainer.max_steps={max_steps}", program=program)
        found = json.loads((folder / start).read_text())
        lines = [count_lines(Path(path), first) for path, first in found["entered"]]
        files = len({path for (path, _), count in zip(found["entered"], lines, strict=True) if count})
        common.row(
            start=start, lines=sum(lines), functions=sum(map(bool, lines)), files=files,
            collectives=found["collectives"],
        )  # fmt: skip
    return 0


def count_lines(path: Path, first: int) -> int:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if begin == first:
                return node.end_lineno + 1 - begin
    return 0


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--launch", choices=LAUNCHES, help="one for starts, torchrun for kills by default")
    parser.add_argument("--path", action="store_true", help="count functions and collectives of a start")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--steps", type=int, default=340, help="of a run with kills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.launch = arguments.launch or ("torchrun" if arguments.kills else "one")
    with common.work_folder() as folder:
        if arguments.path:
            return count_path(folder)
        if arguments.kills:
            return measure_recoveries(folder, arguments)
        return measure_starts(folder, arguments)


if __name__ == "__main__":
    sys.exit(main())
