"""Draw what happened to a run over time, host by host: RUN/timeline.png, from RUN/run.json.

A training job does it by itself, at each evaluation and at the end.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, reason_of, write_atomic
from mingpt.report.plot import new_figure, to_png
from mingpt.report.timeline import TIMELINE, draw_timeline, read_run


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt timeline", __doc__)
    parser.add_argument("run", metavar="RUN", help="run folder on a disk of this machine")
    write_lines([str(draw(Path(parser.parse_args(arguments).run)))])
    return 0


def draw(run_dir: Path) -> Path:
    """Draw the picture of a run; returns its path. Raises UserError."""
    try:
        history = read_run(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run_dir} has no run.json: give the folder of a run") from None
    except (OSError, BadJson) as error:
        raise UserError(f"{run_dir / 'run.json'} cannot be used ({reason_of(error)})") from None
    path = run_dir / TIMELINE
    try:
        figure = new_figure()
        draw_timeline(figure, run_dir, history)
        # The job may write its own at the same time.
        write_atomic(path, to_png(figure), path.with_name(f"{TIMELINE}.{os.getpid()}"))
    except ImportError as error:
        raise UserError(
            f"a picture needs matplotlib, which cannot be imported ({reason_of(error)})"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({reason_of(error)})") from None
    return path
