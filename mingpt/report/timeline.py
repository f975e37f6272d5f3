"""timeline.png: what a run did when, and what happened to it, host by host; from its run.json alone."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt.base.files import check_json, read_json
from mingpt.report.history import Event, Generation, History, plural
from mingpt.report.plot import Picture

TIMELINE = "timeline.png"
# The phases of a bar, in their order; a run.json that was written before they were measured has the last one.
COLORS = {
    "start": "#a8b3bf",
    "steps done twice": "#e07b73",
    "training": "#5aa469",
    "evaluation": "#f2b33d",
    "waiting for snapshots": "#7d68b3",
    "not told apart": "#8fb4d9",
}
ORDERLY = {"finished": "#2f6d3b", "stopped": "#2b5c8f", "joined": "#2b5c8f", "left": "#2b5c8f"}
FAULT, EVENT = "#b3261e", "#555555"
LONGEST_PAUSE = 0.02  # of the time in generations; longer ones are cut out
LONGEST_RESTART = 2  # average generations, for the pause before a restart
BREAK_SHARE, BREAKS_SHARE = 0.03, 0.2  # of that time, what a break takes on the axis, and all of them
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
MIN_UNITS = 3  # on the axis
LABEL_SHARE = 0.025  # of the axis, between two words
MAX_WORD = 30  # characters
MAX_LINES = 60  # marks through all lanes; more of them are drawn above the lanes
WIDTH, LANE, MAX_LANES, REST = 11.0, 0.35, 30, 2.8  # inches, but for the number of lanes


@dataclass(frozen=True)
class Bar:
    """A generation on the axis."""

    left: float
    pieces: dict[str, float]  # phase: seconds, in the order of COLORS

    @property
    def right(self) -> float:
        return self.left + sum(self.pieces.values())


@dataclass(frozen=True)
class Mark:
    """Something that happened at `x`, in a few words."""

    x: float
    word: str
    color: str


@dataclass(frozen=True)
class Break:
    """A pause without any generation, cut out of the axis."""

    left: float
    width: float
    pause_s: float


class Timeline(Picture):
    name = TIMELINE

    def draw(self, collected: None) -> None:
        """Draw what run.json tells, which is written before a run ends. Raises OSError, BadJson."""
        draw_timeline(self.figure, self.run.run_dir, read_run(self.run.run_dir))


def read_run(run_dir: Path) -> History:
    """Raises OSError, BadJson."""
    return check_json(read_json(run_dir / "run.json"), History)


def split(generation: Generation, done: int) -> dict[str, float]:
    """{phase: seconds} of a generation after others that have done `done` steps."""
    wall_s = max(0.0, generation.seen - generation.began)
    seconds = wall_s if generation.seconds is None else generation.seconds
    phases = generation.phases
    if not phases:
        return {"not told apart": seconds}
    evaluation_s, wait_s = phases.get("evaluation_s", 0.0), phases.get("snapshot_wait_s", 0.0)
    steps_s = max(0.0, seconds - evaluation_s - wait_s)
    steps_twice = max(0, min(done, generation.to_step) - generation.from_step)
    twice_s = min(steps_s, steps_twice * generation.step_s)
    values = (phases.get("start_s", 0.0), twice_s, steps_s - twice_s, evaluation_s, wait_s)
    return dict(zip(COLORS, values, strict=False))


def lay_out(generations: Sequence[Generation]) -> tuple[list[Bar], list[Break]]:
    """The bars of all generations, on an axis without long pauses."""
    done, pieces = 0, []
    for generation in generations:
        pieces.append(split(generation, done))
        done = max(done, generation.to_step)
    busy_s = sum(sum(piece.values()) for piece in pieces)
    longest_pause_s = LONGEST_PAUSE * busy_s
    longest_restart_s = max(longest_pause_s, LONGEST_RESTART * busy_s / len(generations))
    x, bars, breaks = 0.0, list[Bar](), list[Break]()
    width = busy_s * min(BREAK_SHARE, BREAKS_SHARE / len(generations))
    for number, generation in enumerate(generations):
        if number:
            started = generation.began - generation.phases.get("start_s", 0.0)
            pause_s = max(0.0, started - generations[number - 1].seen)
            if pause_s > (longest_restart_s if generation.restart else longest_pause_s):
                breaks.append(Break(x, width, pause_s))
                x += width
            else:
                x += pause_s
        bars.append(Bar(x, pieces[number]))
        x = bars[-1].right
    return bars, breaks


def shorten(end: str) -> str:
    """A few words of how a generation ended."""
    words = end.removeprefix("the workers were ").removeprefix("the ")
    for stop in (" (", ";", ":"):
        words = words.partition(stop)[0]
    words = re.sub(r"workers \d+(, \d+){3,}", lambda found: f"{found[0].count(',') + 1} workers", words)
    return textwrap.shorten(words, MAX_WORD, placeholder=" ...")


def marks_of(generations: Sequence[Generation], bars: Sequence[Bar], events: Sequence[Event]) -> list[Mark]:
    """How each generation ended, from the last one to the first, then the events."""
    marks = []
    for bar, generation in reversed(list(zip(bars, generations, strict=True))):
        if generation.end != "running":
            colors = [color for word, color in ORDERLY.items() if word in generation.end.split()]
            marks.append(Mark(bar.right, shorten(generation.end), colors[0] if colors else FAULT))
    for event in events:
        if 0 < event.generation <= len(bars):
            bar, generation = bars[event.generation - 1], generations[event.generation - 1]
            x = bar.left + bar.pieces.get("start", 0.0) + max(0.0, event.at - generation.began)
            marks.append(Mark(min(x, bar.right), shorten(event.what), EVENT))
    return marks


def far_apart(marks: Sequence[Mark], distance: float) -> list[Mark]:
    """Those whose words do not cover that of an earlier one in `marks`."""
    kept: list[Mark] = []
    for mark in marks:
        if all(abs(mark.x - other.x) >= distance for other in kept):
            kept.append(mark)
    return kept


def unit_of(seconds: float) -> tuple[str, float]:
    """The largest unit of which there are some, and its seconds."""
    return next((unit for unit in UNITS if seconds >= MIN_UNITS * unit[1]), UNITS[-1])


def duration(seconds: float) -> str:
    name, unit_s = unit_of(seconds)
    return f"{seconds / unit_s:.0f} {name}"


def draw_timeline(figure: Any, run_dir: Path, history: History) -> None:
    """Draw a run on an empty figure of matplotlib's."""
    generations = history.generations
    bars, breaks = lay_out(generations)
    hosts = list(dict.fromkeys(host for one in generations for host in one.hosts)) or ["workers"]
    lanes = {host: number for number, host in enumerate(hosts)}
    end = bars[-1].right or 1.0
    figure.set_size_inches(WIDTH, REST + LANE * min(len(lanes), MAX_LANES))
    axes = figure.subplots()
    draw_bars(axes, bars, generations, lanes)
    draw_nodes(axes, bars, generations, lanes)
    marks = marks_of(generations, bars, history.events)
    whole_height = axes.get_xaxis_transform()
    is_dense = len(marks) > MAX_LINES
    bottom, width, share = (1.0, 0.6, 2 * LABEL_SHARE) if is_dense else (0.0, 1.2, LABEL_SHARE)
    named = far_apart(marks, share * end)
    axes.vlines(
        [mark.x for mark in marks],
        bottom,
        1.03,
        [mark.color for mark in marks],
        linewidth=width,
        transform=whole_height,
        clip_on=False,
    )
    style = {"fontsize": 8, "rotation_mode": "anchor", "transform": whole_height, "parse_math": False}
    for mark in named:
        axes.text(mark.x, 1.04, mark.word, rotation=35, color=mark.color, **style)
    for pause in breaks:
        right, middle = pause.left + pause.width, pause.left + pause.width / 2
        axes.axvspan(pause.left, right, facecolor="white", edgecolor="#999999", hatch="//", zorder=3)
        if pause.width >= LABEL_SHARE * end / 2:
            text = duration(pause.pause_s)
            axes.text(middle, 0.5, text, rotation=90, ha="center", va="center", bbox=WHITE, zorder=4, **style)
    draw_frame(axes, lanes, end)
    notes = ["the phases of a bar are totals, in this order"]
    notes += ["hatched: no generation, cut out"] * bool(breaks)
    notes += [f"{len(named)} of {len(marks)} marks are named"] * (len(named) < len(marks))
    axes.set_xlabel(f"{unit_of(end)[0]}; {'; '.join(notes)}")
    figure.suptitle(
        f"{run_dir.resolve().name}: goodput {history.goodput:.1%}, {plural(len(generations), 'generation')}, "
        f"{history.steps_lost} steps done twice, {history.status}",
        parse_math=False,
    )
    figure.legend(loc="outside lower center", ncols=8, fontsize=8, frameon=False)


