"""Event files, read as TensorBoard reads them."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_scalars(run_dir: Path, name: str = "tensorboard") -> dict[str, list[tuple[int, float]]]:
    events: Any = EventAccumulator(str(run_dir / name), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
