"""loss.png: training and validation loss, drawn in the background."""

import logging
import os
import threading
from typing import Any

from mingpt.report.files import read_records
from mingpt.report.sink import RunInfo, Sink, Values

log = logging.getLogger(__name__)

STYLES: dict[str, dict[str, Any]] = {
    "train/loss": {"color": "tab:blue", "alpha": 0.6, "linewidth": 1.0},
    "val/loss": {"color": "tab:orange", "marker": "o", "markersize": 3},
}


class LossPlot(Sink):
    """Drawn at each evaluation from metrics.jsonl, unless the drawing before is not finished."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.thread: threading.Thread | None = None

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values and not (self.thread and self.thread.is_alive()):
            self.thread = threading.Thread(target=self.draw, daemon=True)
            self.thread.start()

    def close(self) -> None:
        if self.thread:
            self.thread.join()
        self.draw()

    def draw(self) -> None:
        """Restarts as dotted lines, the text's entropy as a dashed one."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            log.warning("no loss.png: matplotlib is not installed")
            return
        records = read_records(self.run.run_dir / "metrics.jsonl")
        figure = Figure(figsize=(8, 4.5), dpi=110)
        axes = figure.subplots()
        for name, style in STYLES.items():
            points = [(record["step"], record[name]) for record in records if name in record]
            axes.plot([step for step, _ in points], [loss for _, loss in points], label=name, **style)
        for number, step in enumerate(self.run.restarts):
            label = "" if number else "restart"
            axes.axvline(step, color="tab:red", linestyle=":", linewidth=1, label=label)
        floor = self.run.entropy_floor
        if floor is not None:
            label = f"entropy of the text, {floor:.3f}"
            axes.axhline(floor, color="gray", linestyle="--", linewidth=1, label=label)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.tight_layout()
        partial = self.run.run_dir / "loss.partial.png"
        figure.savefig(partial)
        os.replace(partial, self.run.run_dir / "loss.png")
