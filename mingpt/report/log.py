"""The package's log: to the terminal and to run_dir/log.txt on rank 0, nowhere on other ranks."""

import logging
import sys
from pathlib import Path

from tqdm import tqdm


class ConsoleHandler(logging.Handler):
    """Writes lines to stderr above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except OSError:
            pass  # the terminal or the pipe is gone; log.txt goes on


def open_log(run_dir: Path | None) -> None:
    """Send the log to the terminal and to run_dir/log.txt; with None, nowhere."""
    logger = logging.getLogger("mingpt")
    logger.handlers.clear()
    logger.propagate = False
    if run_dir is None:
        logger.addHandler(logging.NullHandler())
        return
    logger.setLevel(logging.INFO)
    logger.addHandler(ConsoleHandler())
    to_file = logging.FileHandler(run_dir / "log.txt", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(to_file)
