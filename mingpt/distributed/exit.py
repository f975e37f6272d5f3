"""How a worker exits: its exit code, its exit reason in the store, and what becomes of its peers."""

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import LOST_PEER, TIMED_OUT, Rendezvous
from mingpt.errors import ExpectedError, UserError

POLL_S = 0.05
PEER_EXIT_S = 1.0
LOST_PEER_WORDS = ("gloo", "Connection closed", "Connection reset", "pair closure")


class ProcessExit:
    """The ways out of this process; `step` is the last completed step."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.rendezvous: Rendezvous | None = None
        self.step = 0
        self.timeout_s = 0.0
        self.local_peer_pidfds: dict[int, int] = {}  # rank -> pidfd of the other workers of our agent
        if launch.rank == 0 and launch.status_file:
            launch.status_file.unlink(missing_ok=True)  # an earlier generation's

    def record_exit_reason(self, why: str) -> None:
        if self.rendezvous is not None:
            self.rendezvous.record_exit_reason(why, self.step)

    def write_status(self, code: int) -> None:
        """Tell `python train.py`, whose agent started us, the exit code of the job."""
        if self.launch.rank == 0 and self.launch.status_file:
            with contextlib.suppress(OSError):  # then the job's exit code is 1
                self.launch.status_file.write_text(str(code))

    def exit_process(self, stopped_by: str | None) -> NoReturn:
        """Exit at once, since a peer that dies during a clean-up would wait for this process.

        Exit code 0; under torchrun 128 + signal after SIGTERM and SIGINT, so that the agent decides whether a
        next generation starts.
        """
        code = 0
        if stopped_by in ("SIGTERM", "SIGINT") and self.launch.agent_pid:
            code = 128 + signal.Signals[stopped_by]
            self.record_exit_reason(f"told to stop by {stopped_by}")
        self.write_status(0)
        with contextlib.suppress(OSError):  # a full disk, or a pipe that is gone
            sys.stdout.flush()
        write_stderr("")
        os._exit(code)

    def exit_on_signal(self, number: signal.Signals, is_first: bool) -> None:
        """Exit for a request to stop that cannot wait; see StopSignal."""
        self.record_exit_reason(f"told to stop by {number.name}")
        if is_first:
            self.write_status(0)
        os._exit(0 if is_first and self.launch.agent_pid is None else 128 + number)

    def exit_with_error(self, error: BaseException) -> NoReturn:
        """Exit code 1. Where a peer was lost, without the backend's traceback, which says nothing else."""
        lost_peer = is_lost_peer(error)
        agent_reports = self.launch.status_file is not None  # that no restart is left; see mingpt.agent
        if lost_peer:
            if is_timeout(error):
                self.record_exit_reason(f"{TIMED_OUT} after {self.timeout_s:g} s")
            else:
                self.record_exit_reason(f"{LOST_PEER} ({first_line(error)})")
            self.kill_local_peers(are_frozen=is_timeout(error))
        else:
            self.record_exit_reason(f"failed ({type(error).__name__}: {first_line(error)})")
        if isinstance(error, ExpectedError):
            write_stderr(f"error: worker {self.launch.rank}: {error}\n")
        elif not lost_peer:
            write_stderr("".join(traceback.format_exception(error)))
        elif not self.launch.has_restarts_left() and not agent_reports:
            write_stderr(
                f"worker {self.launch.rank} lost a peer after step {self.step}, "
                "and no restart is left (torchrun --max-restarts)\n"
            )
        os._exit(1)

    def abort_job(self, error: Exception, sigterm_received: Callable[[], bool]) -> NoReturn:
        """End the job whatever restarts are left: exit code 2 after a UserError, else 1. All ranks call it.

        No exit code does that under torchrun, so the first worker of each node sends SIGTERM to its agent,
        after rank 0 has printed the error; the others wait for the agent to pass it on.
        """
        code = 2 if isinstance(error, UserError) else 1
        agent_pid = self.launch.agent_pid
        if agent_pid and self.launch.local_rank:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
            signal.set_wakeup_fd(-1)  # from here on a signal ends this process with our exit code
            while not sigterm_received():  # it may have come before, while this worker was on its way here
                time.sleep(POLL_S)
            os._exit(code)
        signal.set_wakeup_fd(-1)
        self.write_status(code)
        if self.launch.rank == 0 or self.rendezvous is None:  # without one, rank 0 may not know of the error
            write_stderr(f"error: {error}\n")
        if agent_pid:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent passes it on to its workers
            os.kill(agent_pid, signal.SIGTERM)
        os._exit(code)

    def kill_local_peers(self, are_frozen: bool) -> None:
        """Kill the workers of this node that do not notice by themselves that their generation is over.

        The agent does it too, but only after 30 s where a process is frozen. One that is not frozen is not
        why the generation ended, so it gets an exit reason.
        """
        deadline = time.monotonic() + PEER_EXIT_S
        for rank, pidfd in self.local_peer_pidfds.items():
            exited = select.poll()
            exited.register(pidfd, select.POLLIN)
            remaining_ms = 1000 * max(0.0, deadline - time.monotonic())
            if not exited.poll(remaining_ms):
                if self.rendezvous is not None and not are_frozen:
                    self.rendezvous.record_exit_reason(LOST_PEER, self.step, rank)
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def write_stderr(text: str) -> None:
    """Write to stderr, which may be on a full disk or gone: that must not change how a worker exits."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else ""


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another worker is gone. Gloo says so in words only."""
    from torch.distributed import DistError

    text = str(error)
    by_words = any(words in text for words in LOST_PEER_WORDS)
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and by_words)


def is_timeout(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()
