"""How a generation ended, as the reasons say that its workers left in the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

TIMED_OUT = "timed out waiting for a peer"
LOST_PEER = "lost a peer"
FAILED = "failed"
TOLD = "told to stop"
MAX_REPEATS = 3  # generations, one after the other, that fail in the same place


class PeerEnd(Enum):
    """What the exit of a worker means for those of its generation that still run."""

    AGREED = "the job ends, or all workers leave for the same reason"
    STOPPED = "it was told to stop by a signal that could not wait for the others"
    LOST = "it failed, or was killed"

    @classmethod
    def of(cls, reason: dict[str, Any] | None) -> "PeerEnd":
        """From an exit reason; None: it left none."""
        if reason is None:
            return cls.LOST
        if reason.get("agreed"):
            return cls.AGREED
        return cls.STOPPED if reason["why"].startswith(TOLD) else cls.LOST


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation ended, as its store says. A rank without an exit reason was killed or cut off."""

    world_size: int
    exit_reasons: dict[int, dict[str, Any]]  # rank -> {"why": ..., "step": ...}

    def to_json(self) -> list[Any]:
        return [self.world_size, list(self.exit_reasons.items())]

    @classmethod
    def from_json(cls, content: list[Any]) -> "GenerationEnd":
        return cls(content[0], dict(content[1]))

    def step(self) -> int | None:
        """The last step that the generation had completed."""
        return max((reason["step"] for reason in self.exit_reasons.values()), default=None)

    def failures(self) -> dict[int, str]:
        """{rank: why} of those that failed."""
        reasons = {rank: reason["why"] for rank, reason in self.exit_reasons.items()}
        return {rank: why for rank, why in reasons.items() if why.startswith(FAILED)}

    def failed_to_begin(self) -> bool:
        """Whether it failed before it had begun to train, and no worker merely vanished."""
        failed = [self.exit_reasons[rank] for rank in self.failures()]
        all_known = len(self.exit_reasons) == self.world_size
        return bool(failed) and all_known and not any(reason.get("began") for reason in failed)

    def sentence(self) -> str:
        reasons = {rank: reason["why"] for rank, reason in self.exit_reasons.items()}
        missing = [rank for rank in range(self.world_size) if rank not in reasons]
        parts = []
        if missing:
            who = ("worker " if len(missing) == 1 else "workers ") + ", ".join(map(str, missing))
            timeouts = [why.removeprefix(TIMED_OUT) for why in reasons.values() if why.startswith(TIMED_OUT)]
            parts.append(f"{who} timed out{timeouts[0]}" if timeouts else f"{who} vanished")
        parts += [f"worker {rank} {why}" for rank, why in self.failures().items()]
        if parts:
            return "; ".join(parts)
        if any(why.startswith(TIMED_OUT) for why in reasons.values()):
            return "the workers timed out waiting for each other"
        lost = [why for why in reasons.values() if why.startswith(LOST_PEER)]
        others = {passive(why) for why in reasons.values() if why not in lost}
        return "; ".join(([f"the workers {max(lost, key=len)}"] if lost else []) + sorted(others))


def passive(why: str) -> str:
    """ "the workers were told to stop by SIGTERM", "the workers finished" """
    return f"the workers were {why}" if why.startswith((TOLD, "stopped")) else f"the workers {why}"


def repeated_failure(ends: Sequence[GenerationEnd]) -> str | None:
    """One sentence if the last generations all failed before they had begun to train, at the same step."""
    last = ends[-MAX_REPEATS:]
    same_step = len({end.step() for end in last}) == 1
    if len(last) < MAX_REPEATS or not same_step or not all(end.failed_to_begin() for end in last):
        return None
    return repeated_sentence("before the first step", last[-1].sentence())


def repeated_sentence(where: str, end: str) -> str:
    repeats = f"{MAX_REPEATS} generations failed one after the other {where} ({end})"
    return f"{repeats}: a restart would repeat it"
