"""Do the tests find faults? Each fault of planted.toml is put into a copy of the program and tested there.

    python benchmarks/planted.py                 # all 60, half an hour on two cores
    python benchmarks/planted.py --faults 7 22   # only these, by their number from 1

Prints a row per fault, as JSON, with the first test that has failed, or null. Exit code 1 if a fault cannot
be planted or no test has found it.
"""

import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from common import argument_parser, row, work_folder

from mingpt.tools.jobs import ROOT

# Jobs of real workers in tests/jobs/ that go through a package, in addition to the tests in tests/<package>.
JOBS = {
    "anynode": ["test_nodes"], "extras": ["test_any_number_of_workers"],
    "base": ["test_bad_input"], "config": ["test_bad_input", "test_resuming"],
    "data": ["test_any_number_of_workers", "test_token_data"],
    "distributed": ["test_stopping", "test_restarts", "test_bad_input"], "launch": ["test_plain_python"],
    "model": ["test_sampling"], "optim": ["test_any_number_of_workers"],
    "parallel": ["test_any_number_of_workers"], "report": ["test_resuming"],
    "snapshot": ["test_bad_input", "test_resuming", "test_restarts"],
    "tools": ["test_doctor_jobs", "test_own_models", "test_token_data"],
    "training": ["test_resuming", "test_stopping"],
}  # fmt: skip
# The hook for DDP is compared with strategies.
ELSEWHERE = {"extras": ["tests/parallel/test_strategies.py"]}
PYTEST = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider"]


def copy_tree(target: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in names.stdout.split("\0"):
        source = ROOT / name
        if name and source.is_file() and not name.startswith("benchmarks/results"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def first_failure(tree: Path, paths: list[str], marker: str) -> str | None:
    existing = [path for path in paths if (tree / path).exists()]
    if not existing:
        return None
    command = [*PYTEST, "-k", "not gpu_benchmark", "-m", marker, *existing]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode in (0, 5):  # 5: no test has this marker
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"pytest: {done.stdout[-300:]}"


def find(tree: Path, file: str) -> str | None:
    top, below = Path(file).parts[:2]
    package = below if top == "mingpt" else top
    units = [f"tests/{package}", *ELSEWHERE.get(package, [])]
    jobs = [f"tests/jobs/{name}.py" for name in JOBS[package]]
    rounds = [(units, "not slow and not weekly"), (jobs, "not weekly"), (units, "slow"), (jobs, "weekly")]
    return next(filter(None, (first_failure(tree, paths, marker) for paths, marker in rounds)), None)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--faults", type=int, nargs="+", metavar="NUMBER")
    arguments = parser.parse_args()
    faults = tomllib.loads((ROOT / "benchmarks/planted.toml").read_text())["fault"]
    missed = 0
    with work_folder() as tree:
        copy_tree(tree)
        for number, fault in enumerate(faults, start=1):
            if arguments.faults and number not in arguments.faults:
                continue
            began, path = time.monotonic(), tree / fault["file"]
            intact = path.read_text()
            is_there = intact.count(fault["old"]) == 1
            path.write_text(intact.replace(fault["old"], fault["new"]))
            found = find(tree, fault["file"]) if is_there else None
            path.write_text(intact)
            missed += found is None
            seconds = round(time.monotonic() - began, 1)
            row(fault=number, name=fault["name"], planted=is_there, found=found, seconds=seconds)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
