"""Ours beside nanoGPT, in turns, on equal model, data and steps: seconds per step, paired ratios.

    git clone https://github.com/karpathy/nanoGPT && python benchmarks/against.py nanoGPT TEXT

TEXT is tiny Shakespeare as one file. The peer runs from a copy of its checkout, with its own train.py and these of its settings: the README's
CPU run (`--size cpu`: 4 layers, 4 heads, 128 wide, block 64, batch 12) or its shakespeare_char configuration (`--size 10M`). On a CPU it is
measured without its compiler, as its README says; with bfloat16 autocast, which its train.py leaves out there (one line changed in the copy);
and compiled. Ours runs as two torchrun workers of one thread each, and compiled: two such workers, or one worker of two threads. With
`--device cuda` each is one process on the GPU, with bfloat16 and its compiler, and nanoGPT without it too. One row a round, as JSON, then for each
pair of settings the median of the paired ratios, the peer's seconds per step over ours.
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
STEPS = {("cpu", "cpu"): 200, ("cpu", "10M"): 6, ("cuda", "cpu"): 1000, ("cuda", "10M"): 300}
VARIANTS: dict[str, dict[str, list[str]]] = {
    "cpu": {"not compiled": ["--compile=False"], "bfloat16": ["--compile=False", "--dtype=bfloat16"], "compiled": ["--compile=True"]},
    "cuda": {"as it ships": [], "not compiled": ["--compile=False"]},
}
# Workers and settings. The batch of a step is the same for all; how it is cut into micro-batches is ours to choose, as it is theirs.
OURS: dict[tuple[str, str], dict[str, tuple[int, dict[str, Any]]]] = {
    ("cpu", "cpu"): {
        "two workers": (2, {}),
        "two workers, compiled": (2, {"trainer.compile": True}),
        "two threads, compiled": (1, {"trainer.compile": True, "trainer.threads": 2, "trainer.micro_batch_size": 12}),
    },
    ("cpu", "10M"): {"two workers": (2, {}), "two workers, compiled": (2, {"trainer.compile": True})},
    ("cuda", "cpu"): {"compiled": (1, {"trainer.compile": True, "trainer.device": "cuda", "trainer.micro_batch_size": 12})},
    ("cuda", "10M"): {"compiled": (1, {"trainer.compile": True, "trainer.device": "cuda", "trainer.micro_batch_size": 64})},
}


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


def peer_step_s(copy: Path, device: str, size: str, variant: str) -> float:
    """Median seconds per iteration of the second half, by its own clock."""
    program, steps = "train_bfloat16.py" if variant == "bfloat16" else "train.py", STEPS[device, size]
    common = [f"--device={device}", "--eval_iters=1", "--eval_interval=100000", "--log_interval=1", f"--max_iters={steps}"]
    command = [sys.executable, program, "config/train_shakespeare_char.py", *common, *PEER[size], *VARIANTS[device][variant]]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    times = [float(found) / 1e3 for found in re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)]
    if len(times) < steps:
        raise RuntimeError(f"the peer did not train ({variant}):\n{done.stderr[-2000:]}")
    return statistics.median(times[len(times) // 2 :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--size", choices=PEER, default="cpu")
    parser.add_argument("--device", choices=VARIANTS, default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device, size, text = arguments.device, arguments.size, arguments.text.resolve()
    ratios: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "peer")
        prepare(arguments.checkout, text.read_text(), copy)
        settings: dict[str, Any] = SIZES[size] | {"data.path": text, "trainer.max_steps": STEPS[device, size]}
        for number in range(arguments.rounds):
            theirs = {variant: peer_step_s(copy, device, size, variant) for variant in VARIANTS[device]}
            ours = {kind: statistics.median(measure(settings | more, workers, [])["steps"]) for kind, (workers, more) in OURS[device, size].items()}
            for kind, step_s in ours.items():
                for variant, their_s in theirs.items():
                    ratios.setdefault((kind, variant), []).append(their_s / step_s)
            row(
                device=device, size=size, round=number, ours_s={kind: round(value, 5) for kind, value in ours.items()},
                theirs_s={variant: round(value, 5) for variant, value in theirs.items()},
            )  # fmt: skip
    for (kind, variant), paired in ratios.items():
        spread = {"ratio": round(statistics.median(paired), 3), "from": round(min(paired), 3), "to": round(max(paired), 3)}
        row(device=device, size=size, ours=kind, peer=variant, **spread)
    return 0


if __name__ == "__main__":
    sys.exit(main())
