"""An experiment tracker: a package with `init`, `log(values, step=...)` and `finish`, as wandb has them."""

import contextlib
import html
import importlib
import inspect
import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from mingpt.report.follower import Destination, EarlierRecords, Follower
from mingpt.report.jsonl import record_key
from mingpt.report.sink import RunInfo, Values

log = logging.getLogger(__name__)

STYLES = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal
MAX_LINES = 20  # of what a package prints that the log takes


class Tracker(Destination):
    """One run of the tracker for the whole run: a later generation goes on with it, by the run's id.

    A step that the tracker has is not sent again, and one that it lacks comes from metrics.jsonl. Credentials
    and where the values are kept are the package's own matter, and <PACKAGE>_PROJECT is obeyed.
    """

    def __init__(self, run: RunInfo, package: str) -> None:
        self.run, self.package, self.label = run, package, f"report.tracker={package}"
        self.module: Any = None
        self.first_step = 0  # that the tracker lacks
        self.records: set[tuple[int, bool]] = set()  # sent, at the step from which this generation goes on

    def open(self, earlier: EarlierRecords) -> None:
        os.environ.setdefault("WANDB_CONSOLE", "off")  # it would read along what the run writes to stderr
        self.module = importlib.import_module(self.package)
        # LossPlot imports it in another thread, and trackio drops all values while that is under way.
        with contextlib.suppress(ImportError):  # LossPlot says so
            importlib.import_module("matplotlib.backends.backend_agg")
            importlib.import_module("matplotlib.figure")
        tracked = self.module.init(**self.accepted(self.init_arguments()))
        first_step = next_step(tracked)
        if first_step is None:  # unknown: assume that it has what earlier generations sent
            first_step = earlier.step + 1 if len(self.run.starts) > 1 else 0
        self.first_step = first_step
        for step, values in earlier:
            self.log(step, values)
            if step == earlier.step:
                self.records.add(record_key({"step": step, **values}))

    def init_arguments(self) -> dict[str, Any]:
        folder = self.run.run_dir.resolve()
        name = f"{folder.name}-{self.run.run_id[:8]}"  # trackio finds a run by its name
        return {
            "project": os.environ.get(f"{self.package.upper()}_PROJECT") or project_name(folder),
            "name": name,
            "id": self.run.run_id,
            "resume": "allow",
            "config": self.run.settings,
            "dir": str(self.run.run_dir),
        }

    def accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Those that the package's `init` takes."""
        parameters = inspect.signature(self.module.init).parameters
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in parameters}

    def log(self, step: int, values: Values) -> None:
        if step >= self.first_step and record_key({"step": step, **values}) not in self.records:
            # The number of the generation in each record shows where one ended.
            self.module.log({**values, "generation": len(self.run.starts)}, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        shown = self.as_media(text)
        if step >= self.first_step and shown is not None:
            self.module.log({name: shown}, step=step)

    def as_media(self, text: str) -> Any:
        """The text as a type of the package; None if it has none."""
        if hasattr(self.module, "Text"):
            return self.module.Text(text)
        if hasattr(self.module, "Html"):
            return self.module.Html(f"<pre>{html.escape(text)}</pre>")
        return None

    def close(self) -> None:
        self.module.finish()


def project_name(folder: Path) -> str:
    """That of the folder around run_dir, in characters that trackers take."""
    return re.sub(r"[^\w.-]+", "-", folder.parent.name).strip("-") or "mingpt"


def next_step(tracked: Any) -> int | None:
    """The first step that a tracker's run lacks: 0 for a new one; None if it has no such number."""
    for name in ("step", "_next_step"):  # of wandb; of trackio, which has no public name for it
        step = getattr(tracked, name, None)
        if isinstance(step, int):
            return step
    return None


class TrackerFollower(Follower):
    """Keeps what the package prints off stdout, too."""

    def __init__(self, run: RunInfo, package: str) -> None:
        super().__init__(run, Tracker(run, package))
        self.stdout = StdoutOfMainThread(self.destination.label)

    def rewind(self, step: int) -> None:
        self.stdout.install()
        super().rewind(step)

    def close(self) -> None:
        super().close()
        self.stdout.remove()


class StdoutOfMainThread:
    """Stands for sys.stdout: what other threads print goes to the log, MAX_LINES lines of it."""

    def __init__(self, label: str) -> None:
        self.label, self.real, self.n_lines, self.begun = label, sys.stdout, 0, ""
        self.writing = threading.Lock()

    def install(self) -> None:
        if sys.stdout is not self:
            self.real, sys.stdout = sys.stdout, self  # type: ignore[assignment]

    def remove(self) -> None:
        if sys.stdout is self:
            sys.stdout = self.real

    def write(self, text: str) -> int:
        if threading.current_thread() is threading.main_thread():
            return self.real.write(text)
        with self.writing:
            *lines, self.begun = (self.begun + text).split("\n")
            lines = [STYLES.sub("", line).strip() for line in lines if line.strip()]
            taken = lines[: max(0, MAX_LINES - self.n_lines)]
            self.n_lines += len(taken)
        for line in taken:
            log.info("%s: %s", self.label, line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
