"""How workers ended: the exit reason that each stores, and the sentence that is made of all of them.

An exit reason is {"why": text, "step": the worker's last completed step}. A worker without one was killed, or
cut off from the store. A generation is the workers between two restarts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What `why` begins with.
TIMED_OUT = "timed out waiting for a peer after"
LOST_PEER = "lost a peer"
FAILED = "failed"
TOLD = "told to stop"
DISORDER = (TIMED_OUT, LOST_PEER, FAILED)  # the other workers have to exit, too
ExitReason = dict[str, Any]


@dataclass(frozen=True)
class GenerationEnd:
    """How the workers between two restarts (a generation) ended, by the exit reasons that they stored."""

    exit_reasons: Sequence[ExitReason | None]  # by rank
    name: str = ""

    def step(self) -> int | None:
        """Return the latest step that a worker recorded when it exited; None without any exit reason."""
        return max((reason["step"] for reason in self.exit_reasons if reason), default=None)

    def sentence(self, stacks: Path | None = None) -> str:
        """Return why the workers ended, as a sentence such as "worker 1 vanished".

        It names workers that failed or stored no exit reason; if there are none, it has the others' reasons.
        If `stacks` is the folder of the workers' stacks, it says after a timeout at which lines they hung.
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
        """Return ": " and the lines where these ranks hung, by their files in `stacks`; "" without files."""
        paths = [stack_path(stacks, self.name, rank) for rank in ranks]
        found = dict.fromkeys(
            stuck_place(path.read_text(errors="replace")) for path in paths if path.exists()
        )
        return f": {'; '.join(found)}" if found else ""


def clause(why: str) -> str:
    """Return an exit reason that several workers share as a clause, such as "the workers lost a peer"."""
    return f"the workers were {why}" if why.startswith((TOLD, "stopped")) else f"the workers {why}"


def list_workers(ranks: Sequence[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


def stuck_place(stacks: str) -> str:
    """Return where a worker's main thread hung, as "FILE:LINE in FUNCTION".

    `stacks` is what faulthandler wrote. The line is the innermost one outside libraries, if there is one.
    Returns a clause that says so if there are no stacks.
    """
    # Only the timer's stacks have the title "Timeout ("; those of SIGUSR2 may be of an earlier moment.
    _, was_stuck, dump = stacks.rpartition("Timeout (")
    # The main thread is the last, after "Thread 0x" or "Current thread 0x".
    main_thread = dump.rpartition("hread 0x")[2] if was_stuck else ""
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', main_thread)
    own = [frame for frame in frames if "/lib/python" not in frame[0]] or frames
    if not own:
        return "it wrote no stacks (stopped, or its machine is lost)"
    path, line, function = own[0]
    return f"{Path(path).name}:{line} in {function}"


def stack_path(folder: Path, generation: str, rank: int) -> Path:
    return folder / f"worker-{rank}-{generation[:8]}.txt"
