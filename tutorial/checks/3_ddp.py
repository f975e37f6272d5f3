"""Check exercise 3: data parallelism by hooks and buckets, with the same bits for any number of workers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutorial.checks.collectives import Collectives
from tutorial.checks.processes import Place, Refused, require_tensor, run_ranks

STEPS, PARTS, WINDOWS_PER_PART = 3, 4, 4  # over all ranks: 16 windows in a step, in 4 parts
BUCKET_BYTES, LEARNING_RATE = 2_048, 0.5
Weights = dict[str, Tensor]


class Model(nn.Module):
    """Two branches with parameters of the same shapes, computed in either order: the result is the same.

    Gradients arrive in the order opposite to that of computing. Where models have branches, this order may
    differ between ranks; here it does if `is_flipped` does.
    """

    def __init__(self, is_flipped: bool) -> None:
        super().__init__()
        self.is_flipped = is_flipped
        self.trunk, self.head = nn.Linear(8, 32), nn.Linear(16, 1)
        self.left, self.right = (
            nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
            for _ in range(2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        if self.is_flipped:
            right, left = self.right(hidden), self.left(hidden)
        else:
            left, right = self.left(hidden), self.right(hidden)
        return self.head(left + right).square().mean()


def inputs_of(step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(WINDOWS_PER_PART, 8, generator=generator)


def make_model(is_flipped: bool = False) -> Model:
    torch.manual_seed(1337)
    return Model(is_flipped)


def update(model: Model, gradients: Weights) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.sub_(LEARNING_RATE * gradients[name])
    model.zero_grad(set_to_none=True)


def reference(place: Place) -> Weights:
    """The mean gradient of the first step, of one process without any of this."""
    model = make_model()
    for part in range(PARTS):
        (model(inputs_of(0, part)) / PARTS).backward()
    return {name: require_tensor(weight.grad, weight, name) for name, weight in model.named_parameters()}


def task(place: Place, flip: bool) -> dict[str, Any]:
    """Train as a job does: the gradients of the first step, the weights at the end, and what was called."""
    place.join()
    model = make_model(is_flipped=flip and place.rank % 2 == 1)
    seen = Collectives()
    ddp = place.load("DDP")(model, BUCKET_BYTES)
    count, first, calls = PARTS // place.world_size, Weights(), list[int]()
    for step in range(STEPS):
        before = len(seen.calls)
        for number in range(count):
            seen.phase = "start_part"
            ddp.start_part(number, count)
            seen.phase = "backward"
            model(inputs_of(step, place.rank * count + number)).backward()
        seen.phase = "finish"
        ddp.finish()
        gradients = {
            name: require_tensor(weight.grad, weight, f"After finish the .grad of {name}: it")
            for name, weight in model.named_parameters()
        }
        calls.append(len(seen.calls) - before)
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        if seen.not_waited_for():
            raise Refused(
                f"finish returned while {seen.not_waited_for()} of {calls[-1]} collectives had not been "
                "waited for: the optimizer would use gradients that have not arrived"
            )
        update(model, gradients)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    phases = {phase: seen.calls.count(phase) for phase in ("start_part", "backward", "finish")}
    return {"first": first, "weights": weights, "calls": calls, "phases": phases, "blocking": seen.blocking}


def check_gradients(rank: int, found: Weights, expected: Weights, workers: int) -> None:
    wrong = [name for name in expected if not torch.allclose(found[name], expected[name], 1e-3, 1e-6)]
    if not wrong:
        return
    text = f"{workers} workers, rank {rank}: the gradients of {len(wrong)} of {len(expected)} parameters "
    text += f"are not the mean of all parts, {wrong[0]} for instance."
    ratio = torch.cat([(found[name] / expected[name]).flatten() for name in expected]).median().item()
    if all(torch.allclose(found[name], ratio * expected[name], 1e-2, 1e-5) for name in expected):
        text += f" They are {ratio:.2f} times the mean. See tutorial/mistakes/loss_not_divided.py."
    raise Refused(text)


def check_calls(run: dict[str, Any], parameters: int) -> None:
    """Raises Refused unless buckets are sent, once a step, and while the backward pass goes on."""
    calls = run["calls"][-1]
    if not calls:
        raise Refused(
            "No collective was called: this exercise is to be done with those of torch.distributed."
        )
    if calls % parameters == 0:
        raise Refused(
            f"{calls} collectives in a step, {parameters} parameters: each gradient is sent alone. "
            f"Collect them in buckets of {BUCKET_BYTES} bytes or a little more."
        )
    if calls == 1:
        raise Refused("One collective in a step: all gradients are in one bucket, so nothing is sent early.")
    if not run["phases"]["backward"]:
        raise Refused(
            f"Nothing is sent during the backward pass: {calls} collectives, all in finish. "
            "A bucket has to be sent as soon as its last gradient is there."
        )
    if run["blocking"]:
        raise Refused(
            f"{run['blocking']} collectives are called in the backward pass without async_op=True, so that "
            "it stands still until they are complete."
        )


def check_bits(runs: dict[int, dict[str, Any]]) -> None:
    for workers in (2, 4):
        one, many = (
            torch.cat([weight.flatten() for weight in runs[w]["weights"].values()]) for w in (1, workers)
        )
        differ = int((one != many).sum())
        if differ:
            raise Refused(
                f"After {STEPS} steps {differ} of {len(one)} weights of 1 and of {workers} workers differ, "
                f"by at most {(one - many).abs().max().item():.1e}: the mean is right, but the order of additions "
                "depends on the number of workers. Add the parts one by one, in the order of their numbers."
            )


def run(answer: Path, workers: int, expected: Weights, flip: bool) -> dict[str, Any]:
    ranks = run_ranks(answer, task, flip, world_size=workers)
    for rank, found in enumerate(ranks):
        check_gradients(rank, found["first"], expected, workers)
    return ranks[0]


def check(answer: Path) -> str:
    expected: Weights = run_ranks(answer, reference)[0]
    runs = {1: run(answer, 1, expected, flip=False)}
    runs[4] = run(answer, 4, expected, flip=False)
    by_parts = [runs[workers]["calls"][-1] for workers in (1, 4)]
    if by_parts[0] == PARTS * by_parts[1] > 0:
        raise Refused(
            f"{by_parts[0]} collectives in a step of {PARTS} parts, {by_parts[1]} in a step of one: "
            "gradients are sent once a part. See tutorial/mistakes/all_reduce_every_micro_batch.py."
        )
    check_calls(runs[1], len(expected))
    check_calls(runs[4], len(expected))
    try:
        runs[2] = run(answer, 2, expected, flip=True)
    except Refused as refusal:
        raise Refused(
            "It holds while gradients arrive in the same order on all ranks, and not where rank 1 computes "
            "the branches `left` and `right` in another order than rank 0: buckets, or the order in which "
            f"they are sent, follow the order of arrival. {refusal}"
        ) from None
    check_bits(runs)
    phases, calls = runs[4]["phases"], runs[4]["calls"][-1]
    return (
        f"the bits of 1, 2 and 4 workers are the same; of {calls} collectives in a step, "
        f"{phases['backward'] // STEPS} begin during the backward pass."
    )
