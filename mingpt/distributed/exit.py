"""How this worker exits: `how_to_exit` makes a plan from plain values; `ProcessExit` carries the plan out."""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mingpt.base.errors import (
    ClaimLost,
    ExpectedError,
    NodeRefused,
    NodesLeave,
    NonRetryableError,
    PeersMissing,
    StopRequested,
    UserError,
)
from mingpt.base.processes import kill_by_pidfd, open_siblings
from mingpt.base.system import try_within
from mingpt.base.urls import redact
from mingpt.distributed.ends import (
    FAILED,
    FINISHED,
    LOST_PEER,
    STOPPED,
    TIMED_OUT,
    TOLD,
    ExitReason,
    stack_path,
)
from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import Rendezvous

POLL_S = 0.05
PEER_EXIT_S = 1.0
STACKS_S = 0.5
STORAGE_S = 5.0  # the limit of work that needs storage, because storage that hangs may be the exit's cause
LEAVE_S = 10.0  # for how long a refused node may take to leave the job
AWAY_S = 30.0  # the pause before a restart if a disk cannot be used now
STACKS_AFTER = 0.9  # share of timeout_s after which a stuck worker writes its stacks: before others time out
STACK_FILES = f"worker-[0-9]*-{8 * '[0-9a-z]'}.txt"  # the names that `stack_path` gives
NCCL_LOST = "remote process exited or there was a network error"  # NCCL's only text that means a lost peer
PAUSE = "trainer.pause_after"  # the name of the request to stop that this setting makes
JOB_ENDS = ("SIGUSR1", "STOP", PAUSE)  # requests to stop that end the job; after others, the agent decides
# Tells plain python's agent that a worker ends the job; torchrun's gets SIGTERM. Nobody else sends SIGURG.
JOB_ENDED = signal.SIGURG
BEFORE_FIRST = "before the first step"


class SignalReceived(Exception):
    """A signal that ends this process at once.

    `is_first` is true if this is the first signal and training has not begun. Otherwise this is a second
    signal, or a signal that a stuck process has not obeyed in time.
    """

    def __init__(self, number: signal.Signals, is_first: bool) -> None:
        super().__init__(number.name)
        self.number, self.is_first = number, is_first


class PeerLost(Exception):
    """Another worker is gone or silent, as the message says."""


@dataclass(frozen=True)
class ExitPlan:
    """What a worker does before it exits with `code`, in the order of the fields.

    But `ends_agent` comes after `releases_claims`.
    """

    code: int
    ends_agent: bool = False  # send a signal to the agent: no exit code ends a job under torchrun
    reason: str = ""  # store this exit reason, for the agent, other workers and the next generation
    job_code: int | None = None  # the job's exit code, stored with `reason`; None: this worker does not know
    text: str = ""  # print this to stderr
    kills: Sequence[int] = ()  # ranks; kill those of this agent's workers that store no exit reason in time
    failure: str = ""  # record in run.json that this made the job fail; "": nothing is recorded
    releases_claims: bool = False  # give up the job's right to write to the run folder
    waits_s: float = 0.0  # wait so long, but not after the agent has sent SIGTERM or is gone


