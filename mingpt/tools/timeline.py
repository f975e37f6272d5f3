"""Draw what happened to a run over time, host by host: RUN/timeline.png, from RUN/run.json.

A training job does it by itself, at each evaluation and at the end.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, reason_of, write_atomic
from mingpt.report.plot import to_png
from mingpt.report.timeline import draw_timeline


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt timeline", __doc__)
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
