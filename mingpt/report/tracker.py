"""Sinks that pass metrics to other programs: TensorBoard, and trackers such as wandb and trackio.

metrics.jsonl has every value. If TensorBoard or a tracker is unreachable, fails or is too slow, it may lack
some of the values, and the run goes on.
"""

import html
import importlib
import logging
import os
import queue
import re
import textwrap
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mingpt.base.files import reason_of
from mingpt.config import to_dict
from mingpt.report.metrics import RunStart, Sink, Values

CLOSE_S = 5.0  # the most seconds that the end of a run waits for a sink
log = logging.getLogger(__name__)


class TensorBoard(Sink):
    """Writes values and samples to run_dir/tensorboard, one file per generation.

    The files of earlier generations keep the values of steps that are done again, but because of `purge_step`
    TensorBoard does not show these values.
    """

    def __init__(self, run: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first_step = run.step + 1 if run.step else 0  # step 0 is recorded again
        self.writer: Any = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=first_step)
        self.writer.add_scalar("generation", len(run.from_steps), run.step)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # so that a killed worker loses no values

    def log_text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, textwrap.indent(text, "    "), step)  # shown verbatim in Markdown

    def close(self) -> None:
        self.writer.close()


class Tracker(Sink):
    """Sends values to the package `package`, which has wandb's `init`, `log`, `finish` and `Html`.

    The tracker shows all generations as one run. wandb's files are written to the run folder, unless
    WANDB_DIR names a different folder. Credentials are settings of the package itself. The project's name is
    the value of the environment variable <PACKAGE>_PROJECT, by default made from the name of the folder above
    the run folder.
    """

    def __init__(self, run: RunStart, package: str) -> None:
        os.environ.setdefault("WANDB_CONSOLE", "off")  # wandb would capture what the run writes to stderr
        os.environ.setdefault("WANDB_DIR", str(run.run_dir))
        self.module = importlib.import_module(package)
        folder, project = run.run_dir.resolve(), os.environ.get(f"{package.upper()}_PROJECT")
        tracked = self.module.init(
            project=project or re.sub(r"[^\w.-]+", "-", folder.parent.name).strip("-") or "mingpt",
            name=f"{folder.name}-{run.run_id[:8]}",  # trackio finds a run by its name
            resume="allow",
            config=to_dict(run.config),
            **({"id": run.run_id} if package == "wandb" else {}),
        )
        self.first_step = getattr(tracked, "step", 0)  # wandb warns of values of steps before this one
        self.generation = len(run.from_steps)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step >= self.first_step:
            self.module.log({**values, "generation": self.generation}, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self.log(step, {name: self.module.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        self.module.finish()


class InThread(Sink):
    """Makes a sink and calls its methods, except `on_step`, in a thread; the sink may block or fail.

    If the sink fails, one log line says so, the sink gets no more values, and the run goes on. `label` is the
    sink's name in log lines.
    """

    def __init__(self, run: RunStart, label: str, make_sink: Callable[[RunStart], Sink]) -> None:
        self.run, self.label, self.make_sink = run, label, make_sink
        self.calls: queue.SimpleQueue[Callable[[Sink], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, name=label, daemon=True)
        self.thread.start()

    def log(self, step: int, values: Values) -> None:
        self.call(lambda sink: sink.log(step, values))

    def log_text(self, step: int, name: str, text: str) -> None:
        self.call(lambda sink: sink.log_text(step, name, text))

    def close(self) -> None:
        self.calls.put(None)
        self.thread.join(CLOSE_S)
        if self.thread.is_alive():
            log.warning(f"{self.label} did not end within {CLOSE_S:g} s: it may lack the last values")

    def call(self, call: Callable[[Sink], None]) -> None:
        if self.thread.is_alive():
            self.calls.put(call)

    def work(self) -> None:
        """Make the sink, make the queued calls in order, and close the sink. Never raises.

        If `may_write` returns False before a call, return without closing the sink.
        """
        try:
            sink = self.make_sink(self.run)
            for call in iter(self.calls.get, None):
                if not self.run.may_write():
                    return
                call(sink)
            sink.close()
        except BaseException as error:  # any error of a package, even SystemExit, must not end a run
            log.warning(f"{self.label} fails ({reason_of(error)[:200]}): the run goes on without it")
