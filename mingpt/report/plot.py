"""Plots of a run: loss.png (training and validation loss) and timeline.png (what it did when, host by host).

The timeline is drawn from run.json alone. While a run trains, both are drawn in the background.
"""

import functools
import io
import re
import textwrap
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import Any

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, check_json, read_json, reason_of, write_atomic
from mingpt.base.paths import typed_path
from mingpt.report.files import SmallFile
from mingpt.report.history import PHASES, Generation, History, plural
from mingpt.report.metrics import RunInfo, Sink, Values

STYLES: dict[str, dict[str, Any]] = {
    "train/loss": {"color": "tab:blue", "alpha": 0.6, "linewidth": 1.0},
    "val/loss": {"color": "tab:orange", "marker": "o", "markersize": 3},
}
Curve = tuple["array[float]", "array[float]"]  # steps, losses
UNSCALED = 0.1  # the losses of this first share of the steps fall fast, and do not set the y-axis's range
# The phases of a bar, in their order. A run.json older than these measurements has only the last one.
COLORS = {
    "start": "#a8b3bf",
    "steps done twice": "#e07b73",
    "training": "#5aa469",
    "evaluation": "#f2b33d",
    "waiting for snapshots": "#7d68b3",
    "not told apart": "#8fb4d9",
}
ORDERLY, FAULT = "#2b5c8f", "#b3261e"
UNITS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
MAX_NAMES = 30  # host names on the axis
Edges = list[list[float]]  # per generation, the phases + 1 edges of its phases on the axis, in seconds


class LossPlot(Sink):
    """Draws loss.png, then timeline.png from run.json, in a thread. A failure is logged and ends no run.

    It draws at each evaluation, unless the last drawing is not finished yet; `close` draws and waits.
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
        """Draw both plots and write them. Raises nothing: one line says why a plot cannot be made."""
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
    """Return the matplotlib figure of this name, which its drawings reuse in turn. Raises ImportError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # without this canvas, each drawing would allocate one
    return figure


def to_png(name: str, draw: Callable[[Any], None]) -> bytes:
    """Empty the figure of this name, call `draw` with it, and return it as a PNG. Raises ImportError."""
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


def split(generation: Generation, done: int) -> list[float]:
    """Return a generation's seconds in each phase of COLORS; earlier generations had come to step `done`."""
    seconds = generation.seconds or max(0.0, generation.seen - generation.began)
    if not generation.phases:
        return [0.0, 0.0, 0.0, 0.0, 0.0, seconds]
    start_s, evaluation_s, wait_s = (generation.phases.get(phase, 0.0) for phase in PHASES)
    steps_s = max(0.0, seconds - evaluation_s - wait_s)
    steps_twice = max(0, min(done, generation.to_step) - generation.from_step)
    twice_s = min(steps_s, steps_twice * generation.step_s)
    return [start_s, twice_s, steps_s - twice_s, evaluation_s, wait_s, 0.0]


def lay_out(generations: Sequence[Generation]) -> tuple[Edges, list[tuple[float, float, float]]]:
    """Return the edges of the phases on an axis of seconds, and the pauses cut out of it.

    A pause in which nothing ran is cut out if it is longer than an average generation. Each is returned
    as its left edge and width on the axis, and its true seconds. There must be at least one generation.
    """
    busy_s = sum(max(0.0, one.seen - one.began) for one in generations)
    starts = [one.began - one.phases.get("start_s", 0.0) for one in generations]
    ends = [starts[0], *(one.seen for one in generations[:-1])]
    pauses = [max(0.0, start - end) for start, end in zip(starts, ends, strict=True)]
    are_cut = [pause_s > busy_s / len(generations) for pause_s in pauses]
    width = busy_s * min(0.03, 0.2 / max(1, sum(are_cut)))
    done, right, edges, cuts = 0, 0.0, Edges(), []
    for one, pause_s, is_cut in zip(generations, pauses, are_cut, strict=True):
        if is_cut:
            cuts.append((right, width, pause_s))
        left = right + (width if is_cut else pause_s)
        edges.append(list(accumulate([left, *split(one, done)])))
        right, done = edges[-1][-1], max(done, one.to_step)
    return edges, cuts


def shorten(end: str) -> str:
    """Shorten a phrase on how a generation ended to at most 34 characters."""
    words = re.split(r" \(|;|:", end.removeprefix("the workers were ").removeprefix("the "))[0]
    words = re.sub(r"workers \d+(, \d+){3,}", lambda ranks: f"{ranks[0].count(',') + 1} workers", words)
    return textwrap.shorten(words, 34, placeholder=" ...")


def unit_of(seconds: float) -> str:
    """Return the largest unit of UNITS of which `seconds` holds at least three, else "seconds"."""
    return next((name for name, unit_s in UNITS.items() if seconds >= 3 * unit_s), "seconds")


