"""The log goes to the terminal and, on ranks that write to a run folder, to log.txt in this folder.

During training the terminal shows a progress bar, or one line per record of metrics. Each evaluation adds a
line, and the text of a sample, if any.
"""

import logging
import sys
import time
from pathlib import Path

from tqdm import tqdm

from mingpt.base.urls import RedactingFormatter
from mingpt.report.metrics import RunStart, Sink, Values
from mingpt.report.writing import MayWrite, ReportFile

MAX_WAITING_LINES = 1000  # the most lines kept in memory while log.txt cannot be written
FILE_ONLY = logging.INFO - 1  # the level of lines that go to log.txt and not to the terminal
WARM_UP = 3  # the first steps, which are slow because they allocate memory and compile blocks
log = logging.getLogger(__name__)


class ConsoleHandler(logging.Handler):
    """Writes lines to stderr, above the progress bar if there is one.

    A write never raises, because `open_streams` has replaced stderr with a stream that drops what it cannot
    write.
    """

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class FileHandler(logging.Handler):
    """Appends each log line, with the time, to the file at `path`, if `may_write` (see MayWrite) allows it.

    Lines that cannot be written are kept in memory, at most MAX_WAITING_LINES, and written later.
    """

    def __init__(self, path: Path, may_write: MayWrite) -> None:
        super().__init__()
        self.setFormatter(RedactingFormatter("%(asctime)s %(message)s"))
        self.file = ReportFile(path, may_write, MAX_WAITING_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.file.append(f"{self.format(record)}\n".encode(errors="backslashreplace"))


def open_log(rank: int, run_dir: Path | None, may_write: MayWrite = lambda: True) -> None:
    """Send the log to the terminal and, unless `run_dir` is None, to run_dir/log.txt.

    Replaces what an earlier call set up. Ranks other than 0 show only warnings and errors on the terminal.
    `may_write` is called before each write to log.txt (see MayWrite).
    """
    logger = logging.getLogger("mingpt")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    level = logging.WARNING if rank else logging.INFO
    logger.setLevel(FILE_ONLY)
    console = ConsoleHandler()
    console.setFormatter(RedactingFormatter(f"worker {rank}: %(message)s" if rank else "%(message)s"))
    console.setLevel(level)
    logger.addHandler(console)
    if run_dir is not None:
        logger.addHandler(FileHandler(run_dir / "log.txt", may_write))


class ConsoleSink(Sink):
    """Shows training as a progress bar on rank 0 if stderr is a terminal, and otherwise as log lines.

    With a bar, the log lines about training go only to log.txt. Evaluations are shown as lines in both cases.
    The time left is estimated from this generation's mean time per step after the first WARM_UP steps; the
    mean includes evaluations and snapshots.
    """

    def __init__(self, run: RunStart) -> None:
        self.max_steps = run.config.trainer.max_steps
        self.warm_step, self.warm_at = run.step + WARM_UP, 0.0
        self.figures, self.left = [""], ""  # the last record's figures; the time left, once it is known
        self.bar = tqdm(
            total=self.max_steps,
            initial=run.step,
            file=sys.stderr,
            disable=not (sys.stderr.isatty() and run.is_main),
            dynamic_ncols=True,
            bar_format="{bar}|{n_fmt}/{total_fmt}  {desc}",
        )

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values:
            names = [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("val/")]
            log.info(f"step {step}/{self.max_steps}  {'  '.join(names)}")
        if "train/loss" not in values:
            return
        formats = {"train/loss": "loss {:.4f}", "tokens_per_s": "{:,.0f} tok/s", "lr": "lr {:.2e}"}
        self.figures = [template.format(values[name]) for name, template in formats.items() if name in values]
        line = "  ".join([f"step {step}/{self.max_steps}", *self.figures])
        log.log(logging.INFO if self.bar.disable else FILE_ONLY, line + self.left)
        self.show()

    def on_step(self, step: int) -> None:
        now = time.monotonic()
        if step <= self.warm_step:
            self.warm_at = now
        else:
            left_s = (self.max_steps - step) * (now - self.warm_at) / (step - self.warm_step)
            self.left = f"  {tqdm.format_interval(left_s)} left"
        self.show()
        self.bar.update()

    def show(self) -> None:
        """Set the text beside the bar, if there is a bar; tqdm draws the text with the next update."""
        self.bar.set_description_str("  ".join(self.figures[:2]) + self.left, refresh=False)

    def close(self) -> None:
        self.bar.close()
