"""Run a function of a check, which calls the learner's, in processes with a limit of time.

Processes are forked: a new interpreter would need a second or more to import torch. A process that is done
writes its result and then stays until it is killed, so that its peers lose no connection to it.
"""

import faulthandler
import linecache
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 8.0  # of one run; what is asked for takes less than a second
ALARM_S = 35  # longer than any check: whatever happens, a process ends after this time


class Refused(Exception):
    """What is wrong with an answer, in sentences that name ranks, lines and numbers."""


class TimedOut(Refused):
    """Not all processes have ended in time."""


@dataclass(frozen=True)
class Place:
    """What a process knows of itself, and a folder that it shares with its peers."""

    answer: Path
    folder: Path
    rank: int
    world_size: int

    def load(self, name: str) -> Any:
        """What the learner's file defines under this name."""
        module = sys.modules["answer"] = ModuleType("answer")  # dataclasses look it up there
        exec(compile(self.answer.read_bytes(), self.answer, "exec"), module.__dict__)
        if not callable(getattr(module, name, None)):
            raise Refused(f"{self.answer.name} defines no {name}")
        return getattr(module, name)

    def join(self) -> None:
        """Join the gloo process group of all ranks."""
        store = dist.FileStore(f"{self.folder}/store", self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)


class Process:
    """A process that runs `task(place, *arguments)`. Its state is "runs", "done", "failed" or "died"."""

    def __init__(self, place: Place, task: Callable[..., Any], *arguments: Any) -> None:
        self.place, self.state, self.cpu_s = place, "runs", 0.0
        self.value: Any = None  # what the task returned, or the sentence that says how it ended
        self.result = place.folder / f"result-{place.rank}"
        self.stack = place.folder / f"stack-{place.rank}"
        self.pid = os.fork()
        if not self.pid:
            self.work(task, arguments)

    def work(self, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        signal.alarm(ALARM_S)
        with self.stack.open("w") as stack:
            faulthandler.register(signal.SIGUSR1, stack)  # works while the process waits for a peer
            try:
                outcome = ("done", task(self.place, *arguments))
            except Refused as refusal:
                outcome = ("failed", f"{refusal}.")
            except BaseException as error:  # SystemExit, too
                outcome = ("failed", describe_error(error, self.place.answer))
            unfinished = self.result.with_suffix(".tmp")
            unfinished.write_bytes(pickle.dumps(outcome))
            unfinished.replace(self.result)
            while True:
                signal.pause()

    def poll(self) -> str:
        if self.state == "runs":
            ended, status, _ = os.wait4(self.pid, os.WNOHANG)
            if self.result.exists():
                self.state, self.value = pickle.loads(self.result.read_bytes())
            elif ended:
                code = os.waitstatus_to_exitcode(status)
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                self.state = "died"
                self.value = f"the process ended with {how} before the function returned."
            if ended:
                self.pid = 0
        return self.state

    def wait(self, paused: Path | None = None) -> None:
        """Wait until the process has ended, however it did, or until there is the file `paused`."""
        deadline = time.monotonic() + LIMIT_S
        while self.poll() == "runs" and not (paused and paused.exists()):
            if time.monotonic() > deadline:
                raise TimedOut(describe_hang([self]))
            time.sleep(0.002)

    def find_line(self) -> int | None:
        """The line of the learner's file in which the process is, if it is in one."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline, size = time.monotonic() + 2, -1
        while time.monotonic() < deadline and (size <= 0 or size != self.stack.stat().st_size):
            size = self.stack.stat().st_size
            time.sleep(0.1)
        start = f'  File "{self.place.answer}", line '
        lines = [line for line in self.stack.read_text().splitlines() if line.startswith(start)]
        return int(lines[0].removeprefix(start).split()[0]) if lines else None

    def kill(self) -> None:
        """End the process, if it has not ended. `cpu_s` then says for how long it has computed."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            usage = os.wait4(self.pid, 0)[2]
            self.cpu_s, self.pid = usage.ru_utime + usage.ru_stime, 0


def quote_line(answer: Path, line: int) -> str:
    return f"line {line} of {answer.name}, `{linecache.getline(str(answer), line).strip()}`"


def describe_error(error: BaseException, answer: Path) -> str:
    message = " ".join([type(error).__name__ + ":", *str(error).splitlines()[:1]])[:300].rstrip(":")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(answer) and frame.lineno]
    if isinstance(error, SyntaxError) and error.filename == str(answer):
        return f"{answer.name} cannot be imported: line {error.lineno}: {message}."
    if not lines:
        return f"calling it as the exercise's page says fails: {message}."
    if isinstance(error, NotImplementedError):
        return f"line {lines[-1]} of {answer.name} is still to be written ({message})."
    return f"in {quote_line(answer, lines[-1])}: {message}."


