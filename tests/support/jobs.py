"""Starts jobs, watches their processes and reads their run folders."""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mingpt.base.files import read_json
from mingpt.tools.jobs import ROOT, clean_environment, torchrun  # noqa: F401 - tests import them from here


class FacilityMissing(RuntimeError):
    """This system lacks something that a test needs; the message names it."""


def need_proc() -> None:
    if not os.path.exists("/proc/self"):
        raise FacilityMissing("there is no /proc, in which this test looks at processes and their files")


def need(module: ModuleType, name: str) -> None:
    if not hasattr(module, name):
        raise FacilityMissing(f"this system's Python has no {module.__name__}.{name}")


POLL_S = 0.01


def state_of(pid: int) -> str:
    """The process's state in /proc, such as R, S, D, T or Z; X if there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_alive(pid: int) -> bool:
    return state_of(pid) not in "ZX"


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (*descendants(child), child)]


def send_to(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {timeout_s} s")
        time.sleep(POLL_S)


class Job:
    """A command that the constructor starts. Its output is appended to `<output>.out` and `<output>.err`."""

    def __init__(self, command: Sequence[str], output: Path, *, cwd: Path = ROOT, **env: str) -> None:
        self.out_path, self.err_path = Path(f"{output}.out"), Path(f"{output}.err")
        with open(self.out_path, "ab") as out, open(self.err_path, "ab") as err:
            self.process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=clean_environment(**env),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def workers(self) -> list[int]:
        need_proc()
        found = []
        for pid in filter(is_alive, children(self.pid)):
            with contextlib.suppress(OSError):  # the process has just ended
                if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_s: float = 120) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(
                f"not done after {timeout_s} s:\n{self.out()[-2000:]}\n{self.err()[-4000:]}"
            ) from None

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = 90) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if not self.is_running():
                raise RuntimeError(
                    f"the job ended with code {self.process.returncode}:\n{self.err()[-4000:]}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so after {timeout_s} s:\n{self.err()[-4000:]}")
            time.sleep(POLL_S)
        return value

    def kill(self) -> None:
        send_to(signal.SIGKILL, [*descendants(self.pid), self.pid])
        self.process.wait()

    def out(self) -> str:
        return self.out_path.read_text()

    def err(self) -> str:
        return self.err_path.read_text()


def read_history(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(read_json(run_dir / "run.json"))
    except OSError:
        return {"status": "none", "generations": []}


def tensor_hash(run_dir: Path, step: int | None = None) -> str:
    """One SHA-256 for the tensor files of a snapshot (`step` None: the newest); "none" if there is none."""
    folder = run_dir / "snapshots"
    manifests = sorted(folder.glob("step_*.json" if step is None else f"step_{step:08d}.json"))
    if not manifests:
        return "none"
    names = [file["name"] for file in read_json(manifests[-1])["files"]]
    tensor_files = [folder / name for name in names if name.endswith(".safetensors")]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in tensor_files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def free_port() -> int:
    """A port below those that the system gives to connections, since other jobs connect until it is used."""
    port = random.randrange(15_000, 32_000)
    with socket.socket() as probe:
        return port if probe.connect_ex(("127.0.0.1", port)) else free_port()


def recorded(run_dir: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    """(step, value) of a metric's records in metrics.jsonl, in order, without a line that is not complete."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record[name]) for record in records if name in record]


def read_metric(run_dir: Path, name: str = "train/loss") -> dict[int, float]:
    return dict(recorded(run_dir, name))


def last_step(run_dir: Path) -> int:
    return max(read_metric(run_dir), default=-1)


Start = Callable[..., Job]
Begin = Callable[..., Job]
Finish = Callable[..., Job]
SHM = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
SMALL: dict[str, Any] = {
    "data.block_size": 32,
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.n_embd": 32,
    "trainer.batch_size": 8,
    "trainer.micro_batch_size": 1,
    "trainer.max_steps": 30,
    "trainer.eval_every": 10,
    "trainer.log_every": 1,
    "trainer.sample_tokens": 0,
    "trainer.timeout_s": 30,
    "trainer.device": "cpu",
    "snapshot.every": 5,
    "snapshot.keep_last": 100,
    "snapshot.keep_best": False,  # else each evaluation with a lower loss would also save
    "snapshot.memory_path": f"{SHM}/mingpt-tests-{os.getpid()}",  # conftest.py makes and removes it
}


def command(
    *words: object,
    launcher: Sequence[str] = (sys.executable,),
    program: Path | str = "train.py",
    **settings: object,
) -> list[str]:
    given = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
    return [*launcher, str(program), *map(str, words), *(f"{key}={value}" for key, value in given.items())]


def changed_program(folder: Path, code: str) -> Path:
    """A program like train.py in which each process first runs `code`, with `events` and `train` imported."""
    path = folder / "changed_train.py"
    imports = (
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\nfrom mingpt.base import events\n"
    )
    path.write_text(f"{imports}{code}\ntrain.main()\n")
    return path


def reached(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: last_step(run_dir) >= step


def all_gone(pids: Sequence[int]) -> bool:
    need_proc()
    return not any(is_alive(pid) for pid in pids)


def generations(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_history(run_dir)["generations"])


def manifest(run_dir: Path, step: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "snapshots" / f"step_{step:08d}.json").read_text())
    return content


def snapshot_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (run_dir / "snapshots").glob("step_*.json"))


def final_hash(run_dir: Path, step: int = 30) -> str:
    """The `tensor_hash` of a step. Asserts that it follows from the hashes in the manifest."""
    digest, files = tensor_hash(run_dir, step), manifest(run_dir, step)["files"]
    told = "".join(file["sha256"] for file in files if file["name"].endswith(".safetensors"))
    assert digest == hashlib.sha256(told.encode()).hexdigest()
    return digest


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def error_of(job: Job, code: int = 2) -> str:
    """The text after `error: ` in a job's one such line; with exit code 2 there is no traceback."""
    assert job.wait() == code, job.err()
    (line,) = [line for line in job.err().splitlines() if line.startswith("error: ")]
    assert code != 2 or "Traceback" not in job.err(), job.err()
    return line.removeprefix("error: ")


def assert_same_run(run_dir: Path, expected: Path) -> None:
    assert final_hash(run_dir) == final_hash(expected)
    for name in ("train/loss", "grad_norm", "val/loss", "val/bits_per_byte"):
        found = read_metric(run_dir, name)
        assert len(found) >= 4 and found == read_metric(expected, name), name
