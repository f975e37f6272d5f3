"""Ours beside nanoGPT, in turns, on equal model, data and steps: seconds per step, paired ratios.

    git clone https://github.com/karpathy/nanoGPT && python benchmarks/against.py nanoGPT TEXT

TEXT is tiny Shakespeare as one file. nanoGPT runs from a copy of its checkout, with its own train.py and
these of its settings: its README's CPU run (`--size cpu`: 4 layers, 4 heads, 128 wide, block 64, batch 12) or
its shakespeare_char configuration (`--size 10M`). On a CPU it is measured without its compiler, as its README
says; with bfloat16 autocast, which its train.py leaves out there (one line changed in the copy); and
compiled. Ours runs as two torchrun workers of one thread each, and compiled: two such workers, or one worker
of two threads. With `--device cuda` each is one process on the GPU, with bfloat16 and its compiler, and
nanoGPT without it too. One row per round, as JSON, then for each pair of settings the median of the paired
ratios, nanoGPT's seconds per step over ours.
"""

import argparse
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import row, spread
from throughput import SIZES, measure

from mingpt.tools.jobs import clean_environment

PEER = {
    "cpu": [
        "--block_size=64", "--batch_size=12",
        "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0",
    ],
    "10M": [
        "--block_size=256", "--batch_size=64",
        "--n_layer=6", "--n_head=6", "--n_embd=384", "--dropout=0.2",
    ],
}  # fmt: skip
STEPS = {("cpu", "cpu"): 200, ("cpu", "10M"): 6, ("cuda", "cpu"): 1000, ("cuda", "10M"): 300}
VARIANTS: dict[str, dict[str, list[str]]] = {
    "cpu": {
        "not compiled": ["--compile=False"],
        "bfloat16": ["--compile=False", "--dtype=bfloat16"],
        "compiled": ["--compile=True"],
    },
    "cuda": {"as it ships": [], "not compiled": ["--compile=False"]},
}
# Workers and settings. The batch of a step is the same for all; its micro-batches are each program's choice.
COMPILED = {"trainer.compile": True}
ON_GPU = COMPILED | {"trainer.device": "cuda"}
TWO_THREADS = COMPILED | {"trainer.threads": 2, "trainer.micro_batch_size": 12}
OURS: dict[tuple[str, str], dict[str, tuple[int, dict[str, Any]]]] = {
    ("cpu", "cpu"): {
        "two workers": (2, {}),
        "two workers, compiled": (2, COMPILED),
        "two threads, compiled": (1, TWO_THREADS),
    },
    ("cpu", "10M"): {"two workers": (2, {}), "two workers, compiled": (2, COMPILED)},
    ("cuda", "cpu"): {"compiled": (1, ON_GPU | {"trainer.micro_batch_size": 12})},
    ("cuda", "10M"): {"compiled": (1, ON_GPU | {"trainer.micro_batch_size": 64})},
}


def prepare(checkout: Path, text: str, copy: Path) -> None:
    """A copy of nanoGPT with the data as its own prepare.py leaves it.

    Its train_bfloat16.py is a second train.py, with autocast on the CPU.
    """
    shutil.copytree(checkout, copy)
    folder = copy / "data" / "shakespeare_char"
    characters = sorted(set(text))
    number_of = {character: number for number, character in enumerate(characters)}
    split = int(0.9 * len(text))
    for name, part in (("train", text[:split]), ("val", text[split:])):
        tokens = np.array([number_of[character] for character in part], dtype=np.uint16)
        tokens.tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": number_of}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    program = (copy / "train.py").read_text()
    changed = program.replace("ctx = nullcontext() if device_type == 'cpu' else ", "ctx = ")
    assert changed != program, "this train.py is not the one that the change was made for"
    (copy / "train_bfloat16.py").write_text(changed)


def peer_step_s(copy: Path, device: str, size: str, variant: str) -> float:
    """Median seconds per iteration of the second half, by nanoGPT's own clock."""
    program, steps = "train_bfloat16.py" if variant == "bfloat16" else "train.py", STEPS[device, size]
    evaluation = ["--eval_iters=1", "--eval_interval=100000", "--log_interval=1", f"--max_iters={steps}"]
    settings = [f"--device={device}", *evaluation, *PEER[size], *VARIANTS[device][variant]]
    command = [sys.executable, program, "config/train_shakespeare_char.py", *settings]
    done = subprocess.run(command, cwd=copy, env=clean_environment(), capture_output=True, text=True)
    found = re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)
    times = [float(milliseconds) / 1e3 for milliseconds in found]
    if len(times) < steps:
        raise RuntimeError(f"nanoGPT did not train ({variant}):\n{done.stderr[-2000:]}")
    return statistics.median(times[len(times) // 2 :])


def our_step_s(settings: dict[str, Any], workers: int) -> float:
    """Median seconds per step after the first quarter."""
    return statistics.median(measure(settings, workers, [])["steps"])


def rounded(times: dict[str, float]) -> dict[str, float]:
    return {kind: round(value, 5) for kind, value in times.items()}


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--size", choices=PEER, default="cpu")
    parser.add_argument("--device", choices=VARIANTS, default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device, size, text = arguments.device, arguments.size, arguments.text.resolve()
    settings: dict[str, Any] = SIZES[size] | {"data.path": text, "trainer.max_steps": STEPS[device, size]}
    ratios: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "peer")
        prepare(arguments.checkout, text.read_text(), copy)
        for number in range(arguments.rounds):
            theirs = {variant: peer_step_s(copy, device, size, variant) for variant in VARIANTS[device]}
            ours = {
                kind: our_step_s(settings | more, workers)
                for kind, (workers, more) in OURS[device, size].items()
            }
            for kind, our_s in ours.items():
                for variant, their_s in theirs.items():
                    ratios.setdefault((kind, variant), []).append(their_s / our_s)
            row(device=device, size=size, round=number, ours_s=rounded(ours), theirs_s=rounded(theirs))
    for (kind, variant), paired in ratios.items():
        median = round(statistics.median(paired), 3)
        row(device=device, size=size, ours=kind, peer=variant, ratio=median, **spread(paired, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