def how_to_exit(
    error: BaseException | None,
    launch: Launch,
    step: int = 0,
    timed_out: str = "",
    has_met: bool = True,
    is_orphan: bool = False,
    is_restart: bool = False,
) -> ExitPlan:
    """Return the plan by which a worker exits because of `error`.

    `error` None means that the worker's work is finished, or that the agent is gone. `step` is the last
    completed step. `timed_out` is what `ProcessExit.timed_out` returned: the exit reason of a timeout, or "".
    `has_met` says whether the workers have met at the rendezvous, `is_orphan` whether the agent is gone, and
    `is_restart` whether the job has been restarted.
    """
    is_last = not launch.has_restarts_left()
    if is_orphan:  # no generation follows
        said = f"error: the agent (process {launch.agent_pid}) was lost after step {step}\n"
        return ExitPlan(1, text="" if launch.rank else said)
    if error is None or isinstance(error, StopRequested):
        return plan_of_end(error.reason if error else None, launch)
    if isinstance(error, SignalReceived):
        return plan_of_signal(error, launch)
    if isinstance(error, (UserError, NonRetryableError)):
        return plan_of_abort(error, launch, has_met, is_restart)
    if isinstance(error, PeersMissing):
        return plan_of_missing(error, launch)
    said = first_line(error)
    if not is_lost_peer(error):
        sentence = f"error: worker {launch.rank}: {error}\n"
        text = sentence if isinstance(error, ExpectedError) else "".join(traceback.format_exception(error))
        what = f"{type(error).__name__}: {said}"
        repeats = not has_met and not isinstance(error, OSError)  # an import that fails, for example
        return ExitPlan(
            1,
            ends_agent=repeats and launch.agent_pid is not None,
            text=text,
            reason=f"{FAILED} ({what})",
            failure=what if is_last else "",
        )
    if not has_met:
        return ExitPlan(1, text=f"worker {launch.rank} could not rendezvous with the other workers: {said}\n")
    if isinstance(error, PeerLost):  # its text decides, because a step may take longer than timeout_s
        timed_out = said if said.startswith(TIMED_OUT) else ""
    line = (
        f"worker {launch.rank} lost a peer after step {step}, and no restart is left "
        f"(torchrun --max-restarts): {said}\n"
    )
    return ExitPlan(
        1,
        text=line if is_last and not launch.has_own_agent else "",  # plain python's agent prints it, once
        reason=timed_out or f"{LOST_PEER} ({said})",
        kills=range(launch.world_size) if timed_out else (),  # the agent would wait 30 s for a frozen worker
        failure=said if is_last else "",
    )


def plan_of_missing(error: PeersMissing, launch: Launch) -> ExitPlan:
    """Return the plan to exit because the workers `error.ranks` are missing, or their nodes leave the job."""
    has_left = isinstance(error, NodesLeave)
    first = next(rank for rank in range(launch.world_size) if rank not in error.ranks)
    is_printed = has_left and first == 0  # the log, which rank 0 prints, has it
    text = f"{error}\n" if launch.rank == first and not is_printed else ""
    # The agents of anynode end the round of a node that leaves, which uses up no restart.
    return ExitPlan(1, text=text, kills=error.ranks, waits_s=LEAVE_S if has_left else 0.0)


def plan_of_end(request: str | None, launch: Launch) -> ExitPlan:
    """Return the plan for an exit of all workers together.

    `request` is the request to stop, or None if the workers have finished. The exit code is 0, and the job
    gives up its claims (its right to write to the run folder). But after a signal other than SIGUSR1, under
    an agent, the exit code is 128 + signal. The job then keeps its claims, because the agent decides whether
    workers start again.
    """
    if request is None or request in JOB_ENDS or launch.agent_pid is None:
        reason = f"{STOPPED} {request}" if request else FINISHED
        return ExitPlan(0, reason=reason, job_code=0, releases_claims=True)
    return ExitPlan(128 + signal.Signals[request], reason=f"{TOLD} by {request}", job_code=0)


def plan_of_signal(received: SignalReceived, launch: Launch) -> ExitPlan:
    """Return the plan to exit at once because of a signal.

    The exit code is 128 + signal, or 0 if `received.is_first` is true and there is no agent.
    """
    name, is_alone = received.number.name, launch.agent_pid is None
    if not received.is_first:
        return ExitPlan(128 + received.number, reason=f"{TOLD} by {name}")
    # Plain python's agent prints the line if it was also told to stop.
    return ExitPlan(
        0 if is_alone else 128 + received.number,
        text=before_first_step(name) if is_alone and launch.rank == 0 else "",
        reason=f"{TOLD} by {name} {BEFORE_FIRST}",
        job_code=0,
    )


