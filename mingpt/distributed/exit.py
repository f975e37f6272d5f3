"""The ways in which a worker exits: its exit code, its exit reason in the store, and what peers learn."""

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mingpt.base.errors import ClaimLost, ExpectedError, NodeRefused, UserError
from mingpt.base.system import try_within
from mingpt.base.urls import redact
from mingpt.distributed.launch import AGENT_FOLDER, Launch
from mingpt.distributed.rendezvous import (
    FAILED,
    LOST_PEER,
    TIMED_OUT,
    TOLD,
    PeerEnd,
    Rendezvous,
    is_loss,
    kill_by_pidfd,
    stack_path,
    wait_readable,
)

POLL_S = 0.05
PEER_EXIT_S = 1.0
NOTE_FAILURE_S = 0.5
STACKS_AFTER = 0.9  # share of timeout_s: a stuck worker writes its stacks before others time out
MAX_STACK_FILES = 20
RELEASE_S = 5.0
NCCL_LOST = "remote process exited or there was a network error"  # the one error of NCCL's that means it
JOB_ENDS = ("SIGUSR1", "STOP")  # requests that end the job; after any other one, the agent decides


class StackFile:
    """The file to which a process writes the stacks of its threads when it is stuck, and at each SIGUSR2.

    A process is stuck if `note_progress` was called, and not again for about `limit_s` seconds. The timer is
    faulthandler's: it needs no interpreter lock, which C code may hold. Constructing may raise OSError.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path, self.limit_s = path, limit_s
        self.armed_at = 0.0
        self.file = path.open("ab")
        faulthandler.register(signal.SIGUSR2, self.file)

    def note_progress(self) -> None:
        """Restart the timer. At the first call, or if the process was stuck, empty the file of all stacks."""
        now = time.monotonic()
        waited_s = now - self.armed_at
        if waited_s > self.limit_s / 20:  # seldom, since each call starts a thread
            self.armed_at = now
            faulthandler.dump_traceback_later(self.limit_s, file=self.file)
        if waited_s > self.limit_s:
            with contextlib.suppress(OSError):  # the stacks stay then
                self.file.truncate(0)

    def close(self) -> None:
        """Stop the timer, and remove the file if it is empty."""
        faulthandler.cancel_dump_traceback_later()
        if os.fstat(self.file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)


class ProcessExit:
    """Ends this process in one of several ways. The trainer sets `step` to the last completed step.

    The main thread, the thread of StopSignal and others call it. The thread that begins an exit first
    completes it; others wait or do nothing. `exit_on_signal` and `exit_if_orphaned` alone exit even then.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.began_at = self.progress_at = time.monotonic()
        self.rendezvous: Rendezvous | None = None
        self.step = 0
        self.timeout_s = 0.0
        self.release_claims: Callable[[], None] = lambda: None
        self.local_peer_pidfds: dict[int, int] = {}  # rank -> pidfd of the other workers of our agent
        self.note_failure: Callable[[str], None] | None = None  # on ranks with a run folder, for run.json
        self.stacks: StackFile | None = None
        self.nccl: Any = None  # the NcclWatch, if several workers train on GPUs
        self.noting = threading.Lock()
        self.exiting, self.orphaned = threading.Lock(), threading.Lock()  # never released
        if launch.rank == 0 and launch.status_file:
            launch.status_file.unlink(missing_ok=True)  # of an earlier generation

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """From now on use this rendezvous' store for exit reasons, and watch other workers of this agent."""
        self.rendezvous, self.timeout_s = rendezvous, timeout_s
        self.local_peer_pidfds = rendezvous.local_peer_pidfds
        self.note_progress()  # all ranks have met

    def note_progress(self) -> None:
        """Record that a collective of all ranks is complete, so this worker is not stuck."""
        self.progress_at = time.monotonic()
        if self.stacks and self.launch.world_size > 1:
            self.stacks.note_progress()

    def on_job_end(self, release_claims: Callable[[], None]) -> None:
        """Have `exit_process`, if its exit code is 0, and `abort_job` call `release_claims`."""
        self.release_claims = release_claims

    def on_failure(self, note: Callable[[str], None]) -> None:
        """Have `note_end_of_job` call `note`, once, with the reason of a failure that ends the job."""
        self.note_failure = note

    def open_stacks(self, run_dir: str, is_kept: bool) -> None:
        """Have this worker write its stacks to a file in `run_dir`/stacks when stuck, and at each SIGUSR2.

        If `is_kept` (this rank keeps the run folder), remove files of earlier generations that are empty or
        past the newest MAX_STACK_FILES. If the file cannot be opened, no stacks are written there.
        """
        folder = Path(run_dir) / "stacks"
        name = self.rendezvous.generation if self.rendezvous else ""
        with contextlib.suppress(OSError):  # a full disk, which other files report: no stacks then
            found = sorted(folder.glob("*.txt"), key=os.path.getmtime, reverse=True) if is_kept else []
            for number, old in enumerate(found):
                # A worker that was killed leaves an empty file.
                is_surplus = not os.path.getsize(old) or number >= MAX_STACK_FILES
                if is_surplus and name[:8] not in old.name:
                    old.unlink()
            self.stacks = StackFile(stack_path(folder, name, self.launch.rank), STACKS_AFTER * self.timeout_s)

    def record_exit_reason(self, why: str, agreed: bool = False) -> None:
        if self.stacks is not None:
            try_within(NOTE_FAILURE_S, self.stacks.close)
        if self.rendezvous is not None:
            self.rendezvous.record_exit_reason(why, self.step, self.launch.rank, agreed)

    def write_status(self, code: int, is_final: bool = False, sentence: str = "") -> None:
        """Write the job's exit code to the status file, for the agent of `python train.py` if there is one.

        If `is_final`, any rank writes, and replaces the file; otherwise only rank 0 writes, if there is no
        file. The agent prints `sentence` if the agent itself was told to stop.
        """
        if self.launch.status_file and (is_final or self.launch.rank == 0):
            mode = "w" if is_final else "x"
            # Without the file, the agent exits with 1. If it exists, another worker has ended the job.
            with contextlib.suppress(OSError), self.launch.status_file.open(mode) as file:
                file.write(f"{code} {sentence}")

    def exit_process(self, stopped_by: str | None) -> NoReturn:
        """Exit, without Python's clean-up, after the request to stop `stopped_by`, None at the run's end.

        The exit code is 0, and claims are released. Under an agent, after a signal other than SIGUSR1, the
        code is 128 + signal and claims stay: the agent decides whether a next generation starts.
        """
        self.exiting.acquire()
        code = 0
        if stopped_by and stopped_by not in JOB_ENDS and self.launch.agent_pid:
            code = 128 + signal.Signals[stopped_by]
            why = f"{TOLD} by {stopped_by}"
        else:
            why = f"stopped by {stopped_by}" if stopped_by else "finished"
        # A peer that is slower to exit sees that nothing is wrong.
        self.record_exit_reason(why, agreed=True)
        if code == 0:
            self.release_claims()
        self.write_status(0)
        sys.stdout.flush()
        write_stderr("")
        os._exit(code)

    def exit_on_signal(self, number: signal.Signals, is_first: bool) -> NoReturn:
        """Exit at once with code 128 + `number`; at the first request to stop, without an agent, with 0."""
        self.record_exit_reason(f"{TOLD} by {number.name}")
        sentence = before_first_step(number.name)
        if is_first:
            self.write_status(0, sentence=sentence)
        if is_first and self.launch.agent_pid is None and self.launch.rank == 0:
            write_stderr(sentence)
        os._exit(0 if is_first and self.launch.agent_pid is None else 128 + number)

    def exit_if_orphaned(self) -> None:
        """Exit with code 1 if the agent is gone, since no generation follows; otherwise do nothing."""
        if self.launch.agent_pid not in (None, os.getppid()):
            self.orphaned.acquire()
            if self.launch.rank == 0:
                write_stderr(
                    f"error: the agent (process {self.launch.agent_pid}) was lost after step {self.step}\n"
                )
            folder = self.launch.status_file.parent if self.launch.status_file else None
            if folder and folder.name.startswith(AGENT_FOLDER):  # the agent can no longer remove it
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

    def exit_stopped(self, number: signal.Signals) -> None:
        """Exit with 128 + `number`, since ranks cannot agree to stop; do nothing if another thread exits."""
        is_first = self.exiting.acquire(blocking=False)
        if is_first:
            self.exit_on_signal(number, is_first=False)

    def how_peer_ended(self, rank: int) -> PeerEnd | None:
        """Return how a worker that has exited ended: LOST without exit reason; None if no store answers."""
        answers, reason = self.rendezvous.read_exit_reason(rank) if self.rendezvous else (False, None)
        return PeerEnd.of(reason) if answers else None

    def exit_without_peer(self, rank: int) -> None:
        """Exit with code 1 since worker `rank` has exited; see `exit_beside_main_thread`."""
        reason = self.rendezvous.read_exit_reason(rank)[1] if self.rendezvous else None
        self.exit_beside_main_thread(f"worker {rank} {reason['why'] if reason else 'vanished'}")

    def exit_if_nccl_stuck(self) -> None:
        """Exit with code 1 if a collective on GPUs has waited for `timeout_s`, or NCCL has failed."""
        if self.nccl and self.nccl.waited_s() > self.timeout_s:
            self.exit_beside_main_thread(f"{TIMED_OUT} {self.timeout_s:g} s")
        elif self.nccl and self.nccl.backend.get_error().name == "COMM_ERROR":
            self.exit_beside_main_thread(f"NCCL: {NCCL_LOST}")

    def exit_beside_main_thread(self, said: str) -> None:
        """Exit with code 1 since a worker is gone or silent. The thread of StopSignal calls this.

        `said`, what is known of that, is the exit reason. Calls `leave_peers` first, and `note_end_of_job` if
        no restart is left. Does nothing if another thread is exiting.
        """
        is_first = self.exiting.acquire(blocking=False)
        if not is_first:
            return
        are_frozen = said.startswith(TIMED_OUT)
        self.leave_peers(said if are_frozen else f"{LOST_PEER} ({said})", are_frozen)
        if not self.launch.has_restarts_left():
            # With a time limit: the main thread may be noting the failure, or be stuck because of the disk.
            try_within(NOTE_FAILURE_S, lambda: self.note_end_of_job(said))
        self.report_lost_peer(said)
        os._exit(1)

    def note_end_of_job(self, why: str) -> None:
        """Record in run.json, once, why the job failed, on a rank where `on_failure` was called."""
        with self.noting:
            note, self.note_failure = self.note_failure, None
            if note is not None:
                note(why)

    def exit_with_error(self, error: BaseException) -> NoReturn:
        """Record why this worker failed, print the error, and exit with code 1.

        An ExpectedError is printed as one sentence, any other error with its traceback. If a peer was
        lost, the error is not printed, and workers of this agent that may hang are killed (`leave_peers`).
        """
        self.exit_if_orphaned()  # torch would log C++ frames about the agent's store
        self.exiting.acquire()
        is_timeout = time.monotonic() - self.progress_at >= self.timeout_s
        if is_lost_peer(error) and is_timeout:
            self.leave_peers(f"{TIMED_OUT} {self.timeout_s:g} s", are_frozen=True)
        elif is_lost_peer(error):
            self.leave_peers(f"{LOST_PEER} ({first_line(error)})", are_frozen=False)
        else:
            self.record_exit_reason(describe_failure(error))
        if isinstance(error, ExpectedError):
            write_stderr(f"error: worker {self.launch.rank}: {error}\n")
        elif is_lost_peer(error):
            if self.launch.rank == 0 or self.how_peer_ended(0) != PeerEnd.AGREED:
                self.report_lost_peer(first_line(error))  # otherwise rank 0 has ended the job and printed why
        else:
            write_stderr("".join(traceback.format_exception(error)))
        os._exit(1)

    def report_lost_peer(self, said: str) -> None:
        """Print, if no restart is left, that a peer was lost, and what is `said` of that.

        Under plain python only rank 0 prints, and only if no worker was killed or failed: then the agent, or
        the failed worker, tells what happened.
        """
        if self.launch.has_restarts_left():
            return
        option = "torchrun --max-restarts"
        if self.launch.status_file and self.rendezvous:
            others = [rank for rank in range(self.launch.world_size) if rank != self.launch.rank]
            reasons = [self.rendezvous.read_exit_reason(rank)[1] for rank in others]
            if self.launch.rank or not all(reason and is_loss(reason) for reason in reasons):
                return
            option = "trainer.max_restarts"
        write_stderr(
            f"worker {self.launch.rank} lost a peer after step {self.step}, "
            f"and no restart is left ({option}): {said}\n"
        )

    def exit_without_rendezvous(self, error: BaseException) -> NoReturn:
        """Exit with code 1 after PeersMissing. Print it if no restart is left: then no generation logs it."""
        self.exiting.acquire()
        if not self.launch.has_restarts_left():
            write_stderr(f"{error}\n")
        os._exit(1)

    def abort_job(
        self, error: Exception, sigterm_received: Callable[[], bool], by_all: bool = True
    ) -> NoReturn:
        """End the job even if restarts are left. The exit code is 2 after a UserError, else 1.

        Rank 0 prints the error. Local rank 0 of any node prints it, too, before the rendezvous, or if it is a
        NodeRefused or ClaimLost. No exit code ends a job under torchrun, so local rank 0 of each node
        releases its claims and sends SIGTERM to its agent; other workers wait for the agent to pass it on.
        If not all ranks call this method (`by_all` is False), this worker does what local rank 0 does.
        """
        self.exiting.acquire()
        self.record_exit_reason(f"ended the job ({type(error).__name__}: {first_line(error)})", agreed=True)
        code = 2 if isinstance(error, UserError) else 1
        agent_pid = self.launch.agent_pid
        if agent_pid and self.launch.local_rank and by_all:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
            signal.set_wakeup_fd(-1)  # from here on a signal ends this process with this exit code
            while not sigterm_received():  # SIGTERM may have come before this call
                time.sleep(POLL_S)
            os._exit(code)
        signal.set_wakeup_fd(-1)
        self.write_status(code, is_final=True)
        is_of_node = isinstance(error, (NodeRefused, ClaimLost))  # rank 0 may not know of the error
        is_first = self.launch.rank == 0 or (is_of_node and self.launch.local_rank == 0)
        if is_first or self.rendezvous is None:  # before the rendezvous, rank 0 may not know of it
            write_stderr(f"error: {error}\n")
        # With a time limit: storage may be the cause of the failure.
        try_within(RELEASE_S, self.release_claims)
        if agent_pid:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent passes it on to its workers
            os.kill(agent_pid, signal.SIGTERM)
        os._exit(code)

    def leave_peers(self, why: str, are_frozen: bool) -> None:
        """Record why this worker exits, and kill other workers of the agent that may hang. Does not exit.

        The others have PEER_EXIT_S seconds to exit or to record an exit reason. The agent would kill a frozen
        worker only after 30 s. If `are_frozen`, the killed workers are the cause of the generation's end.
        Otherwise they are not, so the exit reason LOST_PEER is recorded for each.
        """
        self.record_exit_reason(why)
        waiting = dict(self.local_peer_pidfds)
        deadline = time.monotonic() + PEER_EXIT_S
        while waiting and time.monotonic() < deadline:
            for rank in wait_readable(waiting, POLL_S):
                del waiting[rank]
            if self.rendezvous is not None:
                waiting = {
                    rank: pidfd
                    for rank, pidfd in waiting.items()
                    if self.rendezvous.read_exit_reason(rank)[1] is None
                }
        for rank, pidfd in waiting.items():
            if self.rendezvous is not None and not are_frozen:
                self.rendezvous.record_exit_reason(LOST_PEER, self.step, rank)
            kill_by_pidfd(pidfd)


