"""Plots of a run: loss.png (training and validation loss) and timeline.png (how the time was spent).

The losses are read from metrics.jsonl, and the times from run.json. While a run trains, a thread draws both
plots.
"""

import errno
import functools
import io
import os
import re
import textwrap
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, check_json, read_json, reason_of, write_atomic
from mingpt.base.paths import typed_path
from mingpt.report.history import PHASES, Generation, History, plural
from mingpt.report.metrics import RunStart, Sink, Values
from mingpt.report.writing import ReportFile, read_lines

MADE_BY = "mingpt-distributed"  # in each picture's metadata, to tell them from files of other programs
MAX_LOSS = 1e30  # larger losses are not drawn, nor are losses that are not finite
EARLY_SHARE = 0.1  # losses of this first share of the steps fall fast, and do not set the y-axis's range
COLORS = {
    "start": "#a8b3bf",
    "training": "#5aa469",
    "evaluation": "#f2b33d",
    "waiting for snapshots": "#9a86cc",
    "lost": "#e07b73",
}
MAX_GENERATIONS = 20  # the most generations, counted from the last, that have a bar in timeline.png


class Curves(NamedTuple):
    """The losses of a run in nats per token. Each curve is (2, points): a row of steps, a row of losses."""

    train: np.ndarray
    val: np.ndarray


def read_curves(path: Path) -> Curves:
    """Return the losses in the metrics.jsonl at `path`; empty curves if the file is missing.

    Losses that are not below MAX_LOSS are left out. Raises OSError if the file cannot be read.
    """
    points = {"train/loss": array("d"), "val/loss": array("d")}
    for record in (record for _, record in read_lines(path) if record is not None):
        for name, curve in points.items():
            loss = record.get(name)
            if isinstance(loss, (int, float)) and abs(loss) < MAX_LOSS:
                curve.extend((record["step"], loss))
    return Curves(*(np.array(curve).reshape(-1, 2).T for curve in points.values()))


class LossPlot(Sink):
    """Draws loss.png, then timeline.png, in a thread. A failure is logged and does not end the run.

    A drawing begins at each evaluation, unless the previous drawing is still under way. `close` draws once
    more, and waits for that drawing.
    """

    def __init__(self, run: RunStart) -> None:
        self.run = run
        self.files = [ReportFile(run.run_dir / name, run.may_write) for name in ("loss.png", "timeline.png")]
        # One thread makes all drawings, because the malloc of each thread keeps the memory that it has freed.
        self.background = ThreadPoolExecutor(max_workers=1)
        self.drawing: Future[None] | None = None

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values and (self.drawing is None or self.drawing.done()):
            self.drawing = self.background.submit(self.draw)

    def close(self) -> None:
        self.background.submit(self.draw).result()

    def draw(self) -> None:
        """Draw both plots and write them. A failure is not raised: `ReportFile.report` takes the error."""
        sources: list[tuple[Callable[..., object], object]]
        sources = [(draw_loss, self.run), (draw_timeline, self.run.run_dir)]
        for file, (draw, source) in zip(self.files, sources, strict=True):
            try:
                file.replace(to_png(file.path.name, draw, source))
            except Exception as error:  # matplotlib fails or is not installed, which must not end a run
                file.report(error)


