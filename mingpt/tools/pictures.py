"""Pictures that commands write, without replacing files of other programs."""

import errno
import os
from collections.abc import Callable

from mingpt.base.files import write_atomic
from mingpt.report.plot import MADE_BY, to_png


def write_picture(path: str, draw: Callable[..., object], *sources: object) -> None:
    """Let `draw(figure, *sources)` draw into a matplotlib figure, and write the figure to `path` as a PNG.

    An earlier picture of this program is replaced. Raises FileExistsError if another file is at `path`,
    OSError if the picture cannot be written, and the errors of `to_png`, such as ImportError.
    """
    if os.path.lexists(path):
        with open(path, "rb") as file:
            if MADE_BY.encode() not in file.read(200):
                raise FileExistsError(errno.EEXIST, "it is no picture of this program")
    write_atomic(path, to_png(draw, *sources))
