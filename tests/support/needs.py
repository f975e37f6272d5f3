"""Checks that the system has what a test needs. conftest.py skips a test that raises FacilityMissing."""

import os
from types import ModuleType


class FacilityMissing(RuntimeError):
    """This system lacks something that a test needs; the message names it."""


def need_proc() -> None:
    if not os.path.exists("/proc/self"):
        raise FacilityMissing("there is no /proc, in which this test looks at processes and their files")


def need(module: ModuleType, name: str) -> None:
    if not hasattr(module, name):
        raise FacilityMissing(f"this system's Python has no {module.__name__}.{name}")
