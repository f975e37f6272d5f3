"""Sinks that pass metrics to other programs: TensorBoard, and trackers such as wandb and trackio.

If such a program is unreachable, fails or is too slow, the run goes on, and the program may lack some of the
values. metrics.jsonl does not depend on these programs.
"""

import importlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from mingpt.base.files import reason_of
from mingpt.config import to_dict
from mingpt.report.metrics import RunStart, Sink, Values

CLOSE_S = 5.0  # the most seconds that the end of a run waits for a sink
log = logging.getLogger(__name__)


class TensorBoard(Sink):
    """Writes values to run_dir/tensorboard, one file per generation (the workers between two restarts).

    The files of earlier generations keep the values of steps that are done again, but because of `purge_step`
    TensorBoard does not show these values.
    """

    def __init__(self, run: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first_step = run.step + 1 if run.step else 0  # step 0 is recorded again
        self.writer: Any = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # so that a killed worker loses no values

    def close(self) -> None:
        self.writer.close()


class Tracker(Sink):
    """Sends values to the package that report.tracker names, which has wandb's `init`, `log` and `finish`.

    The tracker shows all generations as one run. wandb's files are written to the run folder, unless
    WANDB_DIR names a different folder. Credentials are settings of the package itself. The project's name is
    the value of the environment variable <PACKAGE>_PROJECT, by default the name of the folder above the run
    folder, or mingpt if that folder is /.
    """

    def __init__(self, run: RunStart) -> None:
        package = str(run.config.report.tracker)
        os.environ.setdefault("WANDB_CONSOLE", "off")  # wandb would capture what the run writes to stderr
        os.environ.setdefault("WANDB_DIR", str(run.run_dir))
        self.module = importlib.import_module(package)
        folder = run.run_dir.resolve()
        tracked = self.module.init(
            project=os.environ.get(f"{package.upper()}_PROJECT") or folder.parent.name or "mingpt",
            name=f"{folder.name}-{run.run_id[:8]}",  # trackio finds a run by its name
            resume="allow",
            config=to_dict(run.config),
            **({"id": run.run_id} if package == "wandb" else {}),
        )
        self.first_step = getattr(tracked, "step", 0)  # wandb warns of values of steps before this one

    def log(self, step: int, values: Values) -> None:
        if step >= self.first_step:
            self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


class InThread(Sink):
    """Makes a sink and gives it values in a thread, because the sink may block or fail.

    If the sink fails, one log line says so, the sink gets no more values, and the run goes on. `label` is the
    sink's name in log lines.
    """

    def __init__(self, run: RunStart, label: str, make_sink: Callable[[RunStart], Sink]) -> None:
        self.run, self.label, self.make_sink = run, label, make_sink
        self.records: queue.SimpleQueue[tuple[int, Values] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, name=label, daemon=True)
        self.thread.start()

    def log(self, step: int, values: Values) -> None:
        self.records.put((step, values))

    def close(self) -> None:
        self.records.put(None)
        self.thread.join(CLOSE_S)
        if self.thread.is_alive():
            log.warning(f"{self.label} did not end within {CLOSE_S:g} s: it may lack the last values")

    def work(self) -> None:
        """Make the sink, give it the queued values in order, and close it. Never raises."""
        try:
            sink = self.make_sink(self.run)
            for step, values in iter(self.records.get, None):
                sink.log(step, values)
            sink.close()
        except BaseException as error:  # any error of a package, even SystemExit, must not end a run
            log.warning(f"{self.label} fails ({reason_of(error)}): the run goes on without it")


def tensorboard(run: RunStart) -> Sink:
    return InThread(run, "report.tensorboard", TensorBoard)


def tracker(run: RunStart) -> Sink:
    return InThread(run, f"report.tracker={run.config.report.tracker}", Tracker)
