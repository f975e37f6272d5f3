"""The package's log: to the terminal, and to run_dir/log.txt on rank 0."""

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from mingpt.redact import RedactingFormatter
from mingpt.report.files import LineFile, MayWrite, always

MAX_WAITING_LINES = 1000  # for a disk that is full; the terminal has them all


class ConsoleHandler(logging.Handler):
    """Writes lines to stderr above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or sys.stderr.closed:
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except OSError:
            pass  # the terminal or the pipe is gone; log.txt goes on


class FileHandler(logging.Handler):
    """Writes lines to log.txt; the terminal alone is told that this does not work."""

    def __init__(self, path: Path, console: ConsoleHandler, may_write: MayWrite) -> None:
        super().__init__()
        self.console = console
        self.setFormatter(RedactingFormatter("%(asctime)s %(message)s"))
        self.file = LineFile(path, max_pending=MAX_WAITING_LINES, may_write=may_write, report=self.report)
        self.file.retry()

    def report(self, sentence: str) -> None:
        self.console.emit(logging.makeLogRecord({"msg": sentence}))

    def emit(self, record: logging.LogRecord) -> None:
        self.file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        self.file.close()
        super().close()


def open_log(rank: int, run_dir: Path | None, may_write: MayWrite = always) -> None:
    """Send the log to the terminal, and to run_dir/log.txt if this rank keeps the run folder.

    Of ranks other than 0, warnings go to the terminal: what is wrong with a node is known there alone.
    """
    logger = logging.getLogger("mingpt")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    level = logging.WARNING if rank else logging.INFO
    logger.setLevel(logging.INFO if run_dir else level)
    console = ConsoleHandler()
    console.setFormatter(RedactingFormatter(f"worker {rank}: %(message)s" if rank else "%(message)s"))
    console.setLevel(level)
    logger.addHandler(console)
    if run_dir is not None:
        logger.addHandler(FileHandler(run_dir / "log.txt", console, may_write))
