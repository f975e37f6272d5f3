"""Gives each Python process of a command on the CUDA stand-in its arithmetic, once the program imports torch."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class InstallAfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and has numerics.py installed when its import ends."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                sys.path.append(str(Path(__file__).parents[1]))
                try:
                    import numerics
                finally:
                    sys.path.pop()
                numerics.install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, InstallAfterTorch())
