"""A compact GPT and a fault-tolerant trainer for it under torchrun. README.md describes the packages."""

import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    """Return `mingpt.load`, which loads a trained model. Raises AttributeError for any other name."""
    if name != "load":
        raise AttributeError(f"module 'mingpt' has no attribute {name!r}")
    return pkgutil.resolve_name("mingpt.tools.sample:load")
