"""How workers ended: the exit reasons that workers store, and the sentence made of all exit reasons.

An exit reason is {"why": text, "step": the worker's last completed step, or 0 if not known, "code": the job's
exit code, or None if the worker does not know it}. A worker that stored no exit reason was, for example,
killed or cut off from the job's TCPStore. A generation is the workers from one start or restart to the next.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The texts with which `why` may begin.
TIMED_OUT = "timed out waiting for a peer after"
LOST_PEER = "lost a peer"
FAILED = "failed"
TOLD = "told to stop"
FINISHED, STOPPED = "finished", "stopped by"
DISORDER = (TIMED_OUT, LOST_PEER, FAILED)  # if a worker ended so, the other workers also have to exit
LIBRARY = re.compile(r"/lib(64)?/python(?!.*/mingpt/)|^<frozen")  # in the path of a file
ExitReason = dict[str, Any]


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation (the workers from one start or restart to the next) ended: its exit reasons."""

    exit_reasons: Sequence[ExitReason | None]  # in the order of the ranks; None: the worker stored none
    name: str = ""  # the generation's name; its first 8 characters are in the names of stack files

    def step(self) -> int | None:
        """Return the highest step in the exit reasons; None if no worker stored an exit reason."""
        return max((reason["step"] for reason in self.exit_reasons if reason), default=None)

    def sentence(self, stacks: Path | None = None) -> str:
        """Return why the workers ended, as a sentence such as "worker 1 vanished".

        The sentence names the workers that failed or stored no exit reason. If there are no such workers, the
        sentence gives the exit reasons, but of several "lost a peer" reasons only the longest. `stacks` is
        the folder to which stuck workers wrote their stacks. After a timeout, the sentence may also say at
        which lines of code workers hung.
        """
        whys = {rank: reason["why"] for rank, reason in enumerate(self.exit_reasons) if reason}
        silent = [rank for rank, reason in enumerate(self.exit_reasons) if reason is None]
        timeouts = [why.removeprefix(TIMED_OUT) for why in whys.values() if why.startswith(TIMED_OUT)]
        where = self.places(stacks, silent or whys) if stacks and timeouts else ""
        causes = [f"worker {rank} {why}" for rank, why in whys.items() if why.startswith(FAILED)]
        if silent:
            what = f"did not answer for{timeouts[0]}{where}" if timeouts else "vanished"
            causes.insert(0, f"{list_workers(silent)} {what}")
        if causes:
            return "; ".join(causes)
        losses = [why for why in whys.values() if why.startswith(LOST_PEER)]
        others = {why for why in whys.values() if why not in losses}
        return "; ".join(map(clause, [*sorted(losses, key=len)[-1:], *sorted(others)])) + where

    def places(self, stacks: Path, ranks: Iterable[int]) -> str:
        """Return ": " and the results of `stuck_place`, without repeats, for the stack files of `ranks`.

        Returns "" if the folder `stacks` has no file of these ranks that can be read.
        """
        paths = [stack_path(stacks, self.name, rank) for rank in ranks]
        found = dict[str, None]()  # in order
        for path in paths:
            with contextlib.suppress(OSError):  # it is not there, or cannot be read
                found[stuck_place(path.read_text(errors="replace"))] = None
        return f": {'; '.join(found)}" if found else ""


def clause(why: str) -> str:
    """Return `why`, the text of an exit reason, as a clause such as "the workers lost a peer"."""
    return f"the workers were {why}" if why.startswith((TOLD, "stopped")) else f"the workers {why}"


def list_workers(ranks: Sequence[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


def stuck_place(stacks: str) -> str:
    """Return where a worker's main thread hung, as "FILE:LINE in FUNCTION".

    `stacks` is the text that faulthandler wrote for the worker. The line is the innermost line outside
    libraries, or the innermost line if all are in libraries. If the worker wrote no stacks when it was stuck,
    returns a clause that says so.
    """
    # Only the timer's stacks have the title "Timeout ("; stacks written at SIGUSR2 may be older.
    _, was_stuck, dump = stacks.rpartition("Timeout (")
    # The stack of the main thread is the last one. It begins with "Thread 0x" or "Current thread 0x".
    main_thread = dump.rpartition("hread 0x")[2] if was_stuck else ""
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', main_thread)
    own = [frame for frame in frames if not LIBRARY.search(frame[0])] or frames
    if not own:
        return "it wrote no stacks (stopped, or its machine is lost)"
    path, line, function = own[0]
    return f"{Path(path).name}:{line} in {function}"


def stack_path(folder: Path, generation: str, rank: int) -> Path:
    return folder / f"worker-{rank}-{generation[:8]}.txt"
