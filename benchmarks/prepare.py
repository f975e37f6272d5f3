"""`python -m mingpt prepare` beside the tokenizers package alone, in turns.

    python benchmarks/prepare.py                                  # 100 MB, 5 rounds: a quarter of an hour
    python benchmarks/prepare.py --megabytes 20 --rounds 1        # a minute or two

The text is lines of Python's standard library and of data/input.txt, in an order drawn from a seed. A BPE
tokenizer of 4096 tokens is trained by the command beforehand. Our time is that of the whole command, with
start, counting, writing and checksums; the package's time is that of `encode_batch` on the lines in batches
of 10,000, without reading or writing. Prints rows as JSON. Exit code 1 unless the median of the paired ratios
is at most 1.3 and peak memory at most 1 GB. Wants a core of its own.
"""

import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from common import argument_parser, measure_in_turns, median_and_spread, paired, row, work_folder

from mingpt.tools.jobs import ROOT, clean_environment

MAX_RATIO, MAX_BYTES = 1.3, 10**9
SHARD_TOKENS = 1_000_000
LINES_AT_ONCE = 10_000


def make_text(path: Path, size: int) -> None:
    """Write a text of about `size` bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(source for source in library.rglob("*.py") if "site-packages" not in source.parts)
    texts = [source.read_bytes().decode(errors="ignore") for source in sources]
    lines = "".join([*texts, (ROOT / "data/input.txt").read_text()]).splitlines(keepends=True)
    rng, written = random.Random(0), 0
    with open(path, "wb") as file:
        while written < size:
            rng.shuffle(lines)
            for line in lines:
                written += file.write(line.encode())
                if written >= size:
                    break


def encode_alone(text: Path, tokenizer: Path) -> float:
    """The seconds of the package's own encoding, in its own process."""
    command = [sys.executable, __file__, "--encode", str(text), str(tokenizer)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    return float(done.stdout)


def encode(text: Path, tokenizer: Path) -> None:
    """Encode in this process, and print the seconds."""
    from tokenizers import Tokenizer

    lines, package = text.read_bytes().decode().splitlines(keepends=True), Tokenizer.from_file(str(tokenizer))
    began = time.perf_counter()
    for first in range(0, len(lines), LINES_AT_ONCE):
        package.encode_batch(lines[first : first + LINES_AT_ONCE], add_special_tokens=False)
    print(time.perf_counter() - began)


class Prepare:
    """The command on a text; it records its peak memory in bytes."""

    def __init__(self, text: Path) -> None:
        self.text, self.peak = text, 0

    def run(self, out: Path, tokenizer: str) -> float:
        """Run the command; returns its seconds. Raises RuntimeError if it fails."""
        options = ["--tokenizer", tokenizer, "--shard_tokens", str(SHARD_TOKENS)]  # bpe has 4096 tokens
        command = [sys.executable, "-m", "mingpt", "prepare", str(self.text), "--out", str(out), *options]
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"prepare ended with code {process.returncode}")
        self.peak = max(self.peak, usage.ru_maxrss * 1024)
        return time.perf_counter() - began


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encode", nargs=2, type=Path, help="only print how long the package takes")
    arguments = parser.parse_args()
    if arguments.encode:
        encode(*arguments.encode)
        return 0
    with work_folder() as folder:
        text, out = folder / "text.txt", folder / "out"
        make_text(text, int(arguments.megabytes * 1e6))
        prepare = Prepare(text)
        row(with_training_s=round(prepare.run(folder / "trained", "bpe"), 2), peak_mb=prepare.peak // 10**6)
        tokenizer = folder / "trained" / "tokenizer.json"

        def prepare_again() -> float:
            shutil.rmtree(out, ignore_errors=True)
            return prepare.run(out, str(tokenizer))

        variants = {"prepare_s": prepare_again, "encode_batch_s": lambda: encode_alone(text, tokenizer)}
        found = measure_in_turns(variants, arguments.rounds, digits=2, megabytes=arguments.megabytes)
    ratio = median_and_spread(paired(found, "prepare_s", "encode_batch_s"))
    row(**ratio, peak_mb=prepare.peak // 10**6)
    return 0 if ratio["ratio"] <= MAX_RATIO and prepare.peak <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
