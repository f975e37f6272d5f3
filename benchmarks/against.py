"""Ours beside nanoGPT, in turns, on equal model, data and steps: seconds per step, paired ratios.

    git clone https://github.com/karpathy/nanoGPT && python benchmarks/against.py nanoGPT TEXT

TEXT is tiny Shakespeare as one file. The peer runs from a copy of its checkout, with its own train.py and these of its settings: the README's
CPU run (`--size cpu`: 4 layers, 4 heads, 128 wide, block 64, batch 12) or its shakespeare_char configuration (`--size 10M`). It is measured as
it ships; with bfloat16 autocast, which its train.py leaves out on a CPU (one line changed in the copy); and compiled. Ours runs as two
torchrun workers of one thread each. One row a round, as JSON, then for each of the peer's settings the median of the paired ratios, its
seconds per step over ours.
"""

import argparse
import os
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
from common import row
from throughput import SIZES, measure

PEER = {
    "cpu": ["--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"],
    "10M": ["--block_size=256", "--batch_size=64", "--n_layer=6", "--n_head=6", "--n_embd=384", "--dropout=0.2"],
}
STEPS = {"cpu": 200, "10M": 6}
VARIANTS = {"as it ships": ["--compile=False"], "bfloat16": ["--compile=False", "--dtype=bfloat16"], "compiled": ["--compile=True"]}


def prepare(checkout: Path, text: str, copy: Path) -> None:
    """A copy of the peer with the data as its own prepare.py would leave it, and a second train.py with autocast on the CPU."""
    shutil.copytree(checkout, copy)
    characters = sorted(set(text))
    place = {character: number for number, character in enumerate(characters)}
    split = int(0.9 * len(text))
    for name, part in (("train", text[:split]), ("val", text[split:])):
        np.array([place[character] for character in part], dtype=np.uint16).tofile(copy / "data" / "shakespeare_char" / f"{name}.bin")
    about = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": place}
    (copy / "data" / "shakespeare_char" / "meta.pkl").write_bytes(pickle.dumps(about))
    program = (copy / "train.py").read_text()
    changed = program.replace("ctx = nullcontext() if device_type == 'cpu' else ", "ctx = ")
    assert changed != program, "this train.py is not the one that the change was made for"
    (copy / "train_bfloat16.py").write_text(changed)


def peer_step_s(copy: Path, size: str, variant: str) -> float:
    """Median seconds per iteration of the second half, by its own clock."""
    program = "train_bfloat16.py" if variant == "bfloat16" else "train.py"
    common = ["--device=cpu", "--eval_iters=1", "--eval_interval=100000", "--log_interval=1", f"--max_iters={STEPS[size]}"]
    command = [sys.executable, program, "config/train_shakespeare_char.py", *common, *PEER[size], *VARIANTS[variant]]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    times = [float(found) / 1e3 for found in re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)]
    if len(times) < STEPS[size]:
        raise RuntimeError(f"the peer did not train ({variant}):\n{done.stderr[-2000:]}")
    return statistics.median(times[len(times) // 2 :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--size", choices=PEER, default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {variant: [] for variant in arguments.variants}
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "peer")
        prepare(arguments.checkout, arguments.text.read_text(), copy)
        settings: dict[str, Any] = SIZES[arguments.size] | {"data.path": arguments.text.resolve(), "trainer.max_steps": STEPS[arguments.size]}
        for number in range(arguments.rounds):
            ours = statistics.median(measure(settings, 2, [])["steps"])
            theirs = {variant: peer_step_s(copy, arguments.size, variant) for variant in arguments.variants}
            for variant, step_s in theirs.items():
                ratios[variant].append(step_s / ours)
            row(size=arguments.size, round=number, ours_s=round(ours, 5), theirs_s={variant: round(value, 5) for variant, value in theirs.items()})
    for variant, paired in ratios.items():
        spread = {"ratio": round(statistics.median(paired), 3), "from": round(min(paired), 3), "to": round(max(paired), 3)}
        row(size=arguments.size, peer=variant, **spread)
    return 0


if __name__ == "__main__":
    sys.exit(main())
