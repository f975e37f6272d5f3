"""Plots of a run, drawn in the background: loss.png (training and validation loss) and timeline.png."""

import functools
import io
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, reason_of, write_atomic
from mingpt.report.files import SmallFile
from mingpt.report.metrics import RunInfo, Sink, Values
from mingpt.report.timeline import draw_timeline

STYLES: dict[str, dict[str, Any]] = {
    "train/loss": {"color": "tab:blue", "alpha": 0.6, "linewidth": 1.0},
    "val/loss": {"color": "tab:orange", "marker": "o", "markersize": 3},
}
Curve = tuple["array[float]", "array[float]"]  # steps, losses
UNSCALED = 0.1  # share of the steps, the first ones, whose fast falling losses do not set the y-axis's range


class LossPlot(Sink):
    """Draws loss.png, then timeline.png from run.json.

    It draws at each evaluation, unless the drawing before is not finished, and at the end.
    """

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.curves: dict[str, Curve] = {name: (array("d"), array("d")) for name in STYLES}
        self.files = [SmallFile(run.run_dir / name, run.may_write) for name in ("loss.png", "timeline.png")]
        self.drawing: Future[None] | None = None

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
        # Copies, because an array cannot grow while another thread reads it.
        curves = {name: (steps[:], losses[:]) for name, (steps, losses) in self.curves.items()}
        # One thread makes all drawings, since each thread's malloc keeps the memory that it has freed.
        self.drawing = self.files[0].background.submit(self.draw, curves)
        return self.drawing

    def close(self) -> None:
        self.start_drawing().result()

    def draw(self, curves: dict[str, Curve]) -> None:
        """Draw both plots and write them; one line says why if that fails."""
        draws = (
            functools.partial(draw_loss, run=self.run, curves=curves),
            functools.partial(draw_timeline, run_dir=self.run.run_dir),
        )
        for file, draw in zip(self.files, draws, strict=True):
            try:
                file.write(to_png(file.path.name, draw))
            except Exception as error:  # matplotlib fails or is not installed: no reason to end a run
                file.status.failed(error)


@functools.cache
def figure_of(name: str) -> Any:
    """The figure for all drawings of this name. Its canvas holds their pixels. Raises ImportError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # without this canvas, each drawing would allocate one
    return figure


def to_png(name: str, draw: Callable[[Any], None]) -> bytes:
    """The PNG of a plot that `draw` draws on an empty figure."""
    figure, picture = figure_of(name), io.BytesIO()
    figure.clear()
    draw(figure)
    figure.savefig(picture)
    return picture.getvalue()


def draw_loss(figure: Any, run: RunInfo, curves: dict[str, Curve]) -> None:
    """Draw the loss curves, with restarts as red lines and the text's entropy as a dashed line."""
    import numpy as np

    axes = figure.subplots()
    for name, style in STYLES.items():
        axes.plot(*curves[name], label=name, **style)
    steps, losses = (np.concatenate([curve[part] for curve in curves.values()]) for part in (0, 1))
    shown = losses[(steps >= UNSCALED * steps.max(initial=0)) & np.isfinite(losses)]
    if run.entropy_floor is not None:
        label = f"entropy of the text, {run.entropy_floor:.3f}"
        axes.axhline(run.entropy_floor, color="gray", linestyle="--", linewidth=1, label=label)
        shown = np.append(shown, run.entropy_floor)
    if shown.size:
        margin = 0.05 * np.ptp(shown) + 1e-3
        axes.set_ylim(shown.min() - margin, shown.max() + margin)
    if run.restarts:
        width, whole_height = max(0.3, 1.5 - 0.01 * len(run.restarts)), axes.get_xaxis_transform()
        label = f"restarts: {len(run.restarts)}"
        axes.vlines(run.restarts, 0, 1, "tab:red", lw=width, label=label, transform=whole_height, zorder=0.5)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    model = run.settings["model"]
    size = f"{model['n_layer']} layers x {model['n_embd']}, {run.parameters:,} parameters"
    axes.set_title(f"{run.run_dir.resolve().name}: {model['arch']}, {size}", parse_math=False)
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)


def main(arguments: Sequence[str]) -> int:
    """Draw what happened to a run over time, host by host: RUN/timeline.png, from RUN/run.json.

    A training job does it by itself, at each evaluation and at the end.
    """
    parser = CommandParser("python -m mingpt timeline", main.__doc__)
    parser.add_argument("run", metavar="RUN", help="run folder on a disk of this machine")
    run_dir = Path(parser.parse_args(arguments).run)
    path = run_dir / "timeline.png"
    try:
        picture = to_png(path.name, functools.partial(draw_timeline, run_dir=run_dir))
        # The job may write its own at the same time.
        write_atomic(path, picture, partial=run_dir / "timeline.drawn.png")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run_dir} has no run.json: give the folder of a run") from None
    except (OSError, BadJson, ImportError) as error:
        raise UserError(f"{path} cannot be drawn ({reason_of(error)})") from None
    write_lines([str(path)])
    return 0
