"""Name what is wrong with a sharded optimizer, from its first step and from what it keeps."""

import torch
from torch import Tensor
from torch.nn.functional import pad

SLACK = 512  # bytes: counters of steps, a norm, zeros that fill the last share
SETTINGS = " Are lr, betas, eps and weight_decay those of torch.optim.AdamW(parameters, lr)?"


def cut(numbers: Tensor, world_size: int) -> Tensor:
    """As many rows as ranks, with zeros at the end."""
    return pad(numbers, (0, -len(numbers) % world_size)).view(world_size, -1)


def own_shares(gradients: Tensor) -> Tensor:
    """Each rank's share of the gradient of its own windows; `gradients` has a row for each rank."""
    return torch.stack([cut(gradient, len(gradients))[rank] for rank, gradient in enumerate(gradients)])


def explain_norms(norms: Tensor, right: float, max_norm: float, gradients: Tensor) -> str:
    """`norms` and `gradients` by rank: those of a rank's windows are its row of `gradients`."""
    world_size = len(norms)
    if torch.allclose(norms, torch.tensor(world_size * right), 1e-3):
        return (
            f" It is {world_size} times as large: gradients are summed, and not divided by the number of "
            "ranks. See tutorial/mistakes/loss_not_divided.py."
        )
    if torch.allclose(norms, gradients.norm(dim=1), 1e-3):
        return (
            " It is the norm of each rank's own windows. Average the gradients first, then take the norm. "
            "See tutorial/mistakes/clip_before_reduce.py."
        )
    if torch.allclose(norms.norm(), torch.tensor(right), 1e-3):
        return " It is the norm of each rank's own share: sum the squares over all ranks before the root."
    if torch.allclose(norms, own_shares(gradients).norm(), 1e-3):
        return " Gradients are not averaged: each rank takes its share from the gradient of its own windows."
    return " It is the norm after clipping." if torch.allclose(norms, torch.tensor(max_norm), 1e-3) else ""


def explain_difference(weights: Tensor, start: Tensor) -> str:
    """What is wrong if ranks (the rows) have different weights after the first step, or nothing."""
    if bool((weights == weights[0]).all()):
        return ""
    changed = (weights != start).sum(1).tolist()
    text = f"after the first step ranks have different weights: by rank {changed} of {len(start):,} changed."
    cause = " Each rank updates its share, and the shares are not gathered."
    return text + (cause if sum(changed) <= len(start) else "")


def adamw(start: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """The weights after AdamW's first step, in which each average is made of one gradient."""
    return start * (1 - lr * 0.01) - lr * gradient / (gradient.abs() + 1e-8)


def explain_weights(found: Tensor, right: Tensor, start: Tensor, gradients: Tensor, lr: float) -> str:
    wrong = ((found - right).abs() > lr / 10).nonzero().flatten()
    if bool((found[wrong] == start[wrong]).all()):
        return f" Numbers {wrong[0]:,} to {wrong[-1]:,} have not changed: they are in no rank's share."

    def is_made_by(shares: Tensor) -> bool:
        return bool(((shares.flatten()[: len(found)] - found).abs() < lr / 10).float().mean() > 0.98)

    world_size = len(gradients)
    if is_made_by(adamw(cut(start, world_size), own_shares(gradients), lr)):
        return " Gradients are not averaged: each share is updated by the gradient of one rank's windows."
    for shift in range(1, world_size):
        if is_made_by(cut(right, world_size).roll(shift, 0)):
            other = f"share (r - {shift}) mod {world_size}"
            return f" Share r has the numbers of {other}: each rank updates the share of another."
    return SETTINGS if world_size == 1 else ""


def explain_losses(world_size: int) -> str:
    """The likely cause of another loss after the first step, until which all averages are zero."""
    if world_size == 1:
        return SETTINGS
    return " Averages are wrong from the second step on: are they those of another share?"


def explain_kept(kept: list[int], hidden: int, length: int) -> str:
    """What is wrong with the bytes that ranks keep, or nothing. A view keeps `hidden` ones that it lacks."""
    world_size, share = len(kept), -(-length // len(kept))
    text = f"between steps the ranks keep {kept} bytes. A share has {share:,} numbers: their averages need "
    text += f"{8 * share:,} bytes, and {12 * share:,} are allowed."
    if hidden > SLACK:
        return f"{text} {hidden:,} are of no use: a view keeps all that it was cut from. Use clone()."
    if sum(kept) < 8 * length - SLACK:
        return f"{text} Averages are not kept: each step begins with zeros."
    is_too_much = max(kept) > 12 * share + SLACK
    if is_too_much and world_size > 1 and min(kept) >= 8 * length:
        return f"{text} Each rank keeps the averages of all numbers, {8 * length:,} bytes."
    if min(kept) < 8 * share - SLACK or (is_too_much and sum(kept) <= 12 * length + SLACK * world_size):
        return f"{text} Shares are uneven: share out the numbers, not the parameters."
    return f"{text} Let go of all other tensors before step returns." if is_too_much else ""
