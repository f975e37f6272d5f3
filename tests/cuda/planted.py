"""Which test of tests/cuda notices a fault that is put into a copy of the working tree?

    python tests/cuda/planted.py FAULTS.toml

The file has a table [[fault]] for each fault: `name`, `file` (a path from the root of the project), `old`,
which stands once in that file, and `new`. Each fault is planted alone, and the tests run until one fails.
Prints a line per fault.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [
    *(sys.executable, "-m", "pytest", "-n2", "--dist=load", "-x", "--tb=no", "-p", "no:cacheprovider"),
    *("-m", "", "-k", "not benchmark", "tests/cuda"),
]


def main() -> None:
    faults = tomllib.loads(Path(sys.argv[1]).read_text())["fault"]
    with tempfile.TemporaryDirectory() as folder:
        tree = shutil.copytree(
            ROOT, Path(folder, "tree"), ignore=shutil.ignore_patterns(".git", "out", "results")
        )
        for fault in faults:
            path = tree / fault["file"]
            intact = path.read_text()
            result = "cannot be planted: its old text does not stand there once"
            if intact.count(fault["old"]) == 1:
                path.write_text(intact.replace(fault["old"], fault["new"]))
                done = subprocess.run(PYTEST, cwd=tree, capture_output=True, text=True)
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                result = f"found by {failed[1]}" if failed else "not found"
                path.write_text(intact)
            print(f"{fault['name']}: {result}", flush=True)


if __name__ == "__main__":
    main()
