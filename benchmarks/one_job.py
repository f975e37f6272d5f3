"""A run_dir has one job at a time, and a bucket of snapshots one run: is that so?

    python benchmarks/one_job.py                                                        # an hour
    python benchmarks/one_job.py --pairs 1 --gaps 1 --successors 0 --superseded 0       # a minute or two

- pair: two jobs are started together in one run_dir, under plain python or torchrun. In a third kind, their
  snapshots are in an object store (moto's server). Exactly one job must train to the end. The other must end
  with one sentence that names the winner. With the object store, a run in another folder must be refused.
- gap: a worker of a job is killed, and a second job is started at once in the same run_dir. The second job
  must be refused, and the first job must end with the hash of an undisturbed run.
- successor: a whole job is killed, and a second job is started. On the same host, the second job must not
  wait. On another host (a pid namespace, needs root), the second job must wait for the lease of 20 s.
- superseded: all processes of a job on another host are frozen, and another job trains to the end. Woken up,
  the first job must end with one sentence and change no file.

Prints a row per case, as JSON. Exit code 1 unless every case ends as it must. Needs Linux.
"""

import contextlib
import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from support.jobs import Job, descendants, free_port, last_step, read_history

from mingpt.tools.jobs import ROOT, clean_environment

SETTINGS = common.SMALL | {
    "trainer.max_steps": 60, "trainer.eval_every": 60, "trainer.timeout_s": 30, "snapshot.every": 10,
}  # fmt: skip
LEASE_S, START_S = 20.0, 15.0  # START_S: a start on a busy machine, in which a successor must train
ANOTHER_HOST = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

start_alone = functools.partial(common.start_plain, settings=SETTINGS, workers=1)


def refusals(job: Job) -> list[str]:
    return [line for line in job.err().splitlines() if line.startswith("error:")]


def is_refused(job: Job, holder: int) -> bool:
    """Return whether the job ended with one sentence that names process `holder`, without a traceback."""
    lines, has_traceback = refusals(job), "mingpt/training/trainer.py" in job.err()
    return len(lines) == 1 and f"process {holder} on host" in lines[0] and not has_traceback


def pair(folder: Path, number: int, kind: str) -> dict[str, Any]:
    """Start two jobs together, `kind` "plain", "torchrun" or "s3"; return the values of the row."""
    run_dir, at_store = folder / f"{kind}{number}", {"snapshot.path": f"s3://runs/{number}"}
    settings = SETTINGS | (at_store if kind == "s3" else {})
    begin = common.start if kind == "torchrun" else functools.partial(common.start_plain, workers=1)
    jobs = [begin(run_dir, settings=settings, output=folder / f"{kind}{number}.{job}") for job in range(2)]
    codes = [job.wait(120) for job in jobs]
    history = read_history(run_dir)
    is_good = codes.count(0) == 1 and history["status"] == "finished" and len(history["generations"]) == 1
    if is_good:
        winner = codes.index(0)
        is_good = is_refused(jobs[1 - winner], jobs[winner].pid)
    if kind == "s3":
        other = folder / f"other{number}"
        start_alone(other).wait(120)
        jobs.append(common.start_plain(other, settings, workers=1))
        is_good = is_good and jobs[-1].wait(120) == 2 and f"of run {history['id']}" in refusals(jobs[-1])[0]
    return {"codes": codes, "ok": is_good, "refused": [line for job in jobs for line in refusals(job)][:2]}


def gap(folder: Path, number: int, rng: random.Random, expected: str) -> dict[str, Any]:
    """Start a second job between a kill and the next generation; return the values of the row."""
    run_dir = folder / f"gap{number}"
    first = common.start(run_dir, SETTINGS, restarts=3)
    step = rng.randint(2, 30)
    first.wait_until(lambda: last_step(run_dir) >= step)
    os.kill(rng.choice(first.workers()), signal.SIGKILL)
    second = start_alone(run_dir, output=folder / f"gap{number}.second")
    second_code, first_code = second.wait(120), first.wait(120)
    same = common.short_hash(run_dir) == expected
    is_good = second_code == 2 and is_refused(second, first.pid) and first_code == 0 and same
    return {"second": second_code, "first": first_code, "same_hash": same, "ok": is_good}