def name_ranks(ranks: Sequence[int]) -> str:
    """rank 0; ranks 0 and 1; ranks 0, 1 and 2"""
    words = [str(rank) for rank in ranks]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def group_ranks(sentences: Iterable[tuple[int, str]]) -> str:
    """The sentences, each once, with the ranks that it is about."""
    ranks = defaultdict[str, list[int]](list)
    for rank, sentence in sentences:
        ranks[sentence].append(rank)
    return " ".join(f"{name_ranks(who).capitalize()}: {sentence}" for sentence, who in ranks.items())


def describe_hang(processes: Sequence[Process]) -> str:
    running = [process for process in processes if process.state == "runs"]
    lines = {process.place.rank: process.find_line() for process in running}
    sentences = []
    for process in running:
        process.kill()
        line = lines[process.place.rank]
        what = "computing without end" if process.cpu_s > LIMIT_S / 20 else "waiting"
        where = quote_line(process.place.answer, line) if line else "a collective of the check, for its peers"
        sentences.append((process.place.rank, f"{what} in {where}."))
    done = [process.place.rank for process in processes if process.state == "done"]
    finished = f" {name_ranks(done).capitalize()} had finished." if done else ""
    return f"Not done after {LIMIT_S:g} s. {group_ranks(sentences)}{finished}"


def wait_for_all(processes: Sequence[Process]) -> list[Any]:
    """What the tasks returned. Raises Refused if one failed, died, or did not end in time."""
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() == "runs" for process in processes):
        if any(process.state in ("failed", "died") for process in processes):
            deadline = min(deadline, time.monotonic() + 0.5)  # the others may fail for the same reason
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    for state in ("died", "failed"):  # a rank that died makes others fail
        problems = [(process.place.rank, process.value) for process in processes if process.state == state]
        if problems:
            sentence = problems[0][1]
            raise Refused(group_ranks(problems) if len(processes) > 1 else sentence[0].upper() + sentence[1:])
    if any(process.state == "runs" for process in processes):
        raise TimedOut(describe_hang(processes))
    return [process.value for process in processes]


def run_ranks(answer: Path, task: Callable[..., Any], *arguments: Any, world_size: int = 1) -> list[Any]:
    """What `task(place, *arguments)` returns on each rank, in the order of ranks."""
    processes: list[Process] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                processes.append(Process(Place(answer, Path(folder), rank, world_size), task, *arguments))
            return wait_for_all(processes)
        finally:
            for process in processes:
                process.kill()


def require_tensor(value: Any, like: torch.Tensor, origin: str) -> torch.Tensor:
    """`value`, if it is a tensor of this shape and type. `origin`: "all_reduce returned", for instance."""
    wanted = f"it has to be a tensor of shape {list(like.shape)}, {like.dtype}"
    if not isinstance(value, torch.Tensor):
        what = "nothing" if value is None else f"a {type(value).__name__}"
        raise Refused(f"{origin} {what}; {wanted}")
    if value.shape != like.shape or value.dtype != like.dtype:
        raise Refused(f"{origin} a tensor of shape {list(value.shape)}, {value.dtype}; {wanted}")
    return value.detach()
