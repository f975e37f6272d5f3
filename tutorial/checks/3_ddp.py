"""Check exercise 3: data parallelism by hooks and buckets, with the same bits for any number of workers."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutorial.checks.collectives import Collectives
from tutorial.checks.processes import Place, Refused, require_tensor, run_ranks

STEPS, PARTS, WINDOWS_PER_PART = 3, 4, 4  # over all ranks: 16 windows in a step, in 4 parts
BUCKET_BYTES, LEARNING_RATE = 2_048, 0.5
Weights = dict[str, Tensor]


class Run(NamedTuple):
    """What a rank has done: the first step's gradients, the weights at the end, the last step's calls."""

    first: Weights
    weights: Tensor
    calls: list[str]  # the phase of each collective: start_part, backward or finish
    blocking: int


class Model(nn.Module):
    """Two branches. If they are computed in the other order, gradients arrive so, too, in the same bits."""

    def __init__(self, is_flipped: bool) -> None:
        super().__init__()
        torch.manual_seed(1337)
        self.is_flipped = is_flipped
        self.trunk, self.head = nn.Linear(8, 32), nn.Linear(16, 1)
        self.left, self.right = (
            nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
            for _ in range(2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        branches = (self.right, self.left) if self.is_flipped else (self.left, self.right)
        return self.head(sum(branch(hidden) for branch in branches)).square().mean()


def loss_of(model: Model, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return model(torch.randn(WINDOWS_PER_PART, 8, generator=generator))


def gradients_of(model: Model) -> Weights:
    weights = dict(model.named_parameters())
    return {
        name: require_tensor(weights[name].grad, weights[name], f"the .grad of {name} is") for name in weights
    }


def reference(place: Place) -> Weights:
    """The mean gradient of the first step, of one process without any of this."""
    model = Model(is_flipped=False)
    for part in range(PARTS):
        (loss_of(model, 0, part) / PARTS).backward()
    return gradients_of(model)


def task(place: Place, flip: bool) -> Run:
    """Train as a job does."""
    place.join()
    model = Model(is_flipped=flip and place.rank % 2 == 1)
    seen, first, count = Collectives(), Weights(), PARTS // place.world_size
    ddp = place.load("DDP")(model, BUCKET_BYTES)
    for step in range(STEPS):
        seen.calls.clear()
        for number in range(count):
            seen.phase = "start_part"
            ddp.start_part(number, count)
            seen.phase = "backward"
            loss_of(model, step, place.rank * count + number).backward()
        seen.phase = "finish"
        ddp.finish()
        if seen.not_waited_for():
            late = f"finish returned before {seen.not_waited_for()} of {len(seen.calls)} collectives were"
            raise Refused(f"{late} waited for: the optimizer would use gradients that have not arrived")
        gradients = gradients_of(model)
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        for name, weight in model.named_parameters():
            weight.data -= LEARNING_RATE * gradients[name]
        model.zero_grad()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return Run(first, weights, seen.calls, seen.blocking)


def check_calls(run: Run) -> None:
    """Raises Refused unless buckets are sent, once a step, and while the backward pass goes on."""
    calls, problem = len(run.calls), ""
    if not calls:
        problem = "no collective was called: the exercise is to be done with those of torch.distributed."
    elif calls % len(run.first) == 0:
        problem = f"each of {len(run.first)} gradients is sent separately. "
        problem += f"Fill buckets of about {BUCKET_BYTES} bytes."
    elif calls == 1:
        problem = "all gradients are in one bucket."
    elif "backward" not in run.calls:
        problem = "nothing is sent in the backward pass. Send a bucket as soon as its last gradient is there."
    elif run.blocking:
        problem = f"the backward pass stands still during {run.blocking} of all: call with async_op=True."
    if problem:
        raise Refused(f"{calls} collectives in a step: {problem}")


def run(answer: Path, workers: int, flip: bool) -> Run:
    """What rank 0 has done. Raises Refused unless each rank has the mean gradients."""
    expected: Weights = run_ranks(answer, reference)[0]
    ranks: list[Run] = run_ranks(answer, task, flip, world_size=workers)
    for rank, first in enumerate(found.first for found in ranks):
        wrong = [name for name in expected if not torch.allclose(first[name], expected[name], 1e-3, 1e-6)]
        if wrong:
            text = f"{workers} workers, rank {rank}: {len(wrong)} of {len(expected)} gradients are wrong"
            ratio = torch.cat([(first[name] / expected[name]).flatten() for name in wrong]).median().item()
            if all(torch.allclose(first[name], ratio * expected[name], 1e-2, 1e-5) for name in wrong):
                text += f": {ratio:.2f} times the mean. See tutorial/mistakes/loss_not_divided.py"
            raise Refused(f"{text}. One of them is {wrong[0]}.")
    return ranks[0]


def check(answer: Path) -> str:
    runs = {workers: run(answer, workers, flip=False) for workers in (1, 4)}
    many, few = (len(runs[workers].calls) for workers in (1, 4))
    if many == PARTS * few > 0:
        text = f"{many} collectives in a step of {PARTS} parts, {few} in a step of one: gradients are sent"
        raise Refused(f"{text} once a part. See tutorial/mistakes/all_reduce_every_micro_batch.py.")
    check_calls(runs[1])
    check_calls(runs[4])
    try:
        runs[2] = run(answer, 2, flip=True)
    except Refused as refusal:
        text = "It holds where all ranks compute `left` before `right`, and not where rank 1 computes"
        text += " `right` first: buckets, or the order of sending, follow the order of arrival."
        raise Refused(f"{text} {refusal}") from None
    for workers in (2, 4):
        difference = (runs[workers].weights - runs[1].weights).abs()
        if difference.any():
            differ, most = int((difference > 0).sum()), difference.max().item()
            text = f"After {STEPS} steps {differ} weights of 1 and of {workers} workers differ, by at most"
            text += f" {most:.1e}: the mean is right, but the order of additions depends on the number of"
            raise Refused(f"{text} workers. Add the parts one by one, in the order of their numbers.")
    early = runs[4].calls.count("backward")
    return f"1, 2 and 4 workers have the same bits; of {few} collectives in a step {early} begin in backward."
