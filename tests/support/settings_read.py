"""Finds the settings that source code reads from a section of the configuration, as attributes.

A section is recognised by its name, as in `config.trainer.device` or `trainer.device`, or by an annotation.
In a file with `config: DataConfig`, `config.path` reads data.path.
"""

import re
from collections.abc import Iterable, Sequence

from mingpt.config import Config


def read_settings(keys: Sequence[str], programs: Iterable[str]) -> set[str]:
    """Return the `keys` (dotted names of settings) that the source texts in `programs` read."""
    read: set[str] = set()
    for program in programs:
        for key in keys:
            section, _, field = key.rpartition(".")
            holder = type(getattr(Config(), section)).__name__ if section else "Config"
            names = [section or "config", *re.findall(rf"(\w+): \"?{holder}\b", program)]
            if re.search(rf"\b(?:{'|'.join(names)})\.{field}\b(?! = )", program):
                read.add(key)
    return read
