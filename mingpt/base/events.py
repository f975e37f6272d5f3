"""Named points in a run at which tests, benchmarks and `python -m mingpt verify` can act.

    events.subscribe("forward_end", lambda step, micro_batch: ...)

A callback runs in the thread that emits the event, and the callback's errors are raised in that thread. In
EVENTS, the text of an event begins with the names of the keyword arguments that the callback gets, if any.
The callback may change tensors among these arguments in place.
"""

from collections.abc import Callable
from typing import Any

Callback = Callable[..., Any]

EVENTS = {
    "worker_start": "launch: a process begins, worker or agent, before it reads its configuration",
    "run_start": "state, strategy: everything is loaded, the first step comes next",
    "run_end": "state",
    "step_start": "step: the number of completed steps, as in all events up to optimizer_end",
    "batch": "step, micro_batch, inputs, targets: (B, T) int64 on the CPU, before they are used",
    "forward_end": "step, micro_batch",
    "backward_end": "step, micro_batch: the gradients of this micro-batch are in `grad`, or on their way",
    "partial_sums": "this rank has added a micro-batch's gradients to its partial sums",
    "reduction_start": "before gradients are exchanged, once per bucket, in the thread that exchanges them",
    "reduction_end": "step: every `grad` holds the mean over the step's micro-batches",
    "optimizer_end": "step: the update is done, not yet known to be finite",
    "step_end": "step: the number of completed steps",
    "evaluation_start": "step",
    "evaluation_batch": "number: of the batch that is evaluated next, in the thread that evaluates",
    "save_start": "kind ('disk' or 'memory'), step: the training loop waits from here",
    "save_end": "kind, step: to here; writing goes on in the background",
    "file_write": "name, path, size: a file of a snapshot is about to be written in a local folder",
    "file_progress": "name, written, size: so many bytes of it are written",
}

_subscribers: dict[str, list[Callback]] = {}


def subscribe(name: str, callback: Callback) -> None:
    """Call `callback` at each event `name` from now on, with the keyword arguments that EVENTS names.

    Raises ValueError for an unknown name.
    """
    if name not in EVENTS:
        raise ValueError(f"there is no event {name!r}; there are {', '.join(EVENTS)}")
    _subscribers.setdefault(name, []).append(callback)


def emit(event: str, /, **details: Any) -> None:
    """Call the callbacks of `event` with `details`, in the order of their subscription, in this thread."""
    for callback in _subscribers.get(event, ()):
        callback(**details)
