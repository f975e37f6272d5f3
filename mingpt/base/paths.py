"""Paths and URLs as people type them, on a command line or in a configuration file."""

import argparse
import contextlib
import os
import re
from pathlib import Path

from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.base.urls import redact

# {pattern of a text that cannot be meant as a path: why, and what to write instead}, in the order of trial.
REFUSED = {
    r"(?i)\A(none|null|)\Z": "is not a path: leave it out, or write ./NAME for a file of that name",
    r"[\x00-\x1f\x7f-\x9f]": "has a line end or another control character in it: leave that out",
    r"\$[A-Za-z_{]": "has a variable in it, which is not replaced here: write its value",
    r"\A~": "begins with a home folder that is not known: write its path, or ./~NAME for a file of that name",
    r"\A(?!.*://).*::": "has :: in it, which joins URLs and may not be in a local path: rename the file",
    r"\A(?!.*://).*[^/]{256}": "has a name of more than 255 characters in it: shorten it",
}


class WrongPath(UserError, argparse.ArgumentTypeError):
    """A text that `typed_path` refuses. argparse shows the message if an argument's type is `typed_path`."""


def typed_path(text: str, what: str = "the path") -> str:
    """Return `text`, a path or URL, with the home folder in place of ~ or ~user at its beginning.

    Raises WrongPath for a text that is probably a mistake, such as "none" or "$HOME/x" (variables are not
    replaced). The error's message begins with `what`.
    """
    path = os.path.expanduser(text)
    shown = redact(path)  # a password or a query may have a $ in it
    for pattern, why in REFUSED.items():
        if re.search(pattern, shown):
            raise WrongPath(f"{what} {text!r} {why}")
    return path


def refuse_pipe(path: str, what: str) -> None:
    """Raise UserError if `path` is a named pipe, because reading it could wait forever for a writer.

    The message begins with `what`.
    """
    real = os.path.realpath(path.removeprefix("file://"))  # a shell's <(command) has one that does not exist
    with contextlib.suppress(OSError):  # reading it will raise this error again
        if Path(real).is_fifo():
            raise UserError(f"{what} {path} is a named pipe: write its content to a file")


def describe_obstacle(path: str | Path, error: BaseException) -> str:
    """Return why no folder could be made at `path`.

    If `path` or a parent of `path` exists and is not a folder, the reason names this obstacle. Otherwise the
    reason is `reason_of(error)`.
    """
    for place in (Path(path), *Path(path).parents):
        if os.path.lexists(place) and not os.path.isdir(place):
            link = f"a link to {os.readlink(place)}, which is " if os.path.islink(place) else ""
            return f"{place} is {link}not a folder"
    return reason_of(error)
