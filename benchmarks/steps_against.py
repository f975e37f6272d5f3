"""Seconds per step of the same run in two ways, in turns: paired ratios.

    git worktree add /tmp/older COMMIT && python benchmarks/steps_against.py /tmp/older    # 10 minutes
    python benchmarks/steps_against.py --reduction [--parallel fsdp]     # exact over fast, 40 minutes
    python benchmarks/steps_against.py --scaling                         # 1, 2 and 4 workers, half an hour
    python benchmarks/steps_against.py --jobs       # two workers over two jobs of one worker, 20 minutes
    python benchmarks/steps_against.py --nanogpt CHECKOUT TEXT --sizes cpu           # 15 minutes
    python benchmarks/steps_against.py /tmp/older --sizes default --rounds 1         # a minute

Runs have two workers under torchrun unless said otherwise. Needs two cores that nobody else uses. Prints a
row per round, as JSON, then the median and the range of the paired ratios:

CHECKOUT      our time / the other checkout's time
--reduction   time with exact reduction / time with fast reduction; for ddp, also time with ExactHook / fast
--nanogpt     nanoGPT's time / our time; TEXT is tiny Shakespeare as one file
--scaling     `efficiency`: tokens/s of W workers / (W times tokens/s of one worker with exact reduction)
--jobs        `efficiency`: tokens/s / tokens/s of two jobs at once (each: one worker, half the batch)

Size `cpu` has the settings of the CPU run in nanoGPT's README, `10M` those of its shakespeare_char. Exit code
1 if --scaling finds less than 0.95 for two workers with exact reduction at 10M, or 0.92 at another size.
"""

import argparse
import functools
import itertools
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from support.shards import write_nanogpt

from mingpt.config import TrainerConfig
from mingpt.tools.jobs import clean_environment

