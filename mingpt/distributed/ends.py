"""How a worker or a generation ended, in words: exit reasons, and the sentence that they add up to.

A worker that exits stores an exit reason, {"why": text, "step": its last completed step}. A worker without
one was killed, or cut off from the store.
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
DISORDER = (TIMED_OUT, LOST_PEER, FAILED)  # other workers have to leave then, too
ExitReason = dict[str, Any]


@dataclass(frozen=True)
class GenerationEnd:
    """A generation's end, by its workers' exit reasons."""

    exit_reasons: Sequence[ExitReason | None]  # by rank
    name: str = ""

    def step(self) -> int | None:
        """Return the latest step that a worker recorded when it exited; None without any exit reason."""
        return max((reason["step"] for reason in self.exit_reasons if reason), default=None)

    def sentence(self, stacks: Path | None = None) -> str:
        """Return the end as a sentence, after a timeout with the lines where workers hung (from `stacks`).

        The cause is told if there is one: workers without a reason, and those that failed; else all reasons.
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
        """Return ": " and where the workers of these ranks were stuck, by their files; "" without any."""
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
    """Return where the main thread is, by what faulthandler wrote, as "FILE:LINE in FUNCTION".

    This is the innermost line outside libraries, if there is one. Without stacks, a clause says so.
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
