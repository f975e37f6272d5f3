"""Sinks that call a package in a thread of its own: the package may fail, block for ever or be absent.

TensorBoard reads run_dir/tensorboard. An experiment tracker is a package with `init`, `log(values, step=...)`
and `finish`, like wandb.
"""

import contextlib
import functools
import html
import importlib
import logging
import os
import queue
import re
import textwrap
import threading
from collections.abc import Callable
from typing import Any

from mingpt.base.files import reason_of
from mingpt.report.files import read_records
from mingpt.report.metrics import RunInfo, Sink, Values

MAX_QUEUED = 2000  # records; while so many wait, new ones are dropped
CLOSE_S = 5.0  # the end of a run waits at most so long
Task = Callable[[], None]
log = logging.getLogger(__name__)


class Destination(Sink):
    """A place that a Follower hands values to.

    The Follower calls all methods in one thread, `open` first. They may block, and raise any error.
    """

    label = ""  # the destination's name in messages

    def open(self, step: int) -> int:
        """Make ready for values past `step`. Returns the first step whose values the destination lacks."""
        raise NotImplementedError


class Follower(Sink):
    """Hands values to a destination in a thread of its own.

    If the destination fails, the run goes on: one line says so, and the destination gets no more values. A
    slow destination misses some values. All calls return at once, but `close` takes up to CLOSE_S seconds.
    """

    def __init__(self, run: RunInfo, destination: Destination) -> None:
        self.run, self.destination = run, destination
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.is_over = False  # whether the destination has failed or was closed
        self.is_reported = False
        self.thread = threading.Thread(target=self._work, name=destination.label, daemon=True)
        self.thread.start()

    def log(self, step: int, values: Values) -> None:
        self._put(functools.partial(self.destination.log, step, values))

    def log_text(self, step: int, name: str, text: str) -> None:
        self._put(functools.partial(self.destination.log_text, step, name, text))

    def close(self) -> None:
        self.tasks.put(None)
        self.thread.join(CLOSE_S)
        if self.thread.is_alive():
            self._report(f"did not end within {CLOSE_S:g} s and is given up: it may lack the last values")
        self.is_over = True

    def _put(self, task: Task) -> None:
        if self.is_over:
            return
        if self.tasks.qsize() >= MAX_QUEUED:
            self._report(f"is too slow: {MAX_QUEUED} records wait, and those that come now are left out")
            return
        self.tasks.put(task)

    def _work(self) -> None:
        """Follow the run, in the thread. Raises nothing: a line says why the destination has failed."""
        try:
            self._follow()
        except ModuleNotFoundError as error:
            name = str(error.name).split(".")[0]
            self._report(f"needs the package {name}, which is not installed: the run goes on without it")
        except BaseException as error:  # any error of the package, even SystemExit, must not end a run
            self._report(f"has failed ({reason_of(error)[:200]}): the run goes on without it")
        self.is_over = True

    def _follow(self) -> None:
        """Open the destination, do the tasks in order, and close it; return early if `may_write` is false."""
        self._add_missing(self.destination.open(self.run.first_step))
        for task in iter(self.tasks.get, None):
            if not self.run.may_write():
                return  # another job or a later generation has the run folder
            task()
        self.destination.close()

    def _add_missing(self, first_missing: int) -> None:
        """Hand over the records of earlier generations from step `first_missing` on. Raises OSError."""
        last_step = self.run.first_step
        lacks_none = first_missing > last_step or last_step == 0  # the records of step 0 come again
        for record in read_records(self.run.run_dir / "metrics.jsonl"):
            if lacks_none or record["step"] > last_step:
                return  # the records that follow are this generation's
            if record["step"] >= first_missing:
                values = {name: value for name, value in record.items() if name != "step"}
                self.destination.log(record["step"], values)

    def _report(self, what: str) -> None:
        """Log what is wrong with the destination, at the first call only."""
        if not self.is_reported:
            self.is_reported = True
            log.warning(f"{self.destination.label} {what}")


class TensorBoard(Destination):
    """Writes scalars, named as in metrics.jsonl, samples as text, and a mark where each generation starts.

    Each generation adds a file. Earlier files keep values past the step from which the generation goes on,
    but TensorBoard does not show them (`purge_step`).
    """

    def __init__(self, run: RunInfo) -> None:
        self.run, self.folder = run, run.run_dir / "tensorboard"
        self.label = f"report.tensorboard ({self.folder})"
        self.writer: Any = None

    def open(self, step: int) -> int:
        from torch.utils.tensorboard import SummaryWriter

        is_new = not self.folder.exists()
        first_step = step + 1 if step else 0  # the values of step 0 come again
        self.writer = SummaryWriter(str(self.folder), purge_step=first_step)
        self.writer.add_scalar("generation", self.run.generation, step)
        if self.run.previous_end:
            self.log_text(step, "restart", f"generation {self.run.generation}: {self.run.previous_end}")
        return 0 if is_new else first_step

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # so that a killed worker loses no values

    def log_text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, textwrap.indent(text, "    "), step)  # shown verbatim in Markdown

    def close(self) -> None:
        self.writer.close()


class Tracker(Destination):
    """An experiment tracker. It shows all generations as one run, found by the run's id or a name with it.

    Steps that the tracker has are not sent again; steps that it lacks are sent from metrics.jsonl.
    Credentials, and where values are kept, are settings of the package itself. The environment variable
    <PACKAGE>_PROJECT names the project, by default the name of the folder above the run folder.
    """

    def __init__(self, run: RunInfo, package: str) -> None:
        self.run, self.package, self.label = run, package, f"report.tracker={package}"
        self.module: Any = None
        self.first_step = 0  # the first step that the tracker lacks

    def open(self, step: int) -> int:
        os.environ.setdefault("WANDB_CONSOLE", "off")  # wandb would capture what the run writes to stderr
        self.module = importlib.import_module(self.package)
        # Import matplotlib here: while LossPlot imports it in another thread, trackio drops all values.
        with contextlib.suppress(ImportError):  # LossPlot reports it
            importlib.import_module("matplotlib.backends.backend_agg")
            importlib.import_module("matplotlib.figure")
        tracked = self.module.init(**self.init_arguments())
        # trackio has no public name for the next step.
        self.first_step = getattr(tracked, "step" if self.package == "wandb" else "_next_step", 0)
        return self.first_step

    def init_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the package's `init`."""
        folder = self.run.run_dir.resolve()
        project = re.sub(r"[^\w.-]+", "-", folder.parent.name).strip("-")
        arguments = {
            "project": os.environ.get(f"{self.package.upper()}_PROJECT") or project or "mingpt",
            "name": f"{folder.name}-{self.run.run_id[:8]}",  # trackio finds a run by its name
            "resume": "allow",
            "config": self.run.settings,
        }
        if self.package == "wandb":
            arguments |= {"id": self.run.run_id, "dir": os.environ.get("WANDB_DIR") or str(self.run.run_dir)}
        return arguments

    def log(self, step: int, values: Values) -> None:
        if step >= self.first_step:
            # The generation's number in each record shows where a generation ended.
            self.module.log({**values, "generation": self.run.generation}, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        if hasattr(self.module, "Text"):
            shown = self.module.Text(text)
        else:
            shown = self.module.Html(f"<pre>{html.escape(text)}</pre>")
        if step >= self.first_step:
            self.module.log({name: shown}, step=step)

    def close(self) -> None:
        self.module.finish()
