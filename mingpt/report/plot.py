"""Pictures of a run, drawn in the background; loss.png: training and validation loss."""

import io
from array import array
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mingpt.report.files import SmallFile
from mingpt.report.metrics import RunInfo, Sink, Values

STYLES: dict[str, dict[str, Any]] = {
    "train/loss": {"color": "tab:blue", "alpha": 0.6, "linewidth": 1.0},
    "val/loss": {"color": "tab:orange", "marker": "o", "markersize": 3},
}
Curve = tuple["array[float]", "array[float]"]  # steps, losses
UNSCALED = 0.1  # of the steps: their losses, which fall fast, may leave the picture at its top
MARGIN = 0.05  # above and below the losses, of their range
# One thread for all drawings: each thread's malloc keeps what it has freed.
BACKGROUND = ThreadPoolExecutor(max_workers=1)


def new_figure() -> Any:
    """A figure with a canvas of its own, which holds the pixels of all drawings. Raises ImportError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # without one, each drawing would allocate its own
    return figure


def to_png(figure: Any) -> bytes:
    """The file's content."""
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


class Picture(Sink):
    """A picture of `draw`: at each evaluation, unless the one before is not finished, and at the end."""

    name: str  # of the file

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.file = SmallFile(run.run_dir / self.name, run.may_write)
        self.drawing: Future[None] | None = None
        self.figure: Any = None

    def collect(self) -> Any:
        """A copy of what is drawn: nothing that is drawn in the background may change."""

    def draw(self, collected: Any) -> None:
        """Draw on `figure`, which is empty."""
        raise NotImplementedError

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values and (self.drawing is None or self.drawing.done()):
            self.start_drawing()

    def start_drawing(self) -> Future[None]:
        self.drawing = BACKGROUND.submit(self.write, self.collect())
        return self.drawing

    def close(self) -> None:
        self.start_drawing().result()

    def write(self, collected: Any) -> None:
        """Draw the picture and write it; one line says why if that fails."""
        try:
            self.figure = self.figure or new_figure()
            self.figure.clear()
            self.draw(collected)
            self.file.write(to_png(self.figure))
        except Exception as error:  # matplotlib's own, or it is not installed: no reason to end a run
            self.file.status.failed(error)


class LossPlot(Picture):
    """Restarts are red lines, the text's entropy is a dashed one."""

    name = "loss.png"

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.curves: dict[str, Curve] = {name: (array("d"), array("d")) for name in STYLES}

    def replay(self, step: int, values: Values) -> None:
        for name, (steps, losses) in self.curves.items():
            if isinstance(values.get(name), (int, float)):
                steps.append(step)
                losses.append(values[name])

    def log(self, step: int, values: Values) -> None:
        self.replay(step, values)
        super().log(step, values)

    def collect(self) -> dict[str, Curve]:
        # A copy: an array cannot grow while somebody reads it.
        return {name: (steps[:], losses[:]) for name, (steps, losses) in self.curves.items()}

    def draw(self, collected: dict[str, Curve]) -> None:
        """Draw {name: curve}."""
        self.figure.set_size_inches(8, 4.5)
        axes = self.figure.subplots()
        for name, style in STYLES.items():
            axes.plot(*collected[name], label=name, **style)
        restarts, floor = self.run.restarts, self.run.entropy_floor
        if restarts:
            label = "restart" if len(restarts) == 1 else f"{len(restarts)} restarts"
            whole_height = axes.get_xaxis_transform()
            width = 1.5 if len(restarts) < 50 else 0.5
            axes.vlines(restarts, 0, 1, "tab:red", lw=width, label=label, transform=whole_height)
        if floor is not None:
            label = f"entropy of the text, {floor:.3f}"
            axes.axhline(floor, color="gray", linestyle="--", linewidth=1, label=label)
        limits = loss_limits(collected, floor)
        if limits is not None:
            axes.set_ylim(*limits)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.set_title(title_of(self.run), parse_math=False)
        axes.legend(loc="upper right")
        axes.grid(alpha=0.3)


def loss_limits(curves: Mapping[str, Curve], floor: float | None) -> tuple[float, float] | None:
    """The lowest and the highest loss to show: of all but the first steps. None if there are too few."""
    import numpy as np

    steps, losses = (np.concatenate([curve[part] for curve in curves.values()]) for part in (0, 1))
    shown = losses[(steps > UNSCALED * steps.max(initial=0)) & np.isfinite(losses)]
    if len(np.unique(shown)) < 3:
        return None
    low, high = float(shown.min()), float(shown.max())
    low = low if floor is None else min(low, floor)
    margin = MARGIN * (high - low)
    return low - margin, high + margin


def title_of(run: RunInfo) -> str:
    """The run's name and, where the settings are known, its model."""
    name, model = run.run_dir.resolve().name, run.settings.get("model")
    if not model:
        return name
    size = f", {run.parameters:,} parameters" if run.parameters else ""
    return f"{name}: {model['arch']}, {model['n_layer']} layers x {model['n_embd']}{size}"
