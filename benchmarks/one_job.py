"""A run_dir, or a folder or bucket of snapshots, has one job at a time: is that so?

    python benchmarks/one_job.py        # 20 pairs of each kind, 20 gaps, 5 killed and 3 frozen holders

- pair: two jobs are started together, by plain `python train.py`, by torchrun, or with one snapshot.path in
  an object store (moto's server). Exactly one must train to the end; the other must end with one sentence
  that names the process of the first.
- gap: a worker of a job is killed, and while its next generation is on its way a second job is started in the
  same run_dir. It must be refused, and the first must end with the hash of an undisturbed run.
- successor: a job is killed whole. A job started then must take over: at once on the same host; within the
  lease of 20 s on another one, which is a pid namespace of its own here (needs root).
- superseded: a job on another host is frozen whole, another one takes over and trains to the end. Woken up,
  the first must end with one sentence and change no file.

A row each, as JSON. Exit code 1 unless all is as it must be.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Settings, row, short_hash, start

from mingpt.tools.jobs import ROOT, Job, clean_environment, descendants, free_port, last_step, read_history

SETTINGS = {
    "data.block_size": 32, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32,
    "trainer.batch_size": 8, "trainer.micro_batch_size": 1, "trainer.max_steps": 60,
    "trainer.eval_every": 60, "trainer.log_every": 1, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "trainer.timeout_s": 30, "snapshot.every": 10,
}  # fmt: skip
LEASE_S, START_S = 20.0, 15.0  # START_S: a start on a busy machine, in which a successor must train
ANOTHER_HOST = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def start_alone(run_dir: Path, output: Path, settings: Settings, *prefix: str) -> Job:
    """A single process, started by plain python."""
    given = [f"{key}={value}" for key, value in {**settings, "trainer.workers": 1}.items()]
    return Job([*prefix, sys.executable, "train.py", f"run_dir={run_dir}", *given], output)


def refusals(job: Job) -> list[str]:
    return [line for line in job.err().splitlines() if line.startswith("error:")]


def is_refused(job: Job, holder: int) -> bool:
    """Whether the job ended with one sentence that names the process of the other, and nothing else."""
    lines = refusals(job)
    return (
        len(lines) == 1
        and f"process {holder} on host" in lines[0]
        and "mingpt/training/trainer.py" not in job.err()
    )


def judge_pair(jobs: list[Job], expected: str, run_dirs: list[Path]) -> dict[str, Any]:
    """The row of two jobs started together."""
    codes = [job.wait(120) for job in jobs]
    winners = [number for number, code in enumerate(codes) if code == 0]
    trained = [run_dir for run_dir in dict.fromkeys(run_dirs) if read_history(run_dir)["generations"]]
    is_good = len(winners) == 1 and len(trained) == 1
    if is_good:
        (winner,) = winners
        is_good = is_refused(jobs[1 - winner], jobs[winner].pid)
        is_good = is_good and read_history(trained[0])["status"] == "finished"
        is_good = is_good and len(read_history(trained[0])["generations"]) == 1
    return {"codes": codes, "ok": is_good, "refused": [line for job in jobs for line in refusals(job)][:2]}


def pair_of(kind: str, folder: Path, number: int) -> tuple[list[Job], list[Path]]:
    """Two jobs started together."""
    run_dir = folder / f"{kind}{number}"
    if kind == "torchrun":
        jobs = [start_torchrun(run_dir, folder / f"{kind}{number}.{job}") for job in range(2)]
        return jobs, [run_dir, run_dir]
    if kind == "plain":
        jobs = [start_alone(run_dir, folder / f"{kind}{number}.{job}", SETTINGS) for job in range(2)]
        return jobs, [run_dir, run_dir]
    run_dirs = [folder / f"{kind}{number}.{job}" for job in range(2)]
    settings = SETTINGS | {"snapshot.path": f"s3://runs/{number}"}
    return [start_alone(one, one, settings) for one in run_dirs], run_dirs


def start_torchrun(run_dir: Path, output: Path) -> Job:
    words = [f"run_dir={run_dir}", *(f"{key}={value}" for key, value in SETTINGS.items())]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return Job([*launcher, "train.py", *words], output)


def gap(folder: Path, number: int, rng: random.Random, expected: str) -> dict[str, Any]:
    """A second job between a kill and the next generation."""
    run_dir = folder / f"gap{number}"
    first = start(run_dir, SETTINGS, restarts=3)
    first.wait_until(lambda: last_step(run_dir) >= rng.randint(2, 30))
    os.kill(rng.choice(first.workers()), signal.SIGKILL)
    second = start_alone(run_dir, folder / f"gap{number}.second", SETTINGS)
    second_code, first_code = second.wait(120), first.wait(120)
    same = short_hash(run_dir) == expected
    is_good = second_code == 2 and is_refused(second, first.pid) and first_code == 0 and same
    return {"second": second_code, "first": first_code, "same_hash": same, "ok": is_good}


def successor(folder: Path, number: int, host: str, expected: str) -> dict[str, Any]:
    """A job is killed whole; how long until another one, on this host or another, trains?"""
    run_dir = folder / f"{host}{number}"
    prefix = ANOTHER_HOST if host == "another" else []
    first = start_alone(run_dir, folder / f"{host}{number}.first", SETTINGS, *prefix)
    first.wait_until(lambda: last_step(run_dir) >= 12)
    reached, claims = last_step(run_dir), len(read_history(run_dir)["generations"])
    first.kill()
    began = time.monotonic()
    second = start_alone(run_dir, folder / f"{host}{number}.second", SETTINGS)
    second.wait_until(lambda: len(read_history(run_dir)["generations"]) > claims)
    took_s = time.monotonic() - began
    code = second.wait(120)
    waited = "for it to be renewed" in second.err()
    same = short_hash(run_dir) == expected
    allowed_s = START_S + (LEASE_S if host == "another" else 0.0)
    is_good = code == 0 and same and took_s < allowed_s and waited == (host == "another")
    return {"killed_at": reached, "trains_after_s": round(took_s, 2), "waited": waited, "ok": is_good}


def superseded(folder: Path, number: int, expected: str) -> dict[str, Any]:
    """A job is frozen whole for longer than its lease, and wakes up when another one has finished the run."""
    run_dir = folder / f"superseded{number}"
    first = start_alone(run_dir, folder / f"superseded{number}.first", SETTINGS, *ANOTHER_HOST)
    first.wait_until(lambda: last_step(run_dir) >= 12)
    frozen = descendants(first.pid)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    second = start_alone(run_dir, folder / f"superseded{number}.second", SETTINGS)
    second_code = second.wait(120)
    before = fingerprint(run_dir)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    first_code = first.wait(60)
    after = fingerprint(run_dir)
    lines, changed = (
        refusals(first),
        sorted(name for name in before | after if before.get(name) != after.get(name)),
    )
    is_good = second_code == 0 and first_code == 1 and not changed and short_hash(run_dir) == expected
    is_good = is_good and len(lines) == 1 and "no longer belongs to this job" in lines[0]
    return {"second": second_code, "first": first_code, "changed": changed, "said": lines, "ok": is_good}


def fingerprint(run_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of a run."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def with_object_store(work: Callable[[], None]) -> None:
    """Run `work` with moto's server in a process of its own, and a bucket `runs` in it."""
    port = free_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(os.devnull, "w") as nowhere:
        server = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, cwd=ROOT, env=clean_environment())
    try:
        import fsspec

        bucket, deadline = fsspec.filesystem("s3", use_listings_cache=False), time.monotonic() + 30
        while True:
            try:
                bucket.mkdir("runs")
                break
            except Exception:  # the server is not up yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        work()
    finally:
        server.kill()
        server.wait()


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--gaps", type=int, default=20)
    parser.add_argument("--successors", type=int, default=5)
    parser.add_argument("--superseded", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, results = random.Random(arguments.seed), dict[str, list[bool]]()

    def record(kind: str, values: dict[str, Any]) -> None:
        results.setdefault(kind, []).append(values["ok"])
        row(kind=kind, **values)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start(folder / "undisturbed", SETTINGS).wait(600)
        expected = short_hash(folder / "undisturbed")

        def pairs(kind: str) -> None:
            for number in range(arguments.pairs):
                jobs, run_dirs = pair_of(kind, folder, number)
                record(f"pair, {kind}", judge_pair(jobs, expected, run_dirs))

        pairs("plain")
        pairs("torchrun")
        with_object_store(lambda: pairs("s3"))
        for number in range(arguments.gaps):
            record("gap", gap(folder, number, rng, expected))
        for host in ("same", "another"):
            for number in range(arguments.successors):
                record(f"successor, {host} host", successor(folder, number, host, expected))
        for number in range(arguments.superseded):
            record("superseded", superseded(folder, number, expected))
    row(**{kind: f"{sum(good)} of {len(good)}" for kind, good in results.items()})
    return 0 if all(all(good) for good in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
