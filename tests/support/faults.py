"""Simulates a disk that is full, or broken, for some files."""

import errno
import os
from typing import Any

import pytest

from support.jobs import need, need_proc


def path_of(descriptor: int) -> str:
    need_proc()
    return os.readlink(f"/proc/self/fd/{descriptor}")


class FaultyDisk:
    """Makes os.<function> raise OSError with `code` for paths that contain `name`, while `broken` is true.

    `hits` counts the errors. With `partly` (only for os.write), every other call writes half of its data.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        function: str,
        name: str,
        code: int = errno.ENOSPC,
        *,
        partly: bool = False,
    ) -> None:
        self.function, self.name, self.code, self.partly = function, name, code, partly
        need(os, function)
        self.real = getattr(os, function)
        self.broken, self.hits, self.is_half_done = True, 0, False
        monkeypatch.setattr(os, function, self.call)

    def call(self, target: Any, *more: Any, **named: Any) -> Any:
        place = path_of(target) if isinstance(target, int) else str(target)
        if not self.broken or self.name not in place:
            return self.real(target, *more, **named)
        if self.partly and not self.is_half_done:
            self.is_half_done = True
            return self.real(target, more[0][: len(more[0]) // 2])
        self.is_half_done = False
        self.hits += 1
        raise OSError(self.code, os.strerror(self.code))
