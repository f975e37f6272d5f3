"""The time of `python -m mingpt prepare`, beside that of the tokenizers package or another checkout.

    python benchmarks/prepare.py                                  # 100 MB, 5 rounds: a quarter of an hour
    python benchmarks/prepare.py --megabytes 50 --against CHECKOUT --format jsonl

The text is random lines of Python's standard library. A BPE tokenizer is trained beforehand. Our time is that
of the whole command. The package's time is that of `encode_batch`, 10,000 lines at a time. Exit code 1 unless
the median paired ratio is at most 1.3 (1.05 with --against) and peak memory at most 1 GB.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

from common import argument_parser, measure_in_turns, median_and_spread, paired, row, work_folder

from mingpt.tools.jobs import ROOT, clean_environment

ALONE = """
import pathlib, sys, time, tokenizers
text, tokenizer = sys.argv[1:]
lines = pathlib.Path(text).read_bytes().decode().splitlines(keepends=True)
package, began = tokenizers.Tokenizer.from_file(tokenizer), time.perf_counter()
for first in range(0, len(lines), 10_000):
    package.encode_batch(lines[first : first + 10_000], add_special_tokens=False)
print(time.perf_counter() - began)
"""


def make_text(path: Path, size: int) -> None:
    """Write about `size` bytes: a text, or documents of 100 lines if the name ends in .jsonl."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line for source in sources for line in source.read_bytes().decode().splitlines(keepends=True)]
    rng, written = random.Random(0), 0
    with open(path, "wb") as file:
        while written < size:
            text = "".join(rng.choices(lines, k=100))
            document = json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text
            written += file.write(document.encode())


def prepare(checkout: Path, text: Path, out: Path, tokenizer: str, peaks: list[int]) -> float:
    """Delete `out`, run `mingpt prepare`, append its peak memory in bytes to `peaks`; return its seconds."""
    shutil.rmtree(out, ignore_errors=True)
    options = ["--out", str(out), "--tokenizer", tokenizer, "--shard_tokens", "1000000"]
    command, began = [sys.executable, "-m", "mingpt", "prepare", str(text), *options], time.perf_counter()
    process = subprocess.Popen(command, cwd=checkout, env=clean_environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"prepare ended with code {process.returncode}")
    peaks.append(usage.ru_maxrss * 1024)
    return time.perf_counter() - began


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=["txt", "jsonl"], default="txt")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    given, peaks = parser.parse_args(), list[int]()
    with work_folder() as folder:
        text, tokenizer, other = folder / f"text.{given.format}", f"{folder}/out0/tokenizer.json", list[int]()
        make_text(text, int(given.megabytes * 1e6))
        row(with_training_s=prepare(ROOT, text, folder / "out0", "bpe", peaks), peak_mb=peaks[0] // 10**6)

        def run_other() -> float:
            if given.against:
                return prepare(given.against, text, folder / "other", tokenizer, other)
            command = [sys.executable, "-c", ALONE, str(text), tokenizer]
            return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

        ours = partial(prepare, ROOT, text, folder / "out", tokenizer, peaks)
        found = measure_in_turns({"prepare_s": ours, "other_s": run_other}, given.rounds, digits=2)
    ratio = median_and_spread(paired(found, "prepare_s", "other_s"))
    row(**ratio, peak_mb=max(peaks) // 10**6, other_peak_mb=max(other, default=0) // 10**6)
    limit = 1.05 if given.against else 1.3
    return int(ratio["ratio"] > limit or max(peaks) > 10**9)


if __name__ == "__main__":
    sys.exit(main())