def write_stderr(text: str) -> None:
    """Write to stderr, without the secrets in URLs. `open_streams` makes sure that nothing is raised."""
    sys.stderr.write(redact(text))
    sys.stderr.flush()


def before_first_step(reason: str) -> str:
    """Return the line to print about a stop before the first step; `reason` is a signal's name or STOP."""
    return f"stopped by {reason} before the first step\n"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; for an error of NCCL's the last one, which has its reason."""
    lines = redact(str(error)).split("\n")
    return (f"NCCL: {lines[-1]}" if lines[0].startswith("NCCL error") else lines[0])[:200]


def describe_failure(error: BaseException) -> str:
    """Return the exit reason for a failure: "failed", the error's type and the first line of its text."""
    return f"{FAILED} ({type(error).__name__}: {first_line(error)})"


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that a worker is gone or silent, by its type and the place of its origin.

    That is a DistError, or a RuntimeError that torch.distributed has raised: gloo's errors have no type. Of
    NCCL's errors only NCCL_LOST counts: the others come from this machine, such as no room in /dev/shm.
    """
    from torch.distributed import DistError

    if str(error).startswith("NCCL error"):
        return NCCL_LOST in str(error)

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = frames[-1].f_globals.get("__name__", "") if frames else ""
    is_from_backend = type(error) is RuntimeError and place.startswith("torch.distributed.")
    return isinstance(error, DistError) or is_from_backend