def plan_of_abort(error: Exception, launch: Launch, has_met: bool, is_restart: bool) -> ExitPlan:
    """Return the plan to end the job, or only this node's agent, because of `error`.

    If this is a restart (`is_restart`), further restarts are left, and `error` is a UserError that may pass,
    the plan is to exit after a pause, so that the agent restarts the workers. Otherwise local rank 0 ends the
    node's agent; the node's other workers wait for the agent's SIGTERM. Rank 0 prints the error. Before the
    rendezvous (if `has_met` is false), and for NodeRefused and ClaimLost, rank 0 may not have seen the error.
    Then local rank 0 prints the error, too. Without an agent, every worker does what local rank 0 would do,
    but no agent is ended.
    """
    is_first = launch.local_rank == 0 or launch.agent_pid is None
    if is_restart and getattr(error, "may_pass", False) and launch.has_restarts_left():
        text = f"error: {error}; a restart follows in {AWAY_S:.0f} s\n" if is_first else ""
        return ExitPlan(1, text=text, reason=f"{FAILED} ({first_line(error)})", waits_s=AWAY_S)
    is_printed = launch.rank == 0 or not has_met or isinstance(error, (NodeRefused, ClaimLost))
    code = 2 if isinstance(error, UserError) else 1
    return ExitPlan(
        code,
        ends_agent=is_first and launch.agent_pid is not None,
        text=f"error: {error}\n" if is_first and is_printed else "",
        reason=f"ended the job ({type(error).__name__}: {first_line(error)})",
        job_code=code,
        # The code that raises a NonRetryableError has recorded the failure already.
        failure="" if isinstance(error, NonRetryableError) else str(error),
        releases_claims=is_first,
        waits_s=0.0 if is_first else math.inf,  # until the agent passes on the SIGTERM
    )


