"""Small jobs for the tests: runs of train.py, alone or under torchrun, started as a user starts them."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mingpt.tools.jobs import ROOT
from support.jobs import Job, is_alive, last_step, read_history, read_metric, tensor_hash
from support.needs import need_proc

Start = Callable[..., Job]
Begin = Callable[..., Job]
Finish = Callable[..., Job]
SHM = "/dev/shm" if os.path.isdir("/dev/shm") else None
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
    "snapshot.memory_path": tempfile.mkdtemp(prefix="mingpt-tests-", dir=SHM),  # killed jobs leave files
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
    """The SHA-256 of the tensors of model and optimizer at a step, computed from the files themselves."""
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
