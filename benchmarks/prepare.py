"""`python -m mingpt prepare` beside the tokenizers package alone, in turns; then killed half way.

    python benchmarks/prepare.py [--megabytes 100] [--rounds 5]

The text: lines of Python's standard library and of data/input.txt, in an order drawn from a seed. Its BPE of
4096 tokens is trained before, which is timed apart: `train_bpe` beside the package's `train_from_iterator`
over the same lines. Ours is the whole command, with start, counting, writing and checksums; the package's is
`encode_batch` of the lines in batches of 10,000, without reading, and nothing is written. Rows as JSON. Exit
code 1 unless the median of the paired ratios is at most 1.3, peak memory at most 1 GB, and a killed command
that goes on leaves the same bytes.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import row, spread

from mingpt.tools.jobs import ROOT, clean_environment

MAX_RATIO, MAX_BYTES = 1.3, 10**9
SHARD_TOKENS = 4_000_000
LINES_AT_ONCE = 10_000


def make_text(path: Path, size: int) -> None:
    """About `size` bytes."""
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


def read_lines(path: Path) -> list[str]:
    return path.read_bytes().decode().splitlines(keepends=True)


def child(kind: str, text: Path, tokenizer: Path) -> None:
    """Times one thing in this process and prints a row: encode, train or train_ours."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from mingpt.tools.prepare import Options
    from mingpt.tools.prepare.documents import InputStats, Split, find_inputs
    from mingpt.tools.prepare.job import train_bpe

    lines, tokens = read_lines(text), 0
    if kind == "encode":
        package = Tokenizer.from_file(str(tokenizer))
        began = time.perf_counter()
        for first in range(0, len(lines), LINES_AT_ONCE):
            encodings = package.encode_batch(lines[first : first + LINES_AT_ONCE], add_special_tokens=False)
            tokens += sum(map(len, encodings))
    elif kind == "train":
        package = Tokenizer(models.BPE())
        package.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=4095, initial_alphabet=alphabet, show_progress=False)
        began = time.perf_counter()
        package.train_from_iterator(lines[: int(len(lines) * 0.9)], trainer)
    else:
        stats = InputStats(1, text.stat().st_size, sum(map(len, lines)))
        began = time.perf_counter()
        train_bpe(4096, find_inputs([str(text)]), Split(stats, Options().val_fraction))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row(seconds=round(seconds, 2), tokens=tokens, peak_mb=peak // 1000)


def run_child(kind: str, text: Path, tokenizer: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, str(text), str(tokenizer)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def start_prepare(text: Path, out: Path, tokenizer: str) -> subprocess.Popen[bytes]:
    options = ["--tokenizer", tokenizer, "--shard_tokens", str(SHARD_TOKENS)]  # bpe has 4096 tokens
    command = [sys.executable, "-m", "mingpt", "prepare", str(text), "--out", str(out), *options]
    return subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL)


def run_prepare(text: Path, out: Path, tokenizer: str) -> tuple[float, int]:
    """Seconds and peak memory in bytes. Raises RuntimeError if the command fails."""
    began = time.perf_counter()
    process = start_prepare(text, out, tokenizer)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"prepare ended with code {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


def digests(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.iterdir()) if path.name != "prepare.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def is_same_after_a_kill(text: Path, folder: Path, tokenizer: str, whole: dict[str, str]) -> bool:
    """Kill a command when half of the shards are there, go on, and compare. False if it was not killed."""
    out = folder / "killed"
    half = sum(name.endswith(".bin") for name in whole) // 2
    process = start_prepare(text, out, tokenizer)
    while process.poll() is None and len(list(out.glob("*_*.bin"))) < half:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(list(out.glob("*_*.bin")))
    seconds, _ = run_prepare(text, out, tokenizer)
    same = digests(out) == whole
    row(killed_with=kept, of=2 * half, went_on_s=round(seconds, 2), same_bytes=same)
    return same and kept < len(whole) - 2


def rounds_of(text: Path, folder: Path, tokenizer: Path, count: int) -> Iterator[tuple[float, int]]:
    """The ratio and our peak memory of each round."""
    size = text.stat().st_size
    for number in range(count):
        out = folder / f"round-{number}"
        times, alone = (0.0, 0), dict[str, float]()
        for kind in ("ours", "alone")[:: -1 if number % 2 else 1]:
            if kind == "ours":
                times = run_prepare(text, out, str(tokenizer))
            else:
                alone = run_child("encode", text, tokenizer)
        tokens = sum(file["tokens"] for file in json.loads((out / "meta.json").read_bytes())["files"])
        ratio = times[0] / alone["seconds"]
        row(
            round=number,
            megabytes=round(size / 1e6, 1),
            prepare_s=round(times[0], 2),
            encode_batch_s=alone["seconds"],
            ratio=round(ratio, 3),
            tokens_per_s=round(tokens / times[0]),
            peak_mb=times[1] // 10**6,
            package_peak_mb=alone["peak_mb"],
        )
        yield ratio, times[1]


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *paths = arguments.child
        child(kind, *map(Path, paths))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        make_text(text, int(arguments.megabytes * 1e6))
        seconds, peak = run_prepare(text, folder / "trained", "bpe")
        row(prepare_with_training_s=round(seconds, 2), peak_mb=peak // 10**6)
        tokenizer = folder / "trained" / "tokenizer.json"
        found = list(rounds_of(text, folder, tokenizer, arguments.rounds))
        ours, theirs = (run_child(kind, text, tokenizer)["seconds"] for kind in ("train_ours", "train"))
        row(train_s=ours, package_train_s=theirs, ratio=round(ours / theirs, 3))
        same = is_same_after_a_kill(text, folder, str(tokenizer), digests(folder / "round-0"))
    ratios, peak = [ratio for ratio, _ in found], max(peak, *(size for _, size in found))
    row(
        ratio=round(statistics.median(ratios), 3), **spread(ratios, 3), peak_mb=peak // 10**6, same_bytes=same
    )
    return 0 if statistics.median(ratios) <= MAX_RATIO and peak <= MAX_BYTES and same else 1


if __name__ == "__main__":
    sys.exit(main())
