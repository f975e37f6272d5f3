"""Check exercise 1: an all-reduce that sends each chunk once around the ring, twice."""

from pathlib import Path

import torch

from tutorial.checks.processes import Place, Refused, name_ranks, require_tensor, run_ranks
from tutorial.checks.sends import Send, count_sends, refuse_collectives

RUNS = ((4, 10_000), (2, 1_000), (3, 10_007), (4, 3))  # ranks, numbers in the tensor
BASE = 64  # rank r adds multiples of 64 ** r, so that a sum shows whose parts it has, and how often


def positions(length: int) -> torch.Tensor:
    """1 to 7, over and over: a chunk in another place does not fit."""
    return torch.arange(length) % 7 + 1


def task(place: Place, length: int) -> tuple[torch.Tensor, list[Send]]:
    place.join()
    sends = count_sends()
    refuse_collectives()
    all_reduce = place.load("all_reduce")
    tensor = positions(length).float() * BASE**place.rank
    result = require_tensor(all_reduce(tensor.clone()), tensor, "all_reduce returned")
    return result.clone(), sends


def describe(result: torch.Tensor, world_size: int) -> str:
    """What is wrong with a sum, or nothing."""
    length = len(result)
    parts = torch.zeros(length, world_size)  # how often each rank's part is in each number
    left = result.double() / positions(length)
    whole = sum(BASE**rank for rank in range(world_size))
    if bool((left == whole).all()):
        return ""
    if torch.allclose(left * world_size, torch.full_like(left, whole)):
        return "returned the mean, where the sum was asked for"
    for rank in reversed(range(world_size)):
        parts[:, rank] = torch.floor(left / BASE**rank)
        left -= parts[:, rank] * BASE**rank
    wrong = ((parts != 1).any(1) | (left != 0)).nonzero().flatten().tolist()
    text = f"returned {len(wrong):,} wrong numbers of {length:,}"
    if bool((left != 0).any()):
        return f"{text}. Chunks lie in the wrong place: numbers of other positions are in the sum"
    counts = [int(count) for count in parts[wrong[0]]]
    times = ", ".join(f"rank {rank}'s part {count} times" for rank, count in enumerate(counts))
    text += f". Number {wrong[0]:,}, for instance, has {times}"
    if bool((parts[wrong].sum(1) == 1).all()):
        return (
            f"{text}. All have only one rank's part: what is received overwrites a chunk where it should be "
            "added, or the second round begins with a chunk that is not summed"
        )
    if bool((parts > 1).any()):
        return f"{text}. A part is added more than once"
    return f"{text}. Unfinished chunks: they are passed on in the wrong order, or not to all"


def check_bytes(sends: list[list[Send]], world_size: int, length: int) -> None:
    """Raises Refused unless each rank has sent 2 n (W - 1) / W bytes, to one neighbour."""
    sent = [sum(send.bytes for send in of_rank) for of_rank in sends]
    size, run = 4 * length, f"{world_size} ranks, {length:,} numbers: the sum is right, but"
    even = [2 * size * (world_size - 1) // world_size] * world_size
    if length % world_size == 0 and sent != even:
        text = f"{run} the ranks sent {sent} bytes, and a ring sends {even}"
        whole = (world_size - 1) * size
        if sent == [whole] + [size] * (world_size - 1):
            text += ". All go through rank 0, whose link has to carry everything"
        elif sent == [whole] * world_size:
            text += ". Each rank sends whole tensors; in a ring it sends a chunk in each turn"
        raise Refused(f"{text}.")
    if sum(sent) != 2 * size * (world_size - 1):
        raise Refused(
            f"{run} {sum(sent):,} bytes were sent in all, by a ring {2 * size * (world_size - 1):,}."
        )
    ways = [[{(rank + step) % world_size} for rank in range(world_size)] for step in (1, -1)]
    targets = [{send.to for send in of_rank if send.numbers} for of_rank in sends]
    if not any(all(to <= way[rank] for rank, to in enumerate(targets)) for way in ways):
        raise Refused(f"{run} the ranks sent to {targets}: in a ring each sends to the next rank only.")


def check(answer: Path) -> str:
    for world_size, length in RUNS:
        outcomes = run_ranks(answer, task, length, world_size=world_size)
        wrong = [(rank, describe(result, world_size)) for rank, (result, _) in enumerate(outcomes)]
        wrong = [(rank, sentence) for rank, sentence in wrong if sentence]
        if wrong:
            rank, sentence = wrong[0]
            others = f" Wrong, too: {name_ranks([rank for rank, _ in wrong[1:]])}." if wrong[1:] else ""
            raise Refused(f"{world_size} ranks, {length:,} numbers: rank {rank} {sentence}.{others}")
        check_bytes([sends for _, sends in outcomes], world_size, length)
    return "2, 3 and 4 ranks have the sum, and each sends 2 n (W - 1) / W bytes to its neighbour."
