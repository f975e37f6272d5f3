"""Run any command, with all its processes, on GPUs that a stand-in for CUDA and NCCL simulates.

    python tests/support/cuda/run.py --gpus 2 python train.py trainer.workers=2

It needs g++ and torch built for CUDA, but no GPU. Times say nothing about a GPU, because the CPU computes the
results. At the end it prints the records FORBIDDEN, MISMATCH and HAZARD (see Record). Its exit code is the
command's. Environment variables, with defaults in parentheses:

STANDIN_GPUS          number of GPUs, which --gpus sets; CUDA_VISIBLE_DEVICES chooses among them (1)
STANDIN_CAPABILITY    compute capability (8.0)
STANDIN_MEMORY_GB     memory of a GPU, GiB (80)
STANDIN_NCCL_FAIL     if set, no communicator can be made; the value is the reason
STANDIN_NCCL_NOTICES  1: NCCL reports an error when a peer has exited, as it does between nodes
STANDIN_NUMERICS      0: results are not computed, so that torch.compile works
STANDIN_DIR           folder for records and messages (a temporary folder)
"""

import argparse
import os
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = Path(sysconfig.get_paths()["purelib"]) / "triton" / "backends" / "nvidia" / "include"


@dataclass(frozen=True)
class Record:
    """An event that a process has recorded. The kinds besides ALLOCATION, CAPTURE and COLLECTIVE are:

    WAIT        the host waits for a GPU
    FORBIDDEN   a call that is not allowed while a stream captures
    MISMATCH    ranks call different collectives, or the stand-in cannot do what NCCL can
    HAZARD      an access to memory without waiting for another access
    """

    pid: int
    kind: str
    what: str
    place: str  # file, line and function of the program, or ""


def build(folder: Path) -> None:
    compiler = ["g++", "-O1", "-shared", "-fPIC", "-std=c++17", f"-I{INCLUDE}"]
    sources = [str(HERE / name) for name in ("order.cpp", "runtime.cpp", "nccl.cpp")]
    subprocess.run(
        [*compiler, "-o", str(folder / "libstandin.so"), *sources, "-ldl", "-lpthread"], check=True
    )
    driver = folder / "libcuda.so.1"
    subprocess.run([*compiler, "-o", str(driver), str(HERE / "driver.cpp")], check=True)


def environment(libraries: Path, records: Path, gpus: int = 1, **more: str) -> dict[str, str]:
    """Return the environment of a command that uses the stand-in; `more` has variables without STANDIN_."""
    path = os.pathsep.join(filter(None, [str(HERE / "hook"), os.environ.get("PYTHONPATH")]))
    return {
        "LD_PRELOAD": str(libraries / "libstandin.so"),
        "LD_LIBRARY_PATH": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "PYTHONPATH": path,
        "STANDIN_DIR": str(records),
        "STANDIN_GPUS": str(gpus),
    } | {f"STANDIN_{name}": value for name, value in more.items()}


def read_records(folder: Path) -> list[Record]:
    """Return the records of all processes in `folder`, one process after the other, each in order of time."""
    return [
        Record(int(path.stem), *line.split("\t"))
        for path in sorted(folder.glob("*.records"))
        for line in path.read_text().splitlines()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command on pretended GPUs.")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="standin-") as folder:
        build(Path(folder))
        records = Path(os.environ.get("STANDIN_DIR", folder))
        code = subprocess.run(
            given.command, env=os.environ | environment(Path(folder), records, given.gpus)
        ).returncode
        for record in read_records(records):
            if record.kind in ("FORBIDDEN", "MISMATCH", "HAZARD"):
                print(f"{record.kind} in process {record.pid}: {record.what} {record.place}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
