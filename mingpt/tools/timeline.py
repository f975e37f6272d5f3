"""The command `timeline`: what the time of a run's last generations (workers between restarts) went to."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, check_json, read_json, reason_of
from mingpt.base.paths import typed_path
from mingpt.report.history import PHASES, Generation, History, plural
from mingpt.tools.pictures import write_picture

COLORS = {
    "start": "#a8b3bf",
    "training": "#5aa469",
    "evaluation": "#f2b33d",
    "waiting for snapshots": "#9a86cc",
    "lost": "#e07b73",
}
MAX_GENERATIONS = 20  # the most generations, counted from the last, that have a bar


def phase_seconds(one: Generation, after: Generation | None) -> list[float]:
    """Return the seconds that generation `one` spent in each phase of COLORS, in the order of COLORS.

    `after` is the next generation, or None if `one` is the last. The time of the steps that `after` repeated
    counts as lost. If `after` is a restart, the time between the last record of `one` (a step or its end) and
    the start of the workers of `after` is lost, too.
    """
    start_s, evaluation_s, wait_s = (one.phases.get(phase, 0.0) for phase in PHASES)
    steps_s, twice_s, pause_s = max(0.0, one.seconds - evaluation_s - wait_s), 0.0, 0.0
    if after is not None:
        twice_s = min(steps_s, max(0, one.to_step - after.from_step) * one.step_s)
        if after.restart:
            pause_s = max(0.0, after.began - after.phases.get("start_s", 0.0) - one.seen)
    return [start_s, steps_s - twice_s, evaluation_s, wait_s, twice_s + pause_s]


def draw_timeline(figure: Any, name: str, history: History) -> None:
    """Draw what the time of the last generations of the run `name` went to, and how each ended."""
    generations = history.generations
    pairs = [*zip_longest(generations, generations[1:])][-MAX_GENERATIONS:]
    seconds = np.array([phase_seconds(*pair) for pair in pairs]).T  # (phases, bars)
    figure.set_size_inches(11, 1.6 + 0.5 * len(pairs))
    axes = figure.subplots()
    for phase, part, end in zip(COLORS, seconds, seconds.cumsum(axis=0), strict=True):
        label = f"{phase}: {part.sum():,.0f} s"
        axes.barh(range(len(pairs)), part, left=end - part, color=COLORS[phase], label=label)
    ends = [
        f"steps {one.from_step} to {one.to_step}, {plural(one.workers, 'worker')}:\n{one.end:.60}"
        for one, _ in pairs
    ]
    axes.set_yticks(range(len(pairs)), ends, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a generation (sums for each kind of work, not in the order of time)")
    figure.suptitle(
        f"{name}: goodput {history.goodput:.1%}, {plural(len(generations), 'generation')}, "
        f"{history.steps_lost} steps done twice, {history.status}",
        parse_math=False,
    )
    figure.legend(loc="outside lower center", ncols=len(COLORS), frameon=False)


def main(arguments: Sequence[str]) -> int:
    """Draw RUN/timeline.png from RUN/run.json: what a run's time went to, and how its workers ended."""
    parser = CommandParser("python -m mingpt timeline", main.__doc__)
    parser.add_argument("run", type=typed_path, metavar="RUN", help="run folder on a disk of this machine")
    run_dir = Path(parser.parse_args(arguments).run)
    path = run_dir / "timeline.png"
    try:
        history = check_json(read_json(run_dir / "run.json"), History)
        write_picture(str(path), draw_timeline, run_dir.resolve().name, history)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run_dir} has no run.json: give the folder of a run") from None
    except (OSError, BadJson, ImportError) as error:
        raise UserError(f"{path} cannot be drawn ({reason_of(error)})") from None
    write_lines([str(path)])
    return 0