class StackFile:
    """The file to which a process writes its threads' stacks if the process is stuck, and at each SIGUSR2.

    A process counts as stuck about `limit_s` seconds after the last call of `note_progress`. A timer of
    faulthandler notices this, even if C code holds the interpreter lock. Constructing a StackFile raises
    OSError if the file cannot be opened, or its folder cannot be made.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path, self.limit_s = path, limit_s
        self.armed_at = -math.inf
        self.file = path.open("ab")
        faulthandler.register(signal.SIGUSR2, self.file)

    def note_progress(self) -> None:
        """Restart the timer, so that the process does not count as stuck for about `limit_s` seconds.

        At the first call, or if the process was stuck until now, also empty the StackFile's file; if that
        fails, the old stacks stay.
        """
        now = time.monotonic()
        waited_s = now - self.armed_at
        if waited_s > self.limit_s / 20:  # not each time, because each call of faulthandler starts a thread
            self.armed_at = now
            faulthandler.dump_traceback_later(self.limit_s, file=self.file)
        if waited_s > self.limit_s:
            with contextlib.suppress(OSError):  # the old stacks stay then
                self.file.truncate(0)

    def close(self) -> None:
        """Stop the timer, and remove the file if it is empty. If the process is stuck, do nothing."""
        if -math.inf < self.armed_at < time.monotonic() - self.limit_s:
            # The timer's thread may hang in a write, and the next call would wait for it with Python's lock.
            return
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # an empty file stays then
            if os.fstat(self.file.fileno()).st_size == 0:
                self.path.unlink()


class ProcessExit:
    """Ends this process as `how_to_exit` decides, and holds the values that this decision needs.

    Any thread may begin an exit. Only the first thread that does so carries the exit out, but `exit_at_once`
    exits even while another thread is exiting.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.began_at = self.progress_at = time.monotonic()
        self.is_restart = launch.restart_count > 0
        self.rendezvous: Rendezvous | None = None
        self.nccl: Any = None  # the NcclWatch, if several workers train on GPUs
        self.timeout_s = 0.0
        self.last_step: Callable[[], int] = lambda: 0
        self.release_claims: Callable[[], None] = lambda: None
        self.note_failure: Callable[[str], None] | None = None
        self.stacks: StackFile | None = None
        self.exiting = threading.Lock()  # taken by the first thread that exits, and never released

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """From now on, store exit reasons through `rendezvous`, at which all ranks have met.

        `timeout_s` is the time limit of a collective, in seconds.
        """
        self.rendezvous, self.timeout_s = rendezvous, timeout_s
        self.is_restart = self.is_restart or rendezvous.is_restart()
        self.note_progress()

    def watch_gpus(self, nccl: Any) -> None:
        """From now on, let `exit_if_nccl_stuck` check the GPUs' collectives with `nccl`, an NcclWatch."""
        self.nccl = nccl

    def on_job_end(self, release_claims: Callable[[], None]) -> None:
        """Register a function by which some exits give up the job's right to write to the run folder."""
        self.release_claims = release_claims

    def start_run(
        self, run_dir: Path, last_step: Callable[[], int], note_failure: Callable[[str], None] | None
    ) -> None:
        """Register what an exit calls during a run, and open this worker's StackFile in `run_dir`/stacks.

        `last_step` returns the last completed step. `note_failure` records in run.json why the job failed; it
        is None on ranks that do not write to `run_dir`. After a rendezvous, a rank with a `note_failure`
        first removes the empty stack files of earlier workers. An OSError is not raised: then no stacks are
        written to `run_dir`.
        """
        self.last_step, self.note_failure = last_step, note_failure
        folder, name = run_dir / "stacks", self.rendezvous.generation if self.rendezvous else ""
        with contextlib.suppress(OSError):  # such as a full disk, which is reported for other files
            for old in folder.glob(STACK_FILES) if note_failure else ():
                # A worker that was killed leaves an empty file.
                if name[:8] not in old.name and not os.path.getsize(old):
                    old.unlink()
            self.stacks = StackFile(stack_path(folder, name, self.launch.rank), STACKS_AFTER * self.timeout_s)

    def note_progress(self) -> None:
        """Record that a collective of all ranks has ended, so that this worker does not count as stuck."""
        self.progress_at = time.monotonic()
        if self.stacks and self.launch.world_size > 1:
            self.stacks.note_progress()

    def timed_out(self) -> str:
        """Return a timeout's exit reason, or "" if there was progress within the last `timeout_s` seconds.

        Progress is a call of `note_progress`.
        """
        is_stuck = time.monotonic() - self.progress_at >= self.timeout_s
        return f"{TIMED_OUT} {self.timeout_s:g} s" if is_stuck else ""

    def read_exit_reason(self, rank: int) -> tuple[bool, ExitReason | None]:
        """Return (whether the job's TCPStore answers in time, the exit reason that `rank` stored there).

        The exit reason is None if the rank stored none, or if the store does not answer. Returns (False,
        None) before the rendezvous.
        """
        return self.rendezvous.read_exit_reason(rank) if self.rendezvous else (False, None)

    def exit_process(
        self, error: BaseException | None = None, is_told: Callable[[], bool] = lambda: False
    ) -> NoReturn:
        """Exit because of `error`; None means that the work is finished.

        If another thread is already exiting, wait until that thread has ended this process. `is_told` returns
        whether the agent has sent SIGTERM to this process.
        """
        self.exiting.acquire()
        self.perform(self.plan(error), is_told)

    def exit_beside_main_thread(self, error: BaseException | None = None) -> None:
        """Exit because of `error`, or return if another thread is already exiting.

        `error` None means that the work is finished. Call this in a thread other than the main one.
        """
        is_first = self.exiting.acquire(blocking=False)
        if is_first:
            self.perform(self.plan(error))

    def exit_at_once(self, error: SignalReceived | None = None) -> NoReturn:
        """Exit because of the signal `error`, even if another thread is already exiting.

        `error` None means that the agent is gone.
        """
        self.perform(self.plan(error))

    def exit_if_nccl_stuck(self) -> None:
        """Exit if a collective on GPUs has waited for over `timeout_s` seconds, or if NCCL has lost a peer.

        An error of the network also counts as a lost peer.
        """
        if self.nccl and self.nccl.waited_s() > self.timeout_s:
            self.exit_beside_main_thread(PeerLost(f"{TIMED_OUT} {self.timeout_s:g} s"))
        elif self.nccl and self.nccl.backend.get_error().name == "COMM_ERROR":
            self.exit_beside_main_thread(PeerLost(f"NCCL: {NCCL_LOST}"))

    def plan(self, error: BaseException | None) -> ExitPlan:
        """Return the plan of `how_to_exit` for `error`, from the values that this object has now."""
        has_met, is_orphan = self.rendezvous is not None, self.launch.is_orphan()
        step, late = self.last_step(), self.timed_out()
        return how_to_exit(error, self.launch, step, late, has_met, is_orphan, self.is_restart)

    def perform(self, plan: ExitPlan, is_told: Callable[[], bool] = lambda: False) -> NoReturn:
        """Carry out a plan, then exit. Work that needs the run folder or the job's TCPStore has a time limit.

        `is_told` returns whether the agent has sent SIGTERM to this process.
        """
        launch = self.launch
        if plan.ends_agent:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent passes SIGTERM on to all its workers
        if plan.reason and self.rendezvous:
            reason = {"why": plan.reason, "step": self.last_step(), "code": plan.job_code}
            self.rendezvous.record_exit_reason(launch.rank, reason)
        try_within(STORAGE_S, lambda: write_stderr(plan.text))
        if plan.kills:
            self.kill_silent(plan.kills)
        if self.stacks:
            try_within(STACKS_S, self.stacks.close)
        note = self.note_failure
        if plan.failure and note:
            try_within(STORAGE_S, lambda: note(plan.failure))
        if plan.releases_claims:
            try_within(STORAGE_S, self.release_claims)
        if plan.ends_agent and launch.agent_pid:
            os.kill(launch.agent_pid, JOB_ENDED if launch.has_own_agent else signal.SIGTERM)
        until = time.monotonic() + plan.waits_s
        while time.monotonic() < until and not (is_told() or launch.is_orphan()):
            time.sleep(POLL_S)
        os._exit(plan.code)

    def kill_silent(self, ranks: Sequence[int]) -> None:
        """Kill the agent's other workers that are in `ranks` and store no exit reason within PEER_EXIT_S.

        A worker is also killed if the job's TCPStore does not answer in that time.
        """
        siblings, deadline = open_siblings(self.launch.agent_pid), time.monotonic() + PEER_EXIT_S
        silent = [rank for rank in siblings if rank in ranks]
        while silent and time.monotonic() < deadline:
            time.sleep(POLL_S)
            silent = [rank for rank in silent if self.read_exit_reason(rank)[1] is None]
        for rank in silent:
            kill_by_pidfd(siblings[rank])


