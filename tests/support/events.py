"""Event files, read as TensorBoard reads them."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def accumulate(run_dir: Path, name: str) -> Any:
    events = EventAccumulator(str(run_dir / name), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def read_scalars(run_dir: Path, name: str = "tensorboard") -> dict[str, list[tuple[int, float]]]:
    """Return {tag: [(step, value), ...]}, in order, from the event files in the run's folder `name`."""
    events = accumulate(run_dir, name)
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def read_texts(run_dir: Path, name: str = "tensorboard") -> dict[str, list[tuple[int, str]]]:
    """Return {tag: [(step, text), ...]}, in order, from the event files in the run's folder `name`."""
    events = accumulate(run_dir, name)
    return {
        tag.removesuffix("/text_summary"): [
            (event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }
