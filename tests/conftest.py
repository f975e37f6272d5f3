"""Small jobs for the tests: runs of train.py, alone or under torchrun, started as a user starts them."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.golden import Golden
from support.jobs import Job, is_alive, last_step, read_metric, tensor_hash
from support.needs import FacilityMissing, need_proc
from support.nodes import Cluster, why_no_cluster
from support.switch import wait_until as wait_until

from mingpt.tools.jobs import torchrun

Start = Callable[..., Job]
Finish = Callable[..., Job]
ROOT = Path(__file__).parent.parent
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write tests/sentences.json anew, with -n 0")


def pytest_configure() -> None:
    """Use one thread per process: the processes of `pytest -n` share the cores, and waiting threads spin."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and jobs would inherit that


# Test files that take a minute or more with their slow tests, the longest first.
LONG_FILES = (
    "test_nodes.py",
    "test_nodes_without_a_shared_disk.py",
    "test_slurm.py",
    "test_docs.py",
    "test_readme.py",
    "test_benchmarks.py",
    "test_compiled_jobs.py",
    "test_exercises.py",
    "test_programs.py",
    "test_splitting.py",
    "test_boxes.py",
    "test_mistakes.py",
    "test_sharded_jobs.py",
    "test_stopping.py",
    "test_restarts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no process is left with a long file at the end. A file is not split."""
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test that needs what this host lacks."""
    try:
        return (yield)
    except FacilityMissing as missing:
        pytest.skip(str(missing))


def pytest_sessionfinish() -> None:
    shutil.rmtree(SMALL["snapshot.memory_path"], ignore_errors=True)


def command(
    *words: object,
    launcher: Sequence[str] = (sys.executable,),
    program: Path | str = "train.py",
    **settings: object,
) -> list[str]:
    """The command of a small run. Names of settings have two underscores in place of a dot."""
    given = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
    return [*launcher, str(program), *map(str, words), *(f"{key}={value}" for key, value in given.items())]


def changed_program(folder: Path, code: str) -> Path:
    """A program like train.py in which each process first runs `code`, with `events` and `train` imported."""
    path = folder / "changed_train.py"
    imports = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\nfrom mingpt.base import events\n"
    path.write_text(f"{imports}{code}\ntrain.main()\n")
    return path


def reached(run_dir: Path, step: int) -> Callable[[], bool]:
    """A function that tells whether this step is on record."""
    return lambda: last_step(run_dir) >= step


def all_gone(pids: Sequence[int]) -> bool:
    need_proc()
    return not any(is_alive(pid) for pid in pids)


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
    """Assert equal weights, optimizer state and metrics."""
    assert final_hash(run_dir) == final_hash(expected)
    for name in ("train/loss", "grad_norm", "val/loss", "val/bits_per_byte"):
        found = read_metric(run_dir, name)
        assert len(found) >= 4 and found == read_metric(expected, name), name


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A function that starts a command in the background; all its processes are killed when the test ends."""
    jobs: list[Job] = []
    folder = tmp_path_factory.mktemp("output")

    def start_job(command: Sequence[str], **env: str) -> Job:
        job = Job(command, folder / f"job-{len(jobs)}", cwd=ROOT, **env)
        jobs.append(job)
        return job

    yield start_job
    for job in jobs:
        if job.is_running():
            job.kill()


@pytest.fixture
def finish(start: Start, text: Path) -> Finish:
    """A function that runs a command from `command` to its end with exit code 0; data.path is `text`."""

    def finish_job(*words: object, env: Mapping[str, str] | None = None, **options: Any) -> Job:
        job = start(command(*words, **({"data__path": text} | options)), **(env or {}))
        assert job.wait(300) == 0, job.err()
        return job

    return finish_job


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """A function that makes a Cluster(count, shared=...), which is removed when the test ends."""
    why_not = why_no_cluster()
    if why_not:
        pytest.skip(why_not)
    made: list[Cluster] = []

    def make_cluster(count: int, **options: Any) -> Cluster:
        made.append(Cluster(count, tmp_path_factory.mktemp("cluster"), **options))
        return made[-1]

    yield make_cluster
    for one in made:
        one.close()


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """A function that compares a sentence with the next one that tests/sentences.json has for this test."""
    test = f"{request.path.name}::{request.node.name}"
    return Golden(test, tmp_path, request.config.getoption("--renew"))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of one `pytest -n` share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short piece of the embedded play."""
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
    return path


@pytest.fixture(scope="session")
def reference(text: Path, shared_folder: Path) -> Callable[..., Path]:
    """A function that returns the run folder of an undisturbed job under torchrun, to be read only.

    A run of pytest trains each reference once, whatever processes and tests ask for it.
    """

    def run_folder(workers: int = 2, **settings: object) -> Path:
        name = hashlib.sha256(repr((workers, sorted(settings.items()))).encode()).hexdigest()[:16]
        folder = shared_folder / f"reference-{name}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                given = {"data__path": text, "run_dir": folder / "run"} | settings
                job = Job(command(launcher=torchrun(workers), **given), folder / "job")
                assert job.wait(300) == 0, job.err()
                (folder / "done").touch()
        return folder / "run"

    return run_folder


@pytest.fixture(scope="session")
def undisturbed(reference: Callable[..., Path]) -> Path:
    """The run folder of two workers under torchrun that nothing disturbed."""
    return reference()


@pytest.fixture
def copied(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy, for one test, of the folder that the undisturbed run has left."""
    return Path(shutil.copytree(undisturbed, tmp_path / "run"))
