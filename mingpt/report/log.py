"""The package's log, which goes to the terminal and, on ranks that keep a run folder, to run_dir/log.txt.

Training shows a progress bar or one line per record, an evaluation shows one line.
"""

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from mingpt.base.urls import RedactingFormatter
from mingpt.report.files import MayWrite, ReportFile
from mingpt.report.metrics import RunStart, Sink, Values

MAX_WAITING_LINES = 1000  # kept in memory while a disk is full; the terminal shows all lines
log = logging.getLogger(__name__)


class ConsoleHandler(logging.Handler):
    """Writes lines to stderr, above a progress bar if there is one; `open_streams` makes stderr safe."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class FileHandler(logging.Handler):
    """Appends lines, each with its time, to the file at `path`; lines wait while it cannot be written."""

    def __init__(self, path: Path, may_write: MayWrite) -> None:
        super().__init__()
        self.setFormatter(RedactingFormatter("%(asctime)s %(message)s"))
        self.file = ReportFile(path, may_write, MAX_WAITING_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.file.append(f"{self.format(record)}\n".encode(errors="backslashreplace"))


def open_log(rank: int, run_dir: Path | None, may_write: MayWrite = lambda: True) -> None:
    """Send the log to the terminal and, unless `run_dir` is None, to run_dir/log.txt.

    Replaces what an earlier call set up. Ranks other than 0 show only warnings on the terminal.
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
        logger.addHandler(FileHandler(run_dir / "log.txt", may_write))


class ConsoleSink(Sink):
    """Shows training as a progress bar if rank 0 has a terminal, else as log lines; evaluations as lines."""

    def __init__(self, run: RunStart) -> None:
        self.max_steps = run.config.trainer.max_steps
        self.bar = None
        if sys.stderr.isatty() and run.is_main:
            self.bar = tqdm(
                total=self.max_steps, initial=run.step, unit="step", file=sys.stderr, dynamic_ncols=True
            )

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values:
            names = [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("val/")]
            log.info(f"step {step}/{self.max_steps}  {'  '.join(names)}")
        if "train/loss" not in values:
            return
        formats = {"train/loss": "loss {:.4f}", "lr": "lr {:.2e}", "tokens_per_s": "{:,.0f} tokens/s"}
        text = "  ".join(
            template.format(values[name]) for name, template in formats.items() if name in values
        )
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
        else:
            left_s = (self.max_steps - step) * values.get("step_s", 0.0)
            log.info(f"step {step}/{self.max_steps}  {text}  {left_s:.0f} s left")

    def on_step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