def draw_bars(
    axes: Any, bars: Sequence[Bar], generations: Sequence[Generation], lanes: dict[str, int]
) -> None:
    """Draw a bar for each generation and host: one collection for each phase."""
    import numpy as np
    from matplotlib.collections import PolyCollection

    boxes: dict[str, list[list[tuple[float, float]]]] = {phase: [] for phase in COLORS}
    for bar, generation in zip(bars, generations, strict=True):
        left = bar.left
        for phase, seconds in bar.pieces.items():
            right = left + seconds
            for lane in {lanes[host] for host in generation.hosts} or {0}:
                top, bottom = lane - 0.38, lane + 0.38
                boxes[phase].append([(left, top), (right, top), (right, bottom), (left, bottom)])
            left = right
    for phase, color in COLORS.items():
        if boxes[phase]:
            corners = np.array(boxes[phase])  # (boxes, 4, 2): of a list it takes five times as long
            axes.add_collection(PolyCollection(corners, facecolor=color, linewidth=0, label=phase))


def draw_nodes(
    axes: Any, bars: Sequence[Bar], generations: Sequence[Generation], lanes: dict[str, int]
) -> None:
    """Draw where a host was not in the generation before, or is not in the one after."""
    came, went = list[tuple[float, int]](), list[tuple[float, int]]()
    for number in range(1, len(bars)):
        before, after = set(generations[number - 1].hosts), set(generations[number].hosts)
        came += [(bars[number].left, lanes[host]) for host in after - before]
        went += [(bars[number - 1].right, lanes[host]) for host in before - after]
    for places, marker, color, label in (
        (came, ">", "#2b5c8f", "node came"),
        (went, "X", FAULT, "node went"),
    ):
        if places:
            size = min(40.0, 2000 / len(places))
            axes.scatter(*zip(*places, strict=True), size, color, marker, label=label, zorder=4)


def draw_frame(axes: Any, lanes: dict[str, int], end: float) -> None:
    """Limits and ticks; of more than MAX_LANES hosts only some are named."""
    from matplotlib.ticker import MaxNLocator

    unit_s = unit_of(end)[1]
    ticks = MaxNLocator(10).tick_values(0, end / unit_s)
    axes.set_xticks([tick * unit_s for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set(xlim=(0, end), ylim=(len(lanes) - 0.5, -0.5))
    named = list(lanes)[:: 1 + (len(lanes) - 1) // MAX_LANES]
    axes.set_yticks([lanes[host] for host in named], named, parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