def draw_timeline(figure: Any, run_dir: Path) -> None:
    """Draw a run's timeline on an empty figure. Raises OSError or BadJson if its run.json is unusable."""
    from matplotlib.ticker import MaxNLocator

    history = check_json(read_json(run_dir / "run.json"), History)
    edges, cuts = lay_out(history.generations)
    hosts = list(dict.fromkeys(host for one in history.generations for host in one.hosts)) or ["workers"]
    figure.set_size_inches(11, 2.8 + 0.35 * min(len(hosts), MAX_NAMES))
    axes, end = figure.subplots(), edges[-1][-1] or 1.0
    unit = unit_of(end)
    draw_bars(axes, history.generations, edges, hosts)
    draw_ends(axes, history.generations, edges)
    style = {"transform": axes.get_xaxis_transform(), "zorder": 3}
    hatched = {"facecolor": "white", "edgecolor": "gray", "hatch": "//", **style}
    axes.broken_barh([cut[:2] for cut in cuts], (0, 1), label="cut out" if cuts else None, **hatched)
    upright = {"rotation": 90, "size": 8, "ha": "center", "va": "center", "backgroundcolor": "white", **style}
    for left, width, pause_s in cuts:
        pause = f"{pause_s / UNITS[unit_of(pause_s)]:.0f} {unit_of(pause_s)}"
        axes.text(left + width / 2, 0.5, pause if width > 0.01 * end else "", **upright)
    ticks = MaxNLocator(10).tick_values(0, end / UNITS[unit])
    axes.set_xticks([tick * UNITS[unit] for tick in ticks], [f"{tick:g}" for tick in ticks])
    lanes = range(0, len(hosts), 1 + (len(hosts) - 1) // MAX_NAMES)
    axes.set_yticks(lanes, [hosts[lane] for lane in lanes], parse_math=False)
    axes.set(xlim=(0, end), ylim=(len(hosts) - 0.5, -0.5))
    axes.set_xlabel(f"{unit}; the phases of a bar are totals, in this order")
    told = f"{plural(len(edges), 'generation')}, {history.steps_lost} steps done twice, {history.status}"
    name = run_dir.resolve().name
    figure.suptitle(f"{name}: goodput {history.goodput:.1%}, {told}", parse_math=False)
    handles, labels = axes.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))  # each phase once
    figure.legend(
        legend.values(), legend.keys(), loc="outside lower center", ncols=8, fontsize=8, frameon=False
    )


def draw_bars(axes: Any, generations: Sequence[Generation], edges: Edges, hosts: Sequence[str]) -> None:
    """Draw a bar for each generation and host, and a mark where a host came or went between generations."""
    came, went = [], []
    for lane, host in enumerate(hosts):
        is_there = [host in (one.hosts or hosts[:1]) for one in generations]
        bars = list(compress(edges, is_there))
        for number, (phase, color) in enumerate(COLORS.items()):
            spans = [(edge[number], edge[number + 1] - edge[number]) for edge in bars]
            if any(seconds for _, seconds in spans):
                axes.broken_barh(spans, (lane - 0.38, 0.76), color=color, linewidth=0, label=phase)
        for number, (before, now) in enumerate(pairwise(is_there)):
            if now and not before:
                came.append((edges[number + 1][0], lane))
            if before and not now:
                went.append((edges[number][-1], lane))
    for places, color, marker, label in ((came, ORDERLY, ">", "node came"), (went, FAULT, "X", "node went")):
        if places:
            size = min(40.0, 2000 / len(places))
            axes.scatter(*zip(*places, strict=True), size, color, marker=marker, zorder=4, label=label)


def draw_ends(axes: Any, generations: Sequence[Generation], edges: Edges) -> None:
    """Mark where generations ended, and name as many ends as there is room for, the last ones first."""
    ends = [(edge[-1], one.end) for one, edge in zip(generations, edges, strict=True) if one.end != "running"]
    colors = [ORDERLY if re.match("finished|stopped|.* joined$", how) else FAULT for _, how in ends]
    # If there are many ends, their marks are above the lanes, else they cross all lanes.
    lowest = 1.0 if len(ends) > 60 else 0.0
    style = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    axes.vlines([x for x, _ in ends], lowest, 1.03, colors, linewidth=1, **style)
    free_x, words_style = float("inf"), style | {"rotation_mode": "anchor", "parse_math": False}
    for (x, how), color in reversed(list(zip(ends, colors, strict=True))):
        if x <= free_x:
            axes.text(x, 1.04, shorten(how), rotation=35, size=8, color=color, **words_style)
            free_x = x - 0.035 * edges[-1][-1]


def main(arguments: Sequence[str]) -> int:
    """Draw what happened to a run over time, host by host: RUN/timeline.png, from RUN/run.json.

    A training job does it by itself, at each evaluation and at the end.
    """
    parser = CommandParser("python -m mingpt timeline", main.__doc__)
    parser.add_argument("run", type=typed_path, metavar="RUN", help="run folder on a disk of this machine")
    run_dir = Path(parser.parse_args(arguments).run)
    path = run_dir / "timeline.png"
    try:
        picture = to_png(path.name, functools.partial(draw_timeline, run_dir=run_dir))
        # The job may write its own timeline.png at the same time.
        write_atomic(path, picture, partial=run_dir / "timeline.drawn.png")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run_dir} has no run.json: give the folder of a run") from None
    except (OSError, BadJson, ImportError) as error:
        raise UserError(f"{path} cannot be drawn ({reason_of(error)})") from None
    write_lines([str(path)])
    return 0