@functools.cache
def figure_of(name: str) -> Any:
    """Return the matplotlib figure called `name`, which is made once and reused.

    Raises ImportError if matplotlib cannot be imported.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # without this canvas, each drawing would allocate one
    return figure


def to_png(name: str, draw: Callable[..., object], *sources: object) -> bytes:
    """Clear the figure called `name`, call `draw(figure, *sources)`, and return the figure as a PNG.

    Raises ImportError if matplotlib cannot be imported, and the errors of `draw`.
    """
    figure, picture = figure_of(name), io.BytesIO()
    figure.clear()
    draw(figure, *sources)
    figure.savefig(picture, metadata={"Software": MADE_BY})
    return picture.getvalue()


def check_replaceable(path: str) -> None:
    """Raise FileExistsError if there is a file at `path` that `to_png` has not made."""
    if os.path.lexists(path):
        with open(path, "rb") as file:
            if MADE_BY.encode() not in file.read(200):
                raise FileExistsError(errno.EEXIST, "it is no picture of this program")


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
        # Without the space, a name that begins with _ would not be in the legend.
        axes.plot(*val, color=color, marker="o", markersize=3, label=f" {label}")
        steps, losses = np.hstack((train, val))
        late.extend(losses[steps >= EARLY_SHARE * steps.max(initial=0)])
    if late:
        margin = 0.05 * np.ptp(late) + 1e-3
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    for text in axes.legend(loc="upper right").get_texts():
        text.set_parse_math(False)
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
    restarts = run.from_steps[1:]
    if restarts:
        style = {"alpha": 0.5, "linewidth": 0.8, "zorder": 0.5, "transform": axes.get_xaxis_transform()}
        axes.vlines(restarts, 0, 1, "tab:red", label=f"restarts: {len(restarts)}", **style)
    axes.legend(loc="upper right")
    model = run.config.model
    size = f"{model.n_layer} layers x {model.n_embd}, {run.parameters:,} parameters"
    axes.set_title(f"{run.run_dir.resolve().name}: {model.arch}, {size}", parse_math=False)


def phase_seconds(one: Generation, after: Generation | None) -> list[float]:
    """Return the seconds that generation `one` spent in each phase of COLORS, in the order of COLORS.

    `after` is the next generation, or None if `one` is the last. The time of the steps that `after` repeated
    counts as lost. If `after` is a restart, the time between the last recorded step of `one` and the start of
    the workers of `after` is lost, too.
    """
    start_s, evaluation_s, wait_s = (one.phases.get(phase, 0.0) for phase in PHASES)
    steps_s, twice_s, pause_s = max(0.0, one.seconds - evaluation_s - wait_s), 0.0, 0.0
    if after is not None:
        twice_s = min(steps_s, max(0, one.to_step - after.from_step) * one.step_s)
        if after.restart:
            pause_s = max(0.0, after.began - after.phases.get("start_s", 0.0) - one.seen)
    return [start_s, steps_s - twice_s, evaluation_s, wait_s, twice_s + pause_s]


def draw_timeline(figure: Any, run_dir: Path) -> None:
    """Draw how the time of a run's last generations was spent, and how each generation ended.

    Raises OSError or BadJson if run.json cannot be used.
    """
    history = check_json(read_json(run_dir / "run.json"), History)
    generations = history.generations
    pairs = [*zip_longest(generations, generations[1:])][-MAX_GENERATIONS:]
    seconds = np.array([phase_seconds(*pair) for pair in pairs])  # (bars, phases)
    shares = 100 * seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-9)
    figure.set_size_inches(11, 1.6 + 0.5 * len(pairs))
    axes = figure.subplots()
    for phase, share, end in zip(COLORS, shares.T, shares.cumsum(axis=1).T, strict=True):
        bars = axes.barh(range(len(pairs)), share, 0.45, end - share, color=COLORS[phase], label=phase)
        axes.bar_label(
            bars,
            [f"{part:.0f} %" if part > 3 else "" for part in share],
            label_type="center",
            in_layout=False,
        )
    for bar, (one, _) in enumerate(pairs):
        number, time = len(generations) - len(pairs) + bar + 1, timedelta(seconds=round(seconds[bar].sum()))
        words = (
            f"generation {number}: {time}, {plural(one.workers, 'worker')}, steps {one.from_step} to "
            f"{one.to_step}: {one.end}"
        )
        color = "black" if re.match("finished|stopped|running|.* joined$", one.end) else "#b3261e"
        line = textwrap.shorten(words, 150, placeholder=" ...")
        axes.text(0.3, bar - 0.3, line, color=color, size=9, parse_math=False, in_layout=False)
    axes.set(
        xlim=(0, 100),
        ylim=(len(pairs) - 0.6, -0.8),
        yticks=[],
        xlabel="% of the generation's time (sums for each kind of work, not in the order of time)",
    )
    figure.suptitle(
        f"{run_dir.resolve().name}: goodput {history.goodput:.1%}, {plural(len(generations), 'generation')}, "
        f"{history.steps_lost} steps done twice, {history.status}",
        parse_math=False,
    )
    figure.legend(loc="outside lower center", ncols=len(COLORS), frameon=False)


def main(arguments: Sequence[str]) -> int:
    """Draw RUN/timeline.png from RUN/run.json: how a run's time was spent, and how its workers ended.

    A training job draws this picture by itself, at evaluations and at the end.
    """
    parser = CommandParser("python -m mingpt timeline", main.__doc__)
    parser.add_argument("run", type=typed_path, metavar="RUN", help="run folder on a disk of this machine")
    run_dir = Path(parser.parse_args(arguments).run)
    path = run_dir / "timeline.png"
    try:
        picture = to_png(path.name, draw_timeline, run_dir)
        # The job may write its own timeline.png at the same time.
        write_atomic(path, picture, partial=run_dir / "timeline.png.drawn.mingpt-partial")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run_dir} has no run.json: give the folder of a run") from None
    except (OSError, BadJson, ImportError) as error:
        raise UserError(f"{path} cannot be drawn ({reason_of(error)})") from None
    write_lines([str(path)])
    return 0
