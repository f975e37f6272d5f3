"""Counts the lines of the functions that a start runs before its first backward pass, and its collectives.

    python benchmarks/start_path.py                          # two minutes
    python benchmarks/start_path.py --against CHECKOUT       # also another commit of this project

The default configuration, not compiled, starts with two workers under torchrun: first a fresh run, then the
same run, which resumes. Until the forward pass of the first micro-batch ends, rank 0 notes each function of
mingpt/ and train.py that any thread enters. `functions`, `files` and `lines` count these functions, their
files and their lines (with docstrings), each once. `collectives` is the number of rank 0's calls of
torch.distributed that exchange something before the event run_start. Prints a row per start, as JSON.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

SETTINGS = ["trainer.compile=false", "trainer.device=cpu", "snapshot.every=2", "snapshot.resume=changed"]
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single",
    "barrier", "broadcast", "gather", "reduce", "reduce_scatter_tensor", "scatter",
)  # fmt: skip


def run_traced(kind: str, checkout: Path, output: Path) -> None:
    """Run train.py of `checkout` in this process; rank 0 writes what it counts to `output`, as JSON.

    `kind` is "lines" or "collectives". Before the call, nothing of this project may be imported.
    """
    sys.path.insert(0, str(checkout))
    from mingpt.base import events

    if os.environ["RANK"] == "0" and kind == "lines":
        entered: dict[str, set[int]] = {}  # path -> first lines of the functions
        note = functools.partial(note_call, f"{checkout}{os.sep}", entered)

        def write_lines(step: int, micro_batch: int) -> None:
            sys.setprofile(None)
            if not output.exists():
                output.write_text(json.dumps({path: [*numbers] for path, numbers in entered.items()}))

        events.subscribe("forward_end", write_lines)
        threading.setprofile(note)
        sys.setprofile(note)
    elif os.environ["RANK"] == "0":
        called = count_collectives()

        def write_count(state: Any, strategy: Any) -> None:
            output.write_text(json.dumps(len(called)))

        events.subscribe("run_start", write_count)
    from mingpt.launch import train

    train.main()


def note_call(prefix: str, entered: dict[str, set[int]], frame: FrameType, event: str, _: object) -> None:
    """Add the called function to `entered`, if the path of the function's file begins with `prefix`."""
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(prefix):
        entered.setdefault(code.co_filename, set()).add(code.co_firstlineno)


def count_collectives() -> list[str]:
    """Wrap the functions in COLLECTIVES; return a list to which each call, in any thread, adds its name."""
    import torch.distributed

    called = list[str]()

    def counted(name: str, collective: Any) -> Any:
        @functools.wraps(collective)
        def call(*args: Any, **options: Any) -> Any:
            called.append(name)
            return collective(*args, **options)

        return call

    for name in COLLECTIVES:
        if hasattr(torch.distributed, name):
            wrapped = counted(name, getattr(torch.distributed, name))
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                setattr(module, name, wrapped)
    return called


def count_lines(path: Path, entered: set[int]) -> tuple[int, int]:
    """Return how many functions of a file begin at a line in `entered`, and how many lines they have."""
    functions, lines = 0, set[int]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in entered:
                functions += 1
                lines |= {*range(first, node.end_lineno + 1)}
    return functions, len(lines)


def main() -> None:
    from common import argument_parser, row, work_folder

    from mingpt.tools.jobs import ROOT, clean_environment, torchrun

    parser = argument_parser(__doc__)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    arguments = parser.parse_args()
    for checkout in filter(None, [ROOT, arguments.against]):
        with work_folder() as folder:
            for start, max_steps in (("fresh", 4), ("resumed", 6)):
                found: dict[str, Any] = {}
                for kind in ("lines", "collectives"):
                    program = [__file__, "--trace", kind, str(checkout), str(folder / f"{start}-{kind}")]
                    settings = [f"run_dir={folder / kind}", f"trainer.max_steps={max_steps}", *SETTINGS]
                    subprocess.run(
                        [*torchrun(2), *program, *settings],
                        check=True,
                        capture_output=True,
                        cwd=checkout,
                        env=clean_environment(),
                    )
                    found[kind] = json.loads((folder / f"{start}-{kind}").read_text())
                counts = [count_lines(Path(path), {*at}) for path, at in found["lines"].items()]
                row(
                    checkout=checkout.name,
                    start=start,
                    lines=sum(lines for _, lines in counts),
                    functions=sum(functions for functions, _ in counts),
                    files=sum(functions > 0 for functions, _ in counts),
                    collectives=found["collectives"],
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trace"]:
        kind, checkout, output = sys.argv[2:5]
        sys.argv = [f"{checkout}/train.py", *sys.argv[5:]]
        run_traced(kind, Path(checkout), Path(output))
    else:
        main()
