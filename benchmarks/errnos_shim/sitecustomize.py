"""Make functions of `os` and `open` fail for some paths, in Python processes that import this file.

While the file $ERRNOS_CONTROL exists, it has an errno's name and the beginning of the paths that fail. A full
or read-only disk only refuses to write; all other errnos also fail when a file is read or looked for.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable
from typing import Any

WRITING = ("mkdir", "replace", "rename", "fsync", "truncate", "utime", "chmod", "write")
READING = ("stat", "lstat", "listdir", "scandir", "unlink", "remove", "rmdir", "access")
ONLY_WRITING = ("ENOSPC", "EDQUOT", "EROFS", "EINVAL")
read = io.FileIO


def failing(function: Callable[..., Any], writes: bool) -> Callable[..., Any]:
    """Return `function` with the faults; `writes` says whether it changes the disk."""

    def call(path: Any, *more: Any, **named: Any) -> Any:
        try:
            with read(os.environ["ERRNOS_CONTROL"]) as file:
                name, begin = file.read().decode().split()
        except (OSError, ValueError):
            return function(path, *more, **named)
        place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        mode = str(more[0] if more else named.get("mode", "r"))
        is_write = writes or (function is real_open and mode.strip("rbt") != "")
        if place.startswith(begin) and (is_write or name not in ONLY_WRITING):
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), place)
        return function(path, *more, **named)

    return call


real_open = open
for name in (*WRITING, *READING):
    setattr(os, name, failing(getattr(os, name), name in WRITING))
builtins.open = io.open = failing(real_open, False)  # type: ignore[assignment]
