"""Check exercise 6: AdamW whose averages are shared out (ZeRO-1), with the loss of one process."""

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutorial.checks import causes
from tutorial.checks.counting import CountedCollectives, kept_bytes
from tutorial.checks.processes import Place, Refused, name_ranks, run_ranks

STEPS, WINDOWS, LR, MAX_NORM = 12, 24, 1e-2, 1.0
# W ranks add a gradient's parts in another order than one process: the last of float32's seven digits
# differs, and a weight's step differs more where its gradient is nearly zero. The solution differs by 3e-7
# of the loss, and by 1e-6 in a weight; a wrong step of AdamW moves a weight by about LR.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, LR / 10


def make_model() -> nn.Sequential:
    """The embedding is 72% of all numbers, as in a small GPT; 2 and 4 do not divide their number, 5,681."""
    torch.manual_seed(1337)
    return nn.Sequential(nn.Embedding(128, 32), nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 1))


def loss_of(model: nn.Module, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    """Mean loss of this rank's windows. It is large in every third step: gradients are clipped there."""
    windows = torch.randint(128, (WINDOWS, 2), generator=torch.Generator().manual_seed(step))
    inputs = windows[rank::world_size]
    targets = (inputs.float().sum(1, keepdim=True) / 10).sin() * (8 if step % 3 == 0 else 0.5)
    return (model(inputs) - targets).square().mean()


def join(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors if tensor is not None])


def reference(place: Place, max_norm: float) -> dict[str, Any]:
    """What one process does with `torch.optim.AdamW`."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    found: dict[str, Any] = {"start": join(model.parameters()), "losses": [], "norms": [], "weights": []}
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        found["weights"].append(join(model.parameters()))
    return found


def task(place: Place) -> dict[str, Any]:
    """Train as a job does. `kept` is the least of all steps: gloo frees tensors some time after `wait`."""
    gc.freeze()  # kept_bytes looks at what is made from here on
    place.join()
    model, seen = make_model(), CountedCollectives()
    optimizer = place.load("ShardedAdamW")(list(model.parameters()), LR, MAX_NORM)
    found, kept = dict[str, Any](losses=[]), list[tuple[int, int]]()
    for step in range(STEPS):
        loss = loss_of(model, step, place.rank, place.world_size)
        loss.backward()
        found["losses"].append(loss.item())
        gradient = join(weight.grad for weight in model.parameters()).tolist()
        norm = optimizer.step()
        if not isinstance(norm, float):
            raise Refused(f"step returned {norm!r:.80}; it has to return the norm, a float")
        if seen.not_waited_for():
            raise Refused("step returned while a collective had not been waited for")
        seen.works.clear()  # they hold tensors
        if not bool(join(model.parameters()).isfinite().all()):
            raise Refused(f"after step {step + 1} weights are not finite")
        model.zero_grad()
        del loss  # and what backward passes need
        kept.append(kept_bytes(model.parameters()))
        if step == 0:
            found |= {"gradient": gradient, "norm": norm, "first": join(model.parameters()).tolist()}
    found["kept"], found["hidden"] = min(kept[1:])
    return found | {"last": join(model.parameters()).tolist(), "sent": seen.bytes / STEPS}


def check_first_step(ranks: dict[str, Tensor], right: dict[str, Any]) -> None:
    norm, start = right["norms"][0], right["start"]
    if not torch.allclose(ranks["norm"], torch.tensor(norm), 1e-4):
        found = [round(of_rank, 4) for of_rank in ranks["norm"].tolist()]
        cause = causes.explain_norms(ranks["norm"], norm, MAX_NORM, ranks["gradient"])
        raise Refused(f"by rank the norm of the first step is {found}, of one process {norm:.4f}.{cause}")
    if cause := causes.explain_difference(ranks["first"], start):
        raise Refused(cause)
    wrong = ((ranks["first"][0] - right["weights"][0]).abs() > WEIGHT_TOLERANCE).nonzero().flatten()
    if len(wrong):
        cause = causes.explain_weights(ranks["first"][0], right["weights"][0], start, ranks["gradient"], LR)
        raise Refused(f"after the first step {len(wrong):,} of {len(start):,} numbers are wrong.{cause}")


def check_all_steps(ranks: dict[str, Tensor], right: dict[str, Any], unclipped: dict[str, Any]) -> float:
    """The largest relative difference of a loss from that of one process."""
    losses, expected = ranks["losses"].mean(0), torch.tensor(right["losses"])
    differences, last = (losses / expected - 1).abs(), ranks["last"]
    is_right = torch.allclose(last, right["weights"][-1], 0, WEIGHT_TOLERANCE)
    if is_right and bool((differences < LOSS_TOLERANCE).all()):
        return differences.max().item()
    wrong = (~(differences < LOSS_TOLERANCE)).nonzero().flatten().tolist()
    text = f"after the last step weights differ, by at most {(last - right['weights'][-1]).abs().max():.1e}."
    if wrong:
        text = (
            f"the first step is right, but the loss of step {wrong[0] + 1} is {losses[wrong[0]]:.6f}, of one "
        )
        text += f"process {expected[wrong[0]]:.6f}."
    if torch.allclose(last, unclipped["weights"][-1], 0, WEIGHT_TOLERANCE):
        raise Refused(f"{text} Gradients are not clipped.")
    raise Refused(text + causes.explain_losses(len(ranks["losses"])))


def check_sent(ranks: dict[str, Tensor], length: int) -> str:
    W = len(ranks["sent"])
    sent, gather = ranks["sent"].mean().item() * (W - 1) / W, 4 * length * (W - 1) / W
    if sent > 3 * gather + causes.SLACK:
        raise Refused(
            f"losses are right, but a rank sends {sent:,.0f} bytes in a step. An all-reduce of gradients and "
            f"an all-gather of weights send {3 * gather:,.0f}, with a reduce-scatter {2 * gather:,.0f}."
        )
    return f"sends {sent:,.0f} bytes in a step (DDP: {2 * gather:,.0f})"


def check(answer: Path) -> str:
    gc.disable()
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports, once for all processes, for a second
    gc.freeze()  # neither forked processes nor the end of this one look through what was imported
    gc.enable()
    right, unclipped = (run_ranks(answer, reference, norm)[0] for norm in (MAX_NORM, float("inf")))
    length, difference = len(right["start"]), 0.0
    for world_size in (1, 2, 4):
        outcomes = run_ranks(answer, task, world_size=world_size)
        ranks = {key: torch.tensor([outcome[key] for outcome in outcomes]) for key in outcomes[0]}
        try:
            check_first_step(ranks, right)
            if cause := causes.explain_kept(ranks["kept"].tolist(), int(ranks["hidden"].max()), length):
                raise Refused(cause)
            difference = max(difference, check_all_steps(ranks, right, unclipped))
            sends = check_sent(ranks, length)
        except Refused as refusal:
            raise Refused(f"{name_ranks(range(world_size)).capitalize()}: {refusal}") from None
    return (
        f"1, 2 and 4 ranks have the losses of one process, to within {difference:.0e}. Each of 4 ranks keeps "
        f"{int(ranks['kept'].max()):,} bytes (averages of all numbers: {8 * length:,}) and {sends}."
    )
