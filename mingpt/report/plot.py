"""loss.png: training and validation loss, drawn in the background."""

import io
from array import array
from concurrent.futures import Future
from typing import Any

from mingpt.report.files import SmallFile
from mingpt.report.metrics import RunInfo, Sink, Values

STYLES: dict[str, dict[str, Any]] = {
    "train/loss": {"color": "tab:blue", "alpha": 0.6, "linewidth": 1.0},
    "val/loss": {"color": "tab:orange", "marker": "o", "markersize": 3},
}
Curve = tuple["array[float]", "array[float]"]  # steps, losses


class LossPlot(Sink):
    """Drawn at each evaluation, unless the drawing before is not finished, and at the end."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.curves: dict[str, Curve] = {name: (array("d"), array("d")) for name in STYLES}
        self.file = SmallFile(run.run_dir / "loss.png", run.may_write)
        self.drawing: Future[None] | None = None
        self.figure: Any = None

    def replay(self, step: int, values: Values) -> None:
        for name, (steps, losses) in self.curves.items():
            if isinstance(values.get(name), (int, float)):
                steps.append(step)
                losses.append(values[name])

    def log(self, step: int, values: Values) -> None:
        self.replay(step, values)
        if "val/loss" in values and (self.drawing is None or self.drawing.done()):
            self.start_drawing()

    def start_drawing(self) -> Future[None]:
        # A copy: an array cannot grow while somebody reads it.
        curves = {name: (steps[:], losses[:]) for name, (steps, losses) in self.curves.items()}
        # In one thread for all drawings: each thread's malloc keeps what it has freed.
        self.drawing = self.file.background.submit(self.draw, curves)
        return self.drawing

    def close(self) -> None:
        self.start_drawing().result()

    def draw(self, curves: dict[str, Curve]) -> None:
        """Draw the picture and write it; one line says why if that fails.

        Restarts are dotted lines, the text's entropy is a dashed one.
        """
        try:
            if self.figure is None:
                self.figure, self.axes, self.lines = self.make_figure()
            for name, line in self.lines.items():
                line.set_data(*curves[name])
            self.axes.relim()
            self.axes.autoscale_view()
            picture = io.BytesIO()
            self.figure.savefig(picture)
            self.file.write(picture.getvalue())
        except Exception as error:  # matplotlib's own, or it is not installed: no reason to end a run
            self.file.status.failed(error)

    def make_figure(self) -> tuple[Any, Any, dict[str, Any]]:
        """The figure, its axes and a line for each curve; its canvas holds the pixels of all drawings."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), dpi=110, layout="tight")
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
