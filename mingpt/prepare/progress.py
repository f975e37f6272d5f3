"""How far the command has come: a bar on a terminal, elsewhere a line now and then."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Never

from tqdm import tqdm

LINE_EVERY_S = 30.0


class Progress:
    """Counts bytes of text on stderr."""

    def __init__(self, what: str, total: int | None, initial: int = 0) -> None:
        self._what, self._total, self._done, self._first = what, total, initial, initial
        self._began = self._last = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total, initial=initial, desc=what, unit="B", unit_scale=True, dynamic_ncols=True
            )

    def add(self, size: int) -> None:
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
        elif time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            speed = (self._done - self._first) / (self._last - self._began) / 1e6
            share = f" ({100 * self._done / self._total:.1f}%)" if self._total else ""
            sys.stderr.write(f"{self._what}: {self._done / 1e6:,.0f} MB{share}, {speed:.1f} MB/s\n")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def progress(what: str, total: int | None, initial: int = 0) -> Iterator[Progress]:
    """Counting from `initial` bytes on, to `total` where it is known."""
    counted = Progress(what, total, initial)
    try:
        yield counted
    finally:
        counted.close()