CPU = {
    "model.arch": "gpt2", "model.n_layer": 4, "model.n_head": 4, "model.n_embd": 128, "data.block_size": 64,
    "model.dropout": 0.0, "trainer.batch_size": 12, "trainer.micro_batch_size": 6, "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.001, "trainer.max_steps": 200,
}  # fmt: skip
BIG = {
    "model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "model.dropout": 0.2,
    "data.block_size": 256, "trainer.batch_size": 64, "trainer.micro_batch_size": 8,
    "optimizer.name": "adamw", "optimizer.learning_rate": 0.001, "trainer.max_steps": 6,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {"default": {"trainer.max_steps": 60}, "cpu": CPU, "10M": BIG}
EFFICIENCY, EFFICIENCY_OF_10M = 0.92, 0.95
# Settings that have the same names in nanoGPT.
SAME_NAMES = ("block_size", "batch_size", "n_layer", "n_head", "n_embd", "dropout")
PEER_VARIANTS = {
    "not compiled": ["--compile=False"],
    "same model": ["--compile=False", "--bias=True"],
    "bfloat16": ["--compile=False", "--dtype=bfloat16"],
    "compiled": ["--compile=True"],
}
# Workers and settings. The batch of a step is the same for all; its micro-batches are each program's choice.
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "two workers": (2, {}),
    "two workers, compiled": (2, {"trainer.compile": True}),
    "two threads, compiled": (1, {"trainer.compile": True, "trainer.threads": 2}),
}
HOOK = "import common; from support import hooked_ddp as h; h.STRATEGIES['ddp', 'fast'] = h.HookedDDP"


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.is_good = folder, itertools.count(1), True

    def step_s(self, settings: common.Settings, workers: int = 2, **options: Any) -> float:
        run_dir = self.folder / f"run{next(self.runs)}"
        log_every = max(1, settings["trainer.max_steps"] // 20)
        own = {**settings, "trainer.device": "cpu", "trainer.log_every": log_every, "trainer.timeout_s": 300}
        common.train(run_dir, common.STEPS_ALONE | own, workers=workers, **options)
        manifest = json.loads(max(run_dir.glob("snapshots/step_*.json")).read_text())
        if settings.get("trainer.compile") and not manifest["software"]["compiled"]:
            raise RuntimeError(f"the compiler failed:\n{Path(f'{run_dir}.err').read_text()[-3000:]}")
        return common.median_metric(run_dir) or 0.0


def against_checkout(bench: Bench, size: str, arguments: argparse.Namespace) -> None:
    step_s = functools.partial(bench.step_s, SIZES[size])
    theirs_s = functools.partial(step_s, checkout=arguments.checkout.resolve())
    found = common.measure_in_turns({"ours_s": step_s, "theirs_s": theirs_s}, arguments.rounds, size=size)
    common.row(size=size, **common.median_and_spread(common.paired(found, "ours_s", "theirs_s"), 4))


def exact_over_fast(bench: Bench, size: str, arguments: argparse.Namespace) -> None:
    settings = SIZES[size] | {"trainer.parallel": arguments.parallel, "trainer.replay_every": 0}
    variants = {
        reduction: functools.partial(bench.step_s, settings | {"trainer.reduction": reduction})
        for reduction in ("exact", "fast")
    }
    if arguments.parallel == "ddp":  # the hook in place of DDP's own all-reduce
        program = common.changed_program(bench.folder, HOOK)
        variants["hook"] = functools.partial(variants["fast"], program=program)
    about = {"parallel": arguments.parallel, "size": size}
    found = common.measure_in_turns(variants, arguments.rounds, **about)
    for over in sorted({*variants} - {"fast"}):
        common.row(**about, over=over, **common.median_and_spread(common.paired(found, over, "fast"), 4))


def scaling(bench: Bench, size: str, arguments: argparse.Namespace) -> None:
    # A job with one worker wraps its model in DistributedDataParallel only with fast reduction. So the row
    # with `reduction` "fast" and `workers` 1 shows what the wrapper costs.
    variants = {}
    for workers, reduction in itertools.product((1, 2, 4), ("exact", "fast")):
        settings = SIZES[size] | {"trainer.reduction": reduction}
        variants[f"{reduction} {workers}"] = functools.partial(bench.step_s, settings, workers)
    found = common.measure_in_turns(variants, arguments.rounds, size=size)
    for variant in variants:
        reduction, count = variant.split()
        efficiencies = [ratio / int(count) for ratio in common.paired(found, "exact 1", variant)]
        job = {"size": size, "reduction": reduction, "workers": int(count), "cores": os.cpu_count()}
        common.row(**job, **common.median_and_spread(efficiencies, name="efficiency"))
        if variant == "exact 2":
            least = EFFICIENCY_OF_10M if size == "10M" else EFFICIENCY
            bench.is_good &= statistics.median(efficiencies) >= least


def beside_two_jobs(bench: Bench, size: str, arguments: argparse.Namespace) -> None:
    """Measure the cost of the exchange: two jobs at once also share the memory bus, but exchange nothing."""

    def two_jobs_s() -> float:
        batch_size = SIZES[size].get("trainer.batch_size", TrainerConfig().batch_size)
        settings = SIZES[size] | {"trainer.batch_size": batch_size // 2}
        with ThreadPoolExecutor(2) as pool:
            return statistics.fmean(pool.map(lambda _: bench.step_s(settings, 1), range(2)))

    two_workers_s = functools.partial(bench.step_s, SIZES[size])
    variants: common.Variants = {"two workers": two_workers_s, "two jobs": two_jobs_s}
    found = common.measure_in_turns(variants, arguments.rounds, size=size)
    ratios = common.paired(found, "two jobs", "two workers")
    common.row(size=size, **common.median_and_spread(ratios, name="efficiency"))


def copy_peer(checkout: Path, text: str, copy: Path) -> None:
    shutil.copytree(checkout, copy)
    folder = copy / "data" / "shakespeare_char"
    characters, split = sorted(set(text)), int(0.9 * len(text))
    number_of = {character: number for number, character in enumerate(characters)}
    for name, part in (("train", text[:split]), ("val", text[split:])):
        write_nanogpt(folder / f"{name}.bin", [number_of[character] for character in part])
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": number_of}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    program = (copy / "train.py").read_text()  # which has autocast only on GPUs
    changed = program.replace("ctx = nullcontext() if device_type == 'cpu' else ", "ctx = ")
    assert changed != program, "this train.py is not the one that the change was made for"
    (copy / "train_bfloat16.py").write_text(changed)
    tanh = "import functools, torch\ntorch.nn.GELU = functools.partial(torch.nn.GELU, approximate='tanh')\n"
    (copy / "train_same_model.py").write_text(tanh + program)


def peer_step_s(
    copy: Path, size: str, variant: str, device: str = "cpu", steps: int = 0, timeout_s: float | None = None
) -> float:
    own_program = f"train_{variant.replace(' ', '_')}.py"
    program = own_program if (copy / own_program).exists() else "train.py"
    steps = steps or SIZES[size]["trainer.max_steps"]
    evaluation = ["--eval_iters=1", "--eval_interval=100000", "--log_interval=1", f"--max_iters={steps}"]
    values = {name.partition(".")[2]: value for name, value in SIZES[size].items()}
    given = [f"--device={device}", *evaluation, *PEER_VARIANTS[variant]]
    given += [f"--{name}={values[name]}" for name in SAME_NAMES]
    command = [sys.executable, program, "config/train_shakespeare_char.py", *given]
    done = subprocess.run(
        command, cwd=copy, env=clean_environment(), capture_output=True, text=True, timeout=timeout_s
    )
    found = re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)
    times = [float(milliseconds) / 1e3 for milliseconds in found]
    if len(times) < steps:
        raise RuntimeError(f"nanoGPT did not train ({variant}):\n{done.stderr[-2000:]}")
    return statistics.median(times[len(times) // 2 :])


def beside_nanogpt(bench: Bench, size: str, arguments: argparse.Namespace) -> None:
    checkout, text = map(Path, arguments.nanogpt)
    copy = bench.folder / f"peer-{size}"
    copy_peer(checkout, text.read_text(), copy)
    variants = {
        f"theirs, {variant}": functools.partial(peer_step_s, copy, size, variant) for variant in PEER_VARIANTS
    }
    for kind, (workers, more) in OURS.items():
        settings = SIZES[size] | more | {"data.path": text.resolve(), "trainer.dtype": arguments.dtype}
        if workers == 1:
            settings["trainer.micro_batch_size"] = settings["trainer.batch_size"]
        variants[f"ours, {kind}"] = functools.partial(bench.step_s, settings, workers)
    found = common.measure_in_turns(variants, arguments.rounds, size=size)
    for kind in OURS:
        for variant in PEER_VARIANTS:
            ratios = common.paired(found, f"theirs, {variant}", f"ours, {kind}")
            common.row(size=size, ours=kind, peer=variant, **common.median_and_spread(ratios))


def main() -> int:
    parser = common.argument_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("checkout", type=Path, nargs="?")
    options = {"--reduction": exact_over_fast, "--scaling": scaling, "--jobs": beside_two_jobs}
    for option, function in options.items():
        what.add_argument(option, dest="measure", action="store_const", const=function)
    what.add_argument("--nanogpt", nargs=2, metavar=("CHECKOUT", "TEXT"))
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="of --reduction")
    parser.add_argument("--dtype", default="auto", help="trainer.dtype of ours beside nanoGPT")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default and cpu, or 10M in place of cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    measure, sizes = arguments.measure, ["default", "10M"]
    if arguments.checkout:
        measure, sizes = against_checkout, ["default", "cpu"]
    elif arguments.nanogpt:
        measure, sizes = beside_nanogpt, ["cpu", "10M"]
    with common.work_folder() as folder:
        bench = Bench(folder)
        for size in arguments.sizes or sizes:
            measure(bench, size, arguments)
    return 0 if bench.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
