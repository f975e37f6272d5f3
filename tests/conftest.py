"""Hooks and fixtures: `begin` and `finish` start small jobs, and `reference` has undisturbed ones."""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import properties as properties  # which registers the profiles of hypothesis
from support.golden import Golden
from support.jobs import (
    ROOT,
    SMALL,
    Begin,
    FacilityMissing,
    Finish,
    Job,
    Start,
    changed_program,
    command,
    torchrun,
)
from support.nodes import Cluster, why_no_cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write tests/sentences.json anew, with -n 0")


def pytest_configure() -> None:
    """Use one thread per process: the processes of `pytest -n` share the cores, and waiting threads spin."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
    os.makedirs(SMALL["snapshot.memory_path"], exist_ok=True)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and jobs would inherit that


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """Let no test inherit the log that an earlier test has opened in this process."""
    logger = logging.getLogger("mingpt")
    propagate, level, handlers = logger.propagate, logger.level, logger.handlers[:]
    yield
    logger.propagate, logger.handlers = propagate, handlers
    logger.setLevel(level)


# Test files that take a minute or more with their slow tests, the longest first.
LONG_FILES = (
    "test_nodes.py",
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
    "test_any_number_of_workers.py",
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
    for job in filter(Job.is_running, jobs):
        job.kill()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where `begin` and `finish` start a run."""
    return tmp_path / "run"


@pytest.fixture
def begin(start: Start, text: Path, run_dir: Path, tmp_path: Path) -> Begin:
    """A function that starts a command from `command`; without others, the data are `text`.

    `code` is for `changed_program`; `env` has environment variables.
    """

    def begin_job(
        *words: object, code: str = "", env: Mapping[str, str] | None = None, **options: Any
    ) -> Job:
        given = {"data__path": text, "run_dir": run_dir} | options
        if code:
            given["program"] = changed_program(tmp_path, code)
        return start(command(*words, **given), **(env or {}))

    return begin_job


@pytest.fixture
def finish(begin: Begin) -> Finish:
    """A function that runs a command as `begin` does, to its end with exit code 0."""

    def finish_job(*words: object, **options: Any) -> Job:
        job = begin(*words, **options)
        assert job.wait(300) == 0, job.err()
        return job

    return finish_job


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """A function that makes a Cluster(count, shared=...), which is removed when the test ends."""
    why_not = why_no_cluster()
    if why_not:
        pytest.skip(why_not)
    with contextlib.ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(
            Cluster(count, tmp_path_factory.mktemp("cluster"), **options)
        )


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """A function that compares a sentence with the next one that tests/sentences.json has for this test."""
    test = f"{request.path.name}::{request.node.name}"
    return Golden(test, tmp_path, request.config.getoption("--renew"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short piece of the embedded play."""
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
    return path


@pytest.fixture(scope="session")
def reference(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns the run folder of an undisturbed job under torchrun, to be read only.

    A run of pytest trains each reference once, whatever processes and tests ask for it.
    """

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # by the processes of `pytest -n`

    def run_folder(workers: int = 2, **settings: object) -> Path:
        name = hashlib.sha256(repr((workers, sorted(settings.items()))).encode()).hexdigest()[:16]
        folder = shared / f"reference-{name}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                given: dict[str, Any] = {"data__path": text, "run_dir": folder / "run"} | settings
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
    """A copy of the folder that the undisturbed run has left, in the place of the test's `run_dir`."""
    return Path(shutil.copytree(undisturbed, tmp_path / "run"))