def successor(folder: Path, number: int, host: str, expected: str) -> dict[str, Any]:
    """Kill a whole job on this host or on another, and start a second job here; return the row's values."""
    run_dir, is_other = folder / f"{host}{number}", host == "another"
    prefix = ANOTHER_HOST if is_other else []
    first = start_alone(run_dir, output=folder / f"{host}{number}.first", prefix=prefix)
    first.wait_until(lambda: last_step(run_dir) >= 12)
    reached, claims = last_step(run_dir), len(read_history(run_dir)["generations"])
    first.kill()
    began = time.monotonic()
    second = start_alone(run_dir, output=folder / f"{host}{number}.second")
    second.wait_until(lambda: len(read_history(run_dir)["generations"]) > claims)
    took_s = time.monotonic() - began
    code = second.wait(120)
    waited = "waiting until it has not renewed its claim" in second.err()
    allowed_s = START_S + (LEASE_S if is_other else 0.0)
    is_good = (
        code == 0 and common.short_hash(run_dir) == expected and took_s < allowed_s and waited == is_other
    )
    return {"killed_at": reached, "trains_after_s": round(took_s, 2), "waited": waited, "ok": is_good}


def superseded(folder: Path, number: int, expected: str) -> dict[str, Any]:
    """Freeze a whole job until another job has finished the run; return the values of the row."""
    run_dir = folder / f"superseded{number}"
    first = start_alone(run_dir, output=folder / f"superseded{number}.first", prefix=ANOTHER_HOST)
    first.wait_until(lambda: last_step(run_dir) >= 12)
    frozen = descendants(first.pid)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    second_code = start_alone(run_dir, output=folder / f"superseded{number}.second").wait(120)
    before = fingerprint(run_dir)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    first_code = first.wait(60)
    after, lines = fingerprint(run_dir), refusals(first)
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    is_good = second_code == 0 and first_code == 1 and not changed and common.short_hash(run_dir) == expected
    is_good = is_good and len(lines) == 1 and "no longer belongs to this job" in lines[0]
    return {"second": second_code, "first": first_code, "changed": changed, "said": lines, "ok": is_good}


def fingerprint(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a run."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextlib.contextmanager
def object_store() -> Iterator[None]:
    """Run moto's S3 server with a bucket `runs`; set the environment variables that lead jobs to it."""
    import fsspec

    port = free_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(os.devnull, "w") as nowhere:
        server = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, cwd=ROOT, env=clean_environment())
    try:
        bucket, deadline = fsspec.filesystem("s3", use_listings_cache=False), time.monotonic() + 60
        while not bucket.exists("runs"):
            with contextlib.suppress(OSError):  # the server is not listening yet
                bucket.mkdir("runs")
            assert time.monotonic() < deadline, "the server does not start"
        yield
    finally:
        server.kill()
        server.wait()


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--gaps", type=int, default=20)
    parser.add_argument("--successors", type=int, default=5)
    parser.add_argument("--superseded", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, tally = random.Random(arguments.seed), common.Tally()

    def record(kind: str, values: dict[str, Any]) -> None:
        tally.add(values["ok"])
        common.row(kind=kind, **values)

    with common.work_folder() as folder:
        expected, _ = common.train_undisturbed(folder, SETTINGS)
        for kind in ("plain", "torchrun", "s3") if arguments.pairs else ():
            with object_store() if kind == "s3" else contextlib.nullcontext():
                for number in range(arguments.pairs):
                    record(f"pair, {kind}", pair(folder, number, kind))
        for number in range(arguments.gaps):
            record("gap", gap(folder, number, rng, expected))
        for host in ("same", "another"):
            for number in range(arguments.successors):
                record(f"successor, {host} host", successor(folder, number, host, expected))
        for number in range(arguments.superseded):
            record("superseded", superseded(folder, number, expected))
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
