"""A snapshot of any size through writer and reader, in parts, in little memory; each flipped bit is found.

    python benchmarks/snapshot_parts.py                 # 10 GB in a folder, then 1 GB in an S3 of moto's

Tensors are made piece by piece and never held as a whole. A row for the folder and one for S3: how fast it
was written (`write_mb_s`), verified and read back, beside the rate of writing and fsyncing the same bytes
without hashing them and of hashing alone, in the same sitting; `of_the_slower` is the first over the lower of
those two. `memory_mb` is how far the peak of resident memory rose above its value before. Then one bit of
each file is flipped in turn. Exit code 1 unless all that is read back is what was written, each flipped bit
is found, and `memory_mb` is at most --max_memory_mb.
"""

import argparse
import contextlib
import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from common import make_manifest, row

from mingpt.base.errors import CorruptSnapshot
from mingpt.snapshot import FileLayout, Snapshot, SnapshotStore, TensorSpec, make_layout
from mingpt.tools.jobs import free_port

CHUNK_BYTES = 16 << 20
COLUMNS = 1024
MB = 1e6
STEP = 30


def specs_of(size: int, tensors: int) -> dict[str, TensorSpec]:
    """So many float32 matrices of `size` bytes together; two thirds are optimizer state."""
    rows = max(1, size // tensors // COLUMNS // 4)
    names = [f"model.h.{number}.weight" for number in range(tensors // 3)]
    names += [f"optimizer.h.{number}.weight.exp_avg" for number in range(tensors - tensors // 3)]
    return {name: TensorSpec(torch.float32, (rows, COLUMNS)) for name in names}


class Source:
    """The bytes of each tensor: 16 MiB of random numbers again and again, but for the first one."""

    def __init__(self, specs: dict[str, TensorSpec]) -> None:
        self.specs = specs
        self.numbers = torch.randn(CHUNK_BYTES // 4, generator=torch.Generator().manual_seed(1))
        self.content = memoryview(self.numbers.view(torch.uint8).numpy())  # type: ignore[arg-type]

    def fill(self, name: str, number: int) -> torch.Tensor:
        """Chunk `number` of a tensor, until the next one is asked for."""
        self.numbers[0] = float(1000 * sorted(self.specs).index(name) + number)
        return self.numbers

    def chunks(self, layout: FileLayout) -> Iterator[memoryview]:
        yield memoryview(layout.header)
        for name in layout.begins:
            for number, begin in enumerate(range(0, self.specs[name].nbytes, CHUNK_BYTES)):
                self.fill(name, number)
                yield self.content[: min(CHUNK_BYTES, self.specs[name].nbytes - begin)]

    def is_equal(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot holds what `chunks` gives, read by ranges."""
        for name in self.specs:
            count = self.specs[name].shape[0]
            step = max(1, CHUNK_BYTES * count // self.specs[name].nbytes)
            for number, begin in enumerate(range(0, count, step)):
                rows = snapshot.read(name, begin, min(begin + step, count))
                if not torch.equal(rows.view(-1), self.fill(name, number)[: rows.numel()]):
                    return False
        return snapshot.entries.keys() == self.specs.keys()


def peak_bytes() -> int:
    """Of this process's resident memory."""
    fields = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(fields.split()[0]) * 1024


def hash_rate(source: Source, size: int) -> float:
    """Bytes per second of SHA-256 alone."""
    digest, began, count = hashlib.sha256(), time.monotonic(), max(1, size // CHUNK_BYTES)
    for _ in range(count):
        digest.update(source.content)
    return count * CHUNK_BYTES / (time.monotonic() - began)


def plain_write_rate(source: Source, folder: str, size: int, part_bytes: int) -> float:
    """Bytes per second of writing and fsyncing files of part_bytes, without hashing."""
    began, paths = time.monotonic(), []
    for begin in range(0, size, part_bytes):
        paths.append(Path(folder, f"plain-{begin}"))
        with open(paths[-1], "wb", buffering=0) as file:
            for _ in range(max(1, min(part_bytes, size - begin) // CHUNK_BYTES)):
                file.write(source.content)
            os.fsync(file.fileno())
    written, took_s = sum(path.stat().st_size for path in paths), time.monotonic() - began
    for path in paths:
        path.unlink()
    return written / took_s


def flip_bit(store: SnapshotStore, name: str, place: int) -> None:
    """Of byte `place` of a file; the same again puts it right."""
    path = store.path(name)
    if store.is_local:
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))
        return
    content = bytearray(store.files.cat_file(path))
    content[place] ^= 4
    store.files.pipe_file(path, bytes(content))


def is_found(store: SnapshotStore) -> bool:
    """Whether the snapshot is known to be damaged."""
    try:
        store.read(STEP)
    except CorruptSnapshot:
        return True
    return False


def measure(url: str, size: int, part_bytes: int, tensors: int, max_memory_mb: float) -> bool:
    """Prints a row; whether all is as it should be."""
    source = Source(specs_of(size, tensors))
    store = SnapshotStore(url)
    store.prepare()
    layouts = make_layout(source.specs, STEP, part_bytes)
    size = sum(layout.size for layout in layouts)
    hashing = hash_rate(source, min(size, 4 << 30))
    plain = plain_write_rate(source, store.root, size, part_bytes) if store.is_local else None
    before, marks = peak_bytes(), [time.monotonic()]
    store.begin(STEP)
    records = [store.write_file(layout, source.chunks(layout)) for layout in layouts]
    store.commit(make_manifest(STEP, 16 * STEP, {}), records)
    marks.append(time.monotonic())
    snapshot = store.read(STEP)
    marks.append(time.monotonic())
    is_equal = source.is_equal(snapshot)
    marks.append(time.monotonic())
    memory_mb = (peak_bytes() - before) / MB
    found = 0
    for layout in layouts:
        place = layout.size * 2 // 3
        flip_bit(store, layout.name, place)
        found += is_found(store)
        flip_bit(store, layout.name, place)
    is_whole = not is_found(store)
    rates = [size / MB / (after - at) for at, after in itertools.pairwise(marks)]
    row(
        place="folder" if store.is_local else "S3",
        bytes=size,
        files=len(layouts),
        largest_file=max(layout.size for layout in layouts),
        write_mb_s=round(rates[0], 1),
        plain_write_mb_s=plain and round(plain / MB, 1),
        hash_mb_s=round(hashing / MB, 1),
        of_the_slower=round(rates[0] * MB / min(hashing, plain), 3) if plain else None,
        verify_mb_s=round(rates[1], 1),
        read_mb_s=round(rates[2], 1),
        memory_mb=round(memory_mb, 1),
        equal=is_equal,
        flips=len(layouts),
        flips_found=found,
        whole_again=is_whole,
    )
    return is_equal and found == len(layouts) and is_whole and memory_mb <= max_memory_mb


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """A URL in an S3 server of moto's, in a process of its own."""
    import fsspec

    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    names = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(names | {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"})
    try:
        files, deadline = fsspec.filesystem("s3", use_listings_cache=False), time.monotonic() + 60
        while not files.exists("runs"):
            with contextlib.suppress(OSError):  # it is not listening yet
                files.mkdir("runs")
            assert time.monotonic() < deadline, "the server does not start"
        yield "s3://runs/one"
    finally:
        server.terminate()
        server.wait()


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--bytes", type=float, default=10e9, help="in a folder; 0: not at all")
    parser.add_argument("--part_bytes", type=int, default=4 << 30)
    parser.add_argument("--s3_bytes", type=float, default=1e9, help="in S3; 0: not at all")
    parser.add_argument("--s3_part_bytes", type=int, default=128 << 20)
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--folder", default=None, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--max_memory_mb", type=float, default=300)
    given = parser.parse_args()
    is_good = True
    if given.bytes:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            is_good &= measure(folder, int(given.bytes), given.part_bytes, given.tensors, given.max_memory_mb)
    if given.s3_bytes:
        with object_store() as url:
            size = int(given.s3_bytes)
            is_good &= measure(url, size, given.s3_part_bytes, given.tensors, given.max_memory_mb)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
