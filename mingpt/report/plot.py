"""Draw loss.png, the training and validation loss of a run, from metrics.jsonl, in a thread."""

import functools
import io
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mingpt.report.history import load_history
from mingpt.report.metrics import RunStart, Sink, Values
from mingpt.report.writing import ReportFile, read_lines

MADE_BY = "mingpt-distributed"  # in each picture's metadata, to tell them from files of other programs
MAX_LOSS = 1e30  # larger losses are not drawn, nor are losses that are not finite
EARLY_SHARE = 0.1  # losses of this first share of the steps fall fast, and do not set the y-axis's range


class Curves(NamedTuple):
    """The losses of a run in nats per token. Each curve is (2, points): a row of steps, a row of losses."""

    train: np.ndarray
    val: np.ndarray


def read_curves(path: Path) -> Curves:
    """Return the losses in the metrics.jsonl at `path`; empty curves if the file is missing.

    Losses whose size is not below MAX_LOSS are left out. Raises OSError if the file cannot be read.
    """
    points = {"train/loss": array("d"), "val/loss": array("d")}
    for record in (record for _, record in read_lines(path) if record is not None):
        for name, curve in points.items():
            loss = record.get(name)
            if isinstance(loss, (int, float)) and abs(loss) < MAX_LOSS:
                curve.extend((record["step"], loss))
    return Curves(*(np.array(curve).reshape(-1, 2).T for curve in points.values()))


class LossPlot(Sink):
    """Draws loss.png in a thread. A failure does not end the run; the first in a row is logged.

    A drawing begins at each evaluation, unless the previous drawing is still under way. `close` draws once
    more, and waits for that drawing.
    """

    def __init__(self, run: RunStart) -> None:
        self.run = run
        self.file = ReportFile(run.run_dir / "loss.png", run.may_write)
        # One thread makes all drawings, because the malloc of each thread keeps the memory that it has freed.
        self.background = ThreadPoolExecutor(max_workers=1)
        self.drawing: Future[None] | None = None

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values and (self.drawing is None or self.drawing.done()):
            self.drawing = self.background.submit(self.draw)

    def close(self) -> None:
        self.background.submit(self.draw).result()

    def draw(self) -> None:
        """Draw loss.png and write it. A failure is not raised: `ReportFile.report` takes the error."""
        try:
            self.file.replace(to_png(draw_loss, self.run))
        except Exception as error:  # matplotlib fails or is not installed, which must not end a run
            self.file.report(error)


@functools.cache
def the_figure() -> Any:
    """Return the matplotlib figure of this process, which is made once and reused.

    Raises ImportError if matplotlib cannot be imported.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # without this canvas, each drawing would allocate one
    return figure


def to_png(draw: Callable[..., object], *sources: object) -> bytes:
    """Return a PNG of what `draw(figure, *sources)` draws into `figure`, an empty matplotlib figure.

    Raises ImportError if matplotlib cannot be imported, and the errors of `draw` and of matplotlib.
    """
    figure, picture = the_figure(), io.BytesIO()
    figure.clear()
    draw(figure, *sources)
    figure.savefig(picture, format="png", metadata={"Software": MADE_BY})
    return picture.getvalue()


def draw_curves(figure: Any, runs: Mapping[str, Curves], floor: float | None = None) -> Any:
    """Draw the losses of `runs`, {name: losses}, into `figure`, and return the axes.

    Each of several runs has one colour; a single run has two. The line with dots is the validation loss, with
    a star at the lowest value; the line without dots is the smoothed training loss. The y-axis covers the
    losses after the first EARLY_SHARE of the steps, and the loss `floor`, if given.
    """
    axes, late = figure.subplots(), [] if floor is None else [floor]
    for number, (name, (train, val)) in enumerate(runs.items()):
        color, label = f"C{number % 10}", name
        axes.plot(train[0], smooth(train[1]), color=color if len(runs) > 1 else "C1", linewidth=0.9)
        if val.size:
            step, lowest = val[:, val[1].argmin()]
            axes.plot(step, lowest, "*", color=color, markersize=12)
            label = f"{name}: lowest {lowest:.4f} at step {step:.0f}"
        axes.plot(*val, color=color, marker="o", markersize=3, label=label)
        steps, losses = np.hstack((train, val))
        late.extend(losses[steps >= EARLY_SHARE * steps.max(initial=0)])
    if late:
        margin = 0.05 * np.ptp(late) + 1e-3
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    return axes


def smooth(losses: np.ndarray) -> np.ndarray:
    """Return the moving average of `losses`, (N,); a mean includes up to N // 30 losses on either side."""
    reach, numbers = len(losses) // 30, np.arange(len(losses))
    first, end = np.maximum(numbers - reach, 0), np.minimum(numbers + reach + 1, len(losses))
    sums = np.append(0.0, losses.cumsum())
    return (sums[end] - sums[first]) / (end - first)


def draw_loss(figure: Any, run: RunStart) -> None:
    """Draw the losses of a run, the starts of its later generations, and the entropy of its text, if known.

    The training loss is drawn twice, as it is and smoothed. Raises OSError if metrics.jsonl cannot be read.
    """
    curves, floor = read_curves(run.run_dir / "metrics.jsonl"), run.corpus.entropy_floor
    axes = draw_curves(figure, {"val/loss": curves}, floor)
    axes.plot(*curves.train, "C1", alpha=0.4, linewidth=1, zorder=1, label="train/loss, and smoothed")
    if floor is not None:
        axes.axhline(floor, color="gray", linestyle="--", label=f"entropy of the text, {floor:.3f}")
    history = load_history(run.run_dir) or {"generations": []}
    restarts = [entry["from_step"] for entry in history["generations"][1:]]
    if restarts:
        style = {"alpha": 0.5, "linewidth": 0.8, "zorder": 0.5, "transform": axes.get_xaxis_transform()}
        axes.vlines(restarts, 0, 1, "tab:red", label=f"restarts: {len(restarts)}", **style)
    axes.legend(loc="upper right")
    model = run.config.model
    size = f"{model.n_layer} layers x {model.n_embd}, {run.parameters:,} parameters"
    axes.set_title(f"{run.run_dir.resolve().name}: {model.arch}, {size}", parse_math=False)
