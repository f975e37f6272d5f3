"""Check exercise 2: a sampler whose order survives a change of the number of workers in mid epoch."""

import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tutorial.checks.processes import Place, Refused, run_ranks

WINDOWS, BATCH_SIZE, SEED = 103, 16, 1337
STEPS_PER_EPOCH = -(-WINDOWS // BATCH_SIZE)  # the last step of an epoch has the 7 windows that are left
MAX_STATE_BYTES = 200
Steps = list[list[int]]  # the windows of each step
PADDED = "See tutorial/mistakes/padded_evaluation.py."
NO_SET_EPOCH = "See tutorial/mistakes/no_set_epoch.py."


def task(place: Place, steps: int, state: str | None) -> tuple[Steps, str]:
    """What this rank reads in some steps, after it has loaded a state; and its state afterwards, as JSON."""
    torch.manual_seed(os.getpid())  # processes do not share a generator; the learner's seed has to do it
    sampler = place.load("Sampler")(WINDOWS, BATCH_SIZE, SEED, place.rank, place.world_size)
    if state is not None:
        sampler.load_state_dict(json.loads(state))
    read = [check_windows(sampler.next_step()) for _ in range(steps)]
    found = sampler.state_dict()
    if not isinstance(found, dict):
        raise Refused(f"state_dict returned a {type(found).__name__}; it has to return a dict")
    text = json.dumps(found)
    if len(text) > MAX_STATE_BYTES:
        raise Refused(f"state_dict has {len(text)} bytes as JSON; {MAX_STATE_BYTES} are plenty")
    return read, text


def check_windows(value: Any) -> list[int]:
    if value is None:
        raise Refused("next_step returned nothing; it has to return a list of windows")
    windows = [int(window) for window in value]
    wrong = [window for window in windows if not 0 <= window < WINDOWS]
    if wrong:
        raise Refused(f"next_step returned window {wrong[0]}; there are the windows 0 to {WINDOWS - 1}")
    return windows


def read(answer: Path, world_size: int, steps: int, state: str | None = None) -> tuple[Steps, str]:
    """The windows that all ranks together read in each step, and the state that rank 0 saves."""
    ranks = run_ranks(answer, task, steps, state, world_size=world_size)
    for step in range(steps):
        sizes = [len(windows[step]) for windows, _ in ranks]
        if max(sizes) - min(sizes) > 1 and state is None:
            raise Refused(
                f"{world_size} workers, step {step}: the ranks read {sizes} windows. "
                "They have to share a step as evenly as they can, to within one window."
            )
    together = [sorted(chain.from_iterable(windows[step] for windows, _ in ranks)) for step in range(steps)]
    return together, ranks[0][1]


def count(windows: list[int], workers: str) -> None:
    """Raises Refused unless these windows, of a whole epoch, are all, each once."""
    found = Counter(windows)
    twice = sorted(window for window, times in found.items() if times > 1)
    never = sorted(set(range(WINDOWS)) - found.keys())
    if not twice and not never:
        return
    text = f"{workers}: of {WINDOWS} windows, {len(twice)} are read more than once in an epoch"
    text += f" (such as {twice[0]})" if twice else ""
    text += f" and {len(never)} never" + (f" (such as {never[0]})." if never else ".")
    if not never:
        text += f" The epoch is padded with windows that it has already. {PADDED}"
    elif len(never) == WINDOWS % BATCH_SIZE:
        text += f" The tail is dropped: the last step of an epoch has {WINDOWS % BATCH_SIZE} windows."
    elif len(never) > BATCH_SIZE:
        text += " Do all ranks draw the same permutation?"
    raise Refused(text)


def check_order(steps: Steps, alone: Steps, workers: int) -> None:
    for number in range(0, len(steps), STEPS_PER_EPOCH):
        epoch = steps[number : number + STEPS_PER_EPOCH]
        count(list(chain.from_iterable(epoch)), f"{workers} workers" if workers > 1 else "1 worker")
    for step, (windows, expected) in enumerate(zip(steps, alone, strict=True)):
        if windows != expected:
            raise Refused(
                f"Step {step}: {workers} workers read the windows {windows[:4]}..., one worker reads "
                f"{expected[:4]}...: the order depends on the number of workers. "
                "Cut an epoch's order into steps before you share it among ranks."
            )


def check_resume(answer: Path, alone: Steps, done: int, before: int, after: int) -> None:
    first, state = read(answer, before, done)
    rest, _ = read(answer, after, len(alone) - done, state)
    if first + rest == alone:
        return
    text = (
        f"{before} workers did {done} of {STEPS_PER_EPOCH} steps of an epoch, then {after} went on from state"
    )
    text += f" {state}"
    end = -(-done // STEPS_PER_EPOCH) * STEPS_PER_EPOCH
    epoch = (first + rest)[end - STEPS_PER_EPOCH : end]
    found = Counter(chain.from_iterable(epoch))
    twice = sum(times > 1 for times in found.values())
    never = WINDOWS - len(found)
    text += f": {twice} windows of this epoch are read again, and {never} never."
    start = end - STEPS_PER_EPOCH
    if rest[: done - start] == alone[start:done]:
        text += " The epoch begins anew: the state has to say how far in the epoch the job has come."
    elif not twice and not never:
        text += " In other steps than without the change."
    else:
        text += " A place in one rank's list means a different window if the number of ranks differs."
    raise Refused(text)


def check(answer: Path) -> str:
    alone, _ = read(answer, 1, 2 * STEPS_PER_EPOCH)
    check_order(alone, alone, 1)
    if [len(windows) for windows in alone[:STEPS_PER_EPOCH]] != [BATCH_SIZE] * 6 + [7]:
        raise Refused(
            f"The steps of an epoch have {[len(windows) for windows in alone]} windows, not 16 and 7."
        )
    if alone[:STEPS_PER_EPOCH] == alone[STEPS_PER_EPOCH:]:
        raise Refused(f"Both epochs have the same order: it has to depend on the epoch. {NO_SET_EPOCH}")
    if alone[0] == list(range(BATCH_SIZE)):
        raise Refused(f"The first step has the windows 0 to {BATCH_SIZE - 1}: the order is not shuffled.")
    for workers in (2, 3, 8):
        check_order(read(answer, workers, 2 * STEPS_PER_EPOCH)[0], alone, workers)
    check_resume(answer, alone, 3, 8, 3)
    check_resume(answer, alone, 10, 3, 8)
    check_resume(answer, alone, 7, 8, 1)
    return "1, 2, 3 and 8 workers read each window once an epoch, in the same step, also if 3 go on for 8."
