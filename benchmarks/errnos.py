"""A disk that fails with twelve errnos at seven moments, or hangs: how does a job end, and what is lost?

    python benchmarks/errnos.py --jobs 4                            # a quarter of an hour on two cores
    python benchmarks/errnos.py --errnos ESTALE --moments restart   # a minute
    python benchmarks/errnos.py --fuse                              # as root, needs bindfs: a minute

The module errnos_shim makes `os` and `open` fail for some paths: from a command's start on, or for AWAY_S
seconds in mid-run. In "restart", a worker is then killed, and the disk fails until the next generation has
noticed. With --fuse, the daemon of run_dir's mount is stopped in mid-run; then the agent gets two SIGTERM, or
SIGKILL. A process that was killed and waits in the kernel for the disk counts as ended.

A row has the exit code, the last line, whether there was a traceback, the snapshots that are gone, whether
the final weights are those of an undisturbed run, and seconds. Exit code 1 if a row is not as it should be.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import SMALL, Tally, argument_parser, arguments_of, row, work_folder
from support.jobs import Job, children, is_alive, last_step, tensor_hash

from mingpt.tools.jobs import ROOT

PASSING = ["EIO", "EAGAIN", "ENOTCONN", "ESTALE", "ETIMEDOUT", "EHOSTDOWN", "EREMOTEIO"]
ERRNOS = [*PASSING, "ENOSPC", "EDQUOT", "EACCES", "EROFS", "EINVAL"]
STEPS, AWAY_S, NOTICED_S = 150, 3.0, 45.0
SETTINGS = SMALL | {
    "trainer.max_steps": STEPS, "trainer.eval_every": 60, "snapshot.every": 10, "snapshot.keep_last": 100,
    "snapshot.memory_every": 0, "trainer.timeout_s": 20,
}  # fmt: skip
# {moment: (the paths that fail, the exit code that is expected)}
MOMENTS = {
    "restart": ("/run", 0), "prepare": ("/out", 2), "export": ("/out", 2), "start": ("/run", 2),
    "claim": ("/run/claim-", 0), "snapshot": ("/run/snapshots", 0), "metrics": ("/run/metrics", 0),
}  # fmt: skip


def is_running(pid: int) -> bool:
    """Return whether a process runs; False also if it was killed and waits in the kernel for a disk."""
    try:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    except OSError:
        return False
    pending = int(status.split("SigPnd:")[1].split()[0], 16)
    return is_alive(pid) and not pending & 1 << (signal.SIGKILL - 1)


class Disk:
    """Runs commands on a disk that fails, and judges how they end."""

    def __init__(self, work: Path) -> None:
        self.work, self.tally, self.reference = work, Tally(), work / "reference" / "run"
        self.text = work / "text.txt"
        self.text.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
        self.start(self.reference, *self.training(self.reference)).wait()

    def training(self, run: Path, workers: int = 1, steps: int = STEPS) -> list[str]:
        own = {"run_dir": run, "data.path": self.text, "trainer.workers": workers, "trainer.max_steps": steps}
        return ["train.py", *arguments_of(SETTINGS | own)]

    def start(self, run: Path, *words: object) -> Job:
        run.parent.mkdir(exist_ok=True)
        python_path = f"{Path(__file__).parent / 'errnos_shim'}"
        variables = {"PYTHONPATH": python_path, "ERRNOS_CONTROL": str(run.parent / "control")}
        command = [sys.executable, *[str(word) for word in words]]
        return Job(command, run.parent / "output", cwd=ROOT, **variables)

    def fail(self, moment: str, name: str) -> None:
        """Run the case of this moment and errno, print a row, and count the case."""
        case = self.work / f"{moment}-{name}"
        run, out, control, began = case / "run", case / "out", case / "control", time.monotonic()
        (pattern, expected), before = MOMENTS[moment], set[Path]()
        run.mkdir(parents=True)
        rule = f"{name} {case}{pattern}"
        if expected:
            control.write_text(rule)
        if moment == "export":
            job = self.start(run, "-m", "mingpt", "export", self.reference, out)
        elif moment == "prepare":
            job = self.start(run, "-m", "mingpt", "prepare", self.text, "--out", out)
        else:
            job = self.start(run, *self.training(run, 2 if moment == "restart" else 1))
        if not expected:
            job.wait_until(lambda: last_step(run) >= 25)
            before = {*run.glob("snapshots/step_*")}
            control.write_text(rule)
            limit = time.monotonic() + AWAY_S
            if moment == "restart":
                limit += NOTICED_S
                os.kill(job.workers()[-1], signal.SIGKILL)
            while time.monotonic() < limit and job.is_running() and "a restart follows" not in job.err():
                time.sleep(0.1)
            control.unlink()
        code, lines = job.wait(400), job.err().splitlines()
        lost = sorted(path.name for path in before if not path.exists())
        is_same = code != 0 or bool(expected) or tensor_hash(run, STEPS) == tensor_hash(self.reference, STEPS)
        if moment == "restart" and name in ("EACCES", "EROFS", "EINVAL"):
            expected = 2  # only a user can help
        is_good = code == expected and "Traceback" not in job.err() and is_same and not lost
        row(moment=moment, errno=name, code=code, traceback="Traceback" in job.err(), lost=lost,
            same_weights=is_same, seconds=round(time.monotonic() - began, 1), ok=is_good,
            last=lines[-1].replace(str(self.work), "") if lines else "")  # fmt: skip
        self.tally.add(is_good, job)

    def hang(self, number: int, times: int) -> None:
        """Stop the daemon of a FUSE mount in mid-run, then send `number` to the agent, `times` times."""
        case = self.work / f"hang-{number}"
        below, disk = case / "below", case / "disk"
        below.mkdir(parents=True)
        disk.mkdir()
        daemon = subprocess.Popen(["bindfs", "-f", str(below), str(disk)])
        while not os.path.ismount(disk):
            time.sleep(0.1)
        job = self.start(disk, *self.training(disk / "run", 2, 10**6))
        job.wait_until(lambda: last_step(below / "run") >= 25)
        pids = [job.pid, *children(job.pid)]
        daemon.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(times):
            time.sleep(1.5)
            os.kill(job.pid, number)
        while any(map(is_running, pids)) and time.monotonic() < began + 60:
            job.process.poll()
            time.sleep(0.1)
        left, seconds = [*filter(is_running, pids)], round(time.monotonic() - began, 1)
        daemon.send_signal(signal.SIGCONT)
        job.kill()
        is_good = not left and seconds < SETTINGS["trainer.timeout_s"] + 5
        row(moment="hang", signals=[number] * times, left=len(left), seconds=seconds, ok=is_good)
        self.tally.add(is_good, job)
        subprocess.run(["fusermount3", "-u", "-z", str(disk)], check=True)
        daemon.wait()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--errnos", nargs="+", default=ERRNOS)
    parser.add_argument("--moments", nargs="+", default=list(MOMENTS))
    parser.add_argument("--jobs", type=int, default=2, help="how many cases at the same time")
    parser.add_argument("--fuse", action="store_true")
    arguments = parser.parse_args()
    with work_folder() as work, ThreadPoolExecutor(arguments.jobs) as pool:
        disk = Disk(work)
        if arguments.fuse:
            disk.hang(signal.SIGTERM, 2)
            disk.hang(signal.SIGKILL, 1)
        else:
            cases = [(moment, name) for moment in arguments.moments for name in arguments.errnos]
            list(pool.map(disk.fail, *zip(*cases, strict=True)))
    return disk.tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
