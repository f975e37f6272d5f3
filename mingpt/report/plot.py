"""loss.png: training and validation loss, drawn in the background from a bounded number of points."""

import io
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mingpt.base.files import write_atomic
from mingpt.report.files import WriteStatus
from mingpt.report.metrics import RunInfo, Sink, Values

log = logging.getLogger(__name__)

MAX_POINTS = 2000  # of a curve; the picture is 880 pixels wide
STYLES: dict[str, dict[str, Any]] = {
    "train/loss": {"color": "tab:blue", "alpha": 0.6, "linewidth": 1.0},
    "val/loss": {"color": "tab:orange", "marker": "o", "markersize": 3},
}
Point = tuple[float, float]  # step, loss


class Curve:
    """At most `max_points` points, each the mean of as many records as it takes, the last one of fewer."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.max_points = max_points
        self.whole: list[Point] = []  # each the mean of `per_point` records
        self.per_point = 1
        self.latest: list[Point] = []  # fewer than `per_point` records

    def add(self, step: int, loss: float) -> None:
        self.latest.append((step, loss))
        if len(self.latest) < self.per_point:
            return
        self.whole.append(mean_point(self.latest))
        self.latest = []
        if len(self.whole) >= self.max_points:
            pairs = zip(self.whole[::2], self.whole[1::2], strict=True)
            self.whole = [mean_point(pair) for pair in pairs]
            self.per_point *= 2

    def points(self) -> list[Point]:
        return [*self.whole, mean_point(self.latest)] if self.latest else list(self.whole)


def mean_point(points: "list[Point] | tuple[Point, ...]") -> Point:
    steps, losses = zip(*points, strict=True)
    return sum(steps) / len(points), sum(losses) / len(points)


class LossPlot(Sink):
    """Drawn at each evaluation, unless the drawing before is not finished, and at the end."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.curves = {name: Curve() for name in STYLES}
        self.status = WriteStatus(run.run_dir / "loss.png")
        # One thread for all drawings: each thread's malloc keeps what it has freed.
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.drawing: Future[None] | None = None
        self.figure: Any = None

    def add(self, step: int, values: Values) -> None:
        for name, curve in self.curves.items():
            if isinstance(values.get(name), (int, float)):
                curve.add(step, values[name])

    def replay(self, step: int, values: Values) -> None:
        self.add(step, values)

    def log(self, step: int, values: Values) -> None:
        self.add(step, values)
        if "val/loss" in values and (self.drawing is None or self.drawing.done()):
            self.start_drawing()

    def start_drawing(self) -> None:
        points = {name: curve.points() for name, curve in self.curves.items()}
        self.drawing = self.executor.submit(self.draw, points)

    def wait(self) -> None:
        """Until the drawing that has begun is finished."""
        if self.drawing:
            self.drawing.result()

    def close(self) -> None:
        self.start_drawing()
        self.wait()

    def draw(self, points: dict[str, list[Point]]) -> None:
        """Draw the picture and write it; one line says why if that fails."""
        try:
            picture = self.render(points)
        except ImportError:
            log.warning("no loss.png: matplotlib is not installed")
            return
        except Exception as error:  # a library's own, and no reason to end a run
            self.status.failed(error)
            return
        if not self.run.may_write():
            return
        folder = self.run.run_dir
        try:
            write_atomic(folder / "loss.png", picture, folder / "loss.partial.png", sync="nothing")
        except OSError as error:
            self.status.failed(error)
            return
        self.status.worked()

    def render(self, points: dict[str, list[Point]]) -> bytes:
        """The bytes of a PNG. Restarts as dotted lines, the text's entropy as a dashed one."""
        if self.figure is None:
            self.figure, self.axes, self.lines = self.make_figure()
        for name, line in self.lines.items():
            line.set_data([step for step, _ in points[name]], [loss for _, loss in points[name]])
        self.axes.relim()
        self.axes.autoscale_view()
        self.figure.tight_layout()
        picture = io.BytesIO()
        self.figure.savefig(picture)
        return picture.getvalue()

    def make_figure(self) -> tuple[Any, Any, dict[str, Any]]:
        """The figure, its axes and a line for each curve; its canvas holds the pixels of all drawings."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), dpi=110)
        FigureCanvasAgg(figure)  # without one, each drawing would allocate its own
        axes = figure.subplots()
        lines = {name: axes.plot([], [], label=name, **style)[0] for name, style in STYLES.items()}
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
        return figure, axes, lines
