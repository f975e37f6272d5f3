"""The interface of a place that metrics go to: a file, a terminal, a picture, TensorBoard, a tracker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Values = Mapping[str, float]


@dataclass(frozen=True)
class RunInfo:
    """What a sink is built from."""

    run_dir: Path
    max_steps: int
    first_step: int  # that this generation starts from
    is_fresh: bool  # a new run, not a resumed or restarted one
    restarts: list[int]  # steps at which later generations began
    entropy_floor: float | None  # nats per token of the validation part, where they are known
    unwritten: list[dict[str, Any]] = field(default_factory=list)  # records that only the snapshot has
    may_write: Callable[[], bool] = lambda: True  # false once the run folder is another job's
    is_main: bool = True  # false where it is reported to a second run folder, on another node's disk
    run_id: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # the configuration; URLs without credentials
    starts: list[tuple[int, str]] = field(default_factory=list)  # see RunHistory.starts


class Sink:
    """Override what applies; a value that a sink does not know is no error."""

    def log(self, step: int, values: Values) -> None:
        """Values of metrics after `step`."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """A text after `step`: the sample of an evaluation."""

    def on_step(self, step: int) -> None:
        """A step is complete; there need not be values."""

    def rewind(self, step: int) -> None:
        """Drop what was logged past `step`: the run goes on from there."""

    def replay(self, step: int, values: Values) -> None:
        """Values of an earlier generation, after `rewind` and in their order."""

    def flush(self) -> None:
        """Make what was logged durable: a snapshot is about to be named. May be called from any thread."""

    def unwritten(self) -> list[dict[str, Any]]:
        """The records that are logged and not written, because the disk is full, say. From any thread."""
        return []

    def close(self) -> None:
        """The run has ended, or this generation of it."""
