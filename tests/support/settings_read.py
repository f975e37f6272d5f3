"""The settings that a program reads, each as an attribute of a variable that holds its own section.

A section is known by its name, as in `config.trainer.device` or `trainer.device`, and by the annotation of a
parameter: after `config: DataConfig`, `config.path` reads data.path. A program is a module.
"""

import re
from collections.abc import Iterable, Sequence

from mingpt.config import Config


def read_settings(keys: Sequence[str], programs: Iterable[str]) -> set[str]:
    """The keys, of these dotted ones, that the source code of these programs reads."""
    read: set[str] = set()
    for program in programs:
        for key in keys:
            section, _, field = key.rpartition(".")
            holder = type(getattr(Config(), section)).__name__ if section else "Config"
            names = [section or "config", *re.findall(rf"(\w+): \"?{holder}\b", program)]
            if re.search(rf"\b(?:{'|'.join(names)})\.{field}\b(?! = )", program):
                read.add(key)
    return read