def write_stderr(text: str) -> None:
    """Flush stdout, then write `text` to stderr, without the credentials in URLs.

    A failed write raises nothing if `open_streams` has replaced both streams.
    """
    sys.stdout.flush()
    sys.stderr.write(redact(text))
    sys.stderr.flush()


def before_first_step(reason: str) -> str:
    """Return the line to print about a stop before the first step; `reason` is the request to stop."""
    return f"stopped by {reason} {BEFORE_FIRST}: the same command goes on\n"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text. At most 200 characters are returned.

    For an NCCL error, returns "NCCL: " and the last line. Credentials in URLs are hidden.
    """
    lines = redact(str(error)).split("\n")
    return (f"NCCL: {lines[-1]}" if lines[0].startswith("NCCL error") else lines[0])[:200]


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that a worker is gone or silent.

    The result is true for PeerLost and for DistError. Because gloo's errors have no type of their own, it is
    also true for a plain RuntimeError that comes from a Python function of torch.distributed, or names a
    source file of gloo, as those of DistributedDataParallel's backward pass do. For an error of NCCL, it is
    true only with the text NCCL_LOST; too little room in /dev/shm, for example, is no lost peer.
    """
    if isinstance(error, PeerLost) or "torch.distributed" not in sys.modules:
        return isinstance(error, PeerLost)
    from torch.distributed import DistError

    if str(error).startswith("NCCL error"):
        return NCCL_LOST in str(error)

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = frames[-1].f_globals.get("__name__", "") if frames else ""
    is_of_gloo = place.startswith("torch.distributed.") or "/gloo/" in str(error)
    return isinstance(error, DistError) or (type(error) is RuntimeError and is_of_gloo)
