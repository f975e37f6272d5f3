"""Checking all bytes of tensor files, in pieces: the SHA-256 that the manifest names, and finite numbers."""

import bisect
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from mingpt.errors import CorruptSnapshot
from mingpt.snapshot.tensors import DTYPES, TensorEntry, TensorFile, check_finite

PIECE_BYTES = 16 << 20
MAX_FILES_AT_ONCE = 4


def verify_files(files: Sequence[TensorFile], digests: Sequence[str]) -> None:
    """Read each file once, several at a time, each in two pieces of at most 16 MiB.

    Raises CorruptSnapshot unless file i has the SHA-256 `digests[i]` and all numbers are finite, or
    UnreadableSnapshot.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max_workers=min(MAX_FILES_AT_ONCE, cores)) as pool:
        checks = [pool.submit(verify_file, file, digest) for file, digest in zip(files, digests, strict=True)]
        try:
            for check in checks:
                check.result()
        finally:
            for check in checks:
                check.cancel()


def verify_file(file: TensorFile, sha256: str) -> None:
    """As `verify_files`. A thread hashes a piece while the next one is read and its numbers are looked at."""
    digest, hashing = hashlib.sha256(), Future[None]()
    hashing.set_result(None)
    entries = sorted(file.entries.items(), key=lambda item: (item[1].begin, item[1].end))
    starts = [entry.begin for _, entry in entries]
    buffers = [torch.empty(min(PIECE_BYTES, file.size), dtype=torch.uint8) for _ in range(2)]
    with ThreadPoolExecutor(max_workers=1) as pool:
        for number, (begin, end) in enumerate(pieces(entries, starts, file.size)):
            piece = buffers[number % 2][: end - begin]
            content = memoryview(piece.numpy())  # type: ignore[arg-type]
            file.file.read_into(begin, content)
            hashing.result()
            hashing = pool.submit(digest.update, content)
            for name, entry in overlapping(entries, starts, begin, end):
                check_piece(name, entry, piece, begin)
        hashing.result()
    if digest.hexdigest() != sha256:
        raise CorruptSnapshot(f"{file.file.what} has another SHA-256 than its manifest says")


def pieces(
    entries: Sequence[tuple[str, TensorEntry]], starts: Sequence[int], size: int
) -> Iterator[tuple[int, int]]:
    """Ranges that cover a file of so many bytes and cut no element of a tensor in two."""
    begin = 0
    while begin < size:
        end = min(begin + PIECE_BYTES, size)
        cut = bisect.bisect_right(starts, end) - 1  # the last tensor that begins at `end` or before
        if cut >= 0 and end < entries[cut][1].end:
            end -= (end - starts[cut]) % DTYPES[entries[cut][1].dtype].itemsize
        yield begin, end
        begin = end


def overlapping(
    entries: Sequence[tuple[str, TensorEntry]], starts: Sequence[int], begin: int, end: int
) -> Sequence[tuple[str, TensorEntry]]:
    """The tensors that have bytes in a range; `starts` are their first bytes."""
    first = max(0, bisect.bisect_right(starts, begin) - 1)
    return entries[first : bisect.bisect_left(starts, end)]


def check_piece(name: str, entry: TensorEntry, piece: torch.Tensor, begin: int) -> None:
    """Look at the numbers of a tensor that lie in a piece of its file, which begins at `begin`."""
    low, high = max(entry.begin, begin) - begin, min(entry.end, begin + len(piece)) - begin
    dtype = DTYPES[entry.dtype]
    if low >= high or not dtype.is_floating_point:
        return
    numbers = piece[low:high]
    if numbers.storage_offset() % dtype.itemsize:  # other programs do not align them
        numbers = numbers.clone()
    check_finite(name, numbers.view(dtype))
