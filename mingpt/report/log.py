"""The log goes to the terminal and, on ranks that write to a run folder, to log.txt in this folder.

On rank 0's terminal and in log.txt there is a line for each record of the training loss. Each evaluation adds
a line, and the text of a sample, if any.
"""

import logging
import time
from datetime import timedelta
from pathlib import Path

from mingpt.base.urls import RedactingFormatter
from mingpt.report.metrics import RunStart, Sink, Values
from mingpt.report.writing import MayWrite, ReportFile

log = logging.getLogger(__name__)


class FileHandler(logging.Handler):
    """Appends each log line, with the time, to the file at `path`, unless `may_write()` returns False.

    Lines that are not written are kept in memory, and written before a later line, if that is possible.
    """

    def __init__(self, path: Path, may_write: MayWrite) -> None:
        super().__init__()
        self.setFormatter(RedactingFormatter("%(asctime)s %(message)s"))
        self.file = ReportFile(path, may_write)

    def emit(self, record: logging.LogRecord) -> None:
        self.file.append(f"{self.format(record)}\n".encode(errors="backslashreplace"))


def open_log(rank: int, run_dir: Path | None, may_write: MayWrite = lambda: True) -> None:
    """Send the log to the terminal and, unless `run_dir` is None, to run_dir/log.txt.

    Replaces what an earlier call set up. Ranks other than 0 show only warnings and errors on the terminal.
    While `may_write()` returns False, nothing is written to log.txt.
    """
    logger = logging.getLogger("mingpt")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    logger.setLevel(logging.INFO)
    console = logging.StreamHandler()
    console.setFormatter(RedactingFormatter(f"worker {rank}: %(message)s" if rank else "%(message)s"))
    console.setLevel(logging.WARNING if rank else logging.INFO)
    logger.addHandler(console)
    if run_dir is not None:
        logger.addHandler(FileHandler(run_dir / "log.txt", may_write))


class ConsoleSink(Sink):
    """Logs a line per record that has a training loss or a validation loss.

    The time left is estimated from the mean time per step since this object's first record of training; the
    mean includes evaluations and snapshots.
    """

    def __init__(self, run: RunStart) -> None:
        self.max_steps = run.config.trainer.max_steps
        self.first: tuple[int, float] | None = None  # the step of the first record, and when it was made

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values:
            names = [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("val/")]
            log.info(f"step {step}/{self.max_steps}  {'  '.join(names)}")
        if "train/loss" not in values:
            return
        formats = {"train/loss": "loss {:.4f}", "tokens_per_s": "{:,.0f} tok/s", "lr": "lr {:.2e}"}
        figures = [template.format(values[name]) for name, template in formats.items() if name in values]
        now = time.monotonic()
        first_step, began = self.first = self.first or (step, now)
        if step > first_step:
            left_s = (self.max_steps - step) * (now - began) / (step - first_step)
            figures.append(f"{timedelta(seconds=round(left_s))} left")
        log.info("  ".join([f"step {step}/{self.max_steps}", *figures]))
