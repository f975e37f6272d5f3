"""Draw the pictures of the tutorial into tutorial/pictures/.

    python -m tutorial.pictures

Run this program again after a change of it.
"""

import importlib
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler

from mingpt.base.rows import RowMap
from mingpt.config import ModelConfig
from mingpt.model import GPT
from tutorial.drawing import (
    BLUE,
    BOLD,
    GREEN,
    GREY,
    LEFT,
    ORANGE,
    PURPLE,
    RED,
    RUST,
    WHITE,
    WIDTH,
    YELLOW,
    Picture,
)

single = importlib.import_module("tutorial.1_single")  # an import statement allows no name that begins with 1
WORLD_SIZE, MICRO_BATCHES = 2, 2
SNAPSHOT_EVERY, KILLED_IN = 20, 60
FLOAT_BYTES, RENDEZVOUS_PORT = 4, 29400
RANK_COLORS = (BLUE, ORANGE)
FOLDER = Path(__file__).parent / "pictures"


def parameter_bytes() -> dict[str, list[int]]:
    """{block, or "rest": bytes of its parameters that each rank holds if they are sharded}."""
    _, vocab_size = single.make_dataset()
    with torch.device("meta"):
        config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
        model = GPT(config, vocab_size=vocab_size, block_size=single.BLOCK_SIZE)
    units: dict[str, list[int]] = {}
    for name, weight in model.named_parameters():
        unit = name[: len("h.0")] if name.startswith("h.") else "rest"
        held = units.setdefault(unit, [0] * WORLD_SIZE)
        rows = RowMap({name: tuple(weight.shape)}, WORLD_SIZE, (name,))
        for rank, numel in enumerate(rows.numel(name)):
            held[rank] += FLOAT_BYTES * numel
    return units


def draw_who_holds_what() -> Picture:
    units = parameter_bytes()
    whole = sum(map(sum, units.values()))
    shares = [sum(unit[rank] for unit in units.values()) for rank in range(WORLD_SIZE)]
    gathered = sum(units["h.0"]) + sum(units["rest"])
    everything = [whole, whole, 2 * whole]
    zero = [[whole, whole, 2 * share] for share in shares]
    fsdp = [[share, share, 2 * share, gathered] for share in shares]
    arrangements = {
        "One process": [everything],
        "DDP: each rank holds everything.": [everything] * WORLD_SIZE,
        "Sharded optimizer (ZeRO-1): each rank holds the averages of its half of the parameters.": zero,
        "FSDP: each rank holds its half of everything. A block is gathered while it computes.": fsdp,
    }
    picture = Picture(
        "Who holds what: bytes on each rank, in float32",
        f"Parameters and gradients take {whole:,} bytes each, AdamW's two averages {2 * whole:,}. Under DDP "
        f"each of {WORLD_SIZE} ranks holds all of it. With a sharded optimizer rank 0 holds "
        f"{2 * shares[0]:,} bytes of averages. Under FSDP it holds {4 * shares[0]:,} bytes, and another "
        f"{gathered:,} of gathered parameters while a block computes.",
        484,
    )
    fills = {"parameters": BLUE, "gradients": ORANGE, "AdamW's two averages": GREEN, "gathered": WHITE}
    picture.legend(50, fills)
    y = 94
    for title, bars in arrangements.items():
        picture.text(LEFT, y, title, style=BOLD)
        y += 10
        for rank, sizes in enumerate(bars):
            x = 80.0
            picture.text(LEFT, y + 18, f"rank {rank}")
            for size, fill in zip(sizes, fills.values(), strict=False):
                width = 600 * size / sum(everything)
                picture.box(x, y, width, 26, fill, f"{size:,}", dashed=fill == WHITE)
                x += width
            picture.text(x + 10, y + 18, f"in all {sum(sizes):,}")
            y += 32
        y += 24
    picture.text(LEFT, 450, "Gathered: the parameters of one block and those that are in no block.")
    picture.text(LEFT, 468, "Not drawn: activations, and DDP's buckets, by default a copy of the gradients.")
    return picture


def windows_read(world_size: int) -> list[list[int]]:
    """The windows that each rank reads in epoch 0, in order."""
    dataset, _ = single.make_dataset()
    samplers: list[DistributedSampler[int]] = [
        DistributedSampler(dataset, world_size, rank, seed=single.SEED) for rank in range(world_size)
    ]
    return [list(sampler) for sampler in samplers]


def draw_who_reads_what() -> Picture:
    order, by_rank = windows_read(1)[0], windows_read(WORLD_SIZE)
    batch, share = single.BATCH_SIZE, single.BATCH_SIZE // WORLD_SIZE
    picture = Picture(
        f"Who reads what: the first two batches of {batch} windows",
        f"The first batch is windows {order[:batch]}; the second is "
        f"{order[batch : 2 * batch]}. One process reads them all. Under DDP rank 0 reads "
        f"{by_rank[0][:share]} of the first batch and rank 1 {by_rank[1][:share]}. With "
        f"{MICRO_BATCHES} micro-batches each rank reads the same windows in {MICRO_BATCHES} parts.",
        480,
    )
    picture.legend(50, {f"rank {rank}": color for rank, color in enumerate(RANK_COLORS)})
    picture.text(200, 62, "In a box: the number of a window in the text. Above: its place in the epoch.")
    parts = [f"DDP, micro-batch {turn + 1}" for turn in range(MICRO_BATCHES)]
    for step in range(2):
        top = 100 + 192 * step
        picture.text(LEFT, top, f"Step {step + 1}", 13, style=BOLD)
        for row, name in enumerate(("one process", "DDP", *parts)):
            picture.text(LEFT, top + 32 + 36 * row, name)
        for place, window in enumerate(order[step * batch : (step + 1) * batch]):
            x = 152 + 42 * place
            rank = next(rank for rank in range(WORLD_SIZE) if window in by_rank[rank])
            turn = by_rank[rank].index(window) % share * MICRO_BATCHES // share
            picture.text(x + 20, top, str(step * batch + place), anchor="middle")
            picture.box(x, top + 14, 40, 28, RANK_COLORS[0], str(window))
            for row in (1, 2 + turn):
                picture.box(x, top + 14 + 36 * row, 40, 28, RANK_COLORS[rank], str(window))
    return picture


def draw_nodes() -> Picture:
    picture = Picture(
        "Two nodes, one job",
        f"Each of {WORLD_SIZE} nodes has an agent, which is torchrun, a worker, a GPU and a local disk. "
        "LOCAL_RANK and the index of the GPU are 0 on both. RANK is 0 on node A and 1 on node B. WORLD_SIZE "
        f"is {WORLD_SIZE} on both. The agents meet at one rendezvous endpoint. The workers exchange "
        "gradients, and begin with the snapshot that rank 0 has read.",
        470,
    )
    picture.legend(50, {"one per node": ORANGE, "one per job": GREEN})
    endpoint = f"rendezvous endpoint, node-a:{RENDEZVOUS_PORT}: where the agents meet"
    picture.box(LEFT, 82, WIDTH - 2 * LEFT, 36, GREEN, endpoint)
    picture.box(
        LEFT,
        414,
        WIDTH - 2 * LEFT,
        36,
        GREEN,
        "the snapshot: written by rank 0, sent to the other workers at the start",
    )
    for node in range(WORLD_SIZE):
        x = LEFT + 452 * node
        picture.box(x, 146, 340, 242, WHITE)
        picture.text(x + 12, 168, f"Node {'AB'[node]}", 14, style=BOLD)
        picture.box(x + 104, 160, 132, 44, ORANGE, "agent (torchrun)")
        picture.box(x + 244, 160, 84, 44, ORANGE, "local disk")
        picture.arrow(x + 170, 160, x + 170, 120)
        picture.arrow(x + 170, 204, x + 170, 254)
        picture.text(x + 178, 234, "starts, watches")
        picture.box(x + 12, 256, 316, 116, WHITE)
        picture.text(x + 24, 278, f"worker {node}", style=BOLD)
        picture.box(x + 24, 290, 140, 30, ORANGE, "LOCAL_RANK=0")
        picture.box(x + 24, 330, 140, 30, ORANGE, "GPU cuda:0")
        picture.box(x + 176, 290, 140, 30, GREEN, f"RANK={node}")
        picture.box(x + 176, 330, 140, 30, GREEN, f"WORLD_SIZE={WORLD_SIZE}")
        picture.arrow(x + 170, *((412, x + 170, 374) if node else (372, x + 170, 412)))
        picture.text(x + 178, 404, "gets it from rank 0" if node else "writes it, reads it")
        picture.arrow(420, 314, 352 + 136 * node, 314)
    picture.text(420, 304, "gradients", anchor="middle")
    return picture


def draw_restart() -> Picture:
    steps = single.EPOCHS * single.WINDOWS // single.BATCH_SIZE
    last_done = KILLED_IN - 1
    resumed_from = last_done // SNAPSHOT_EVERY * SNAPSHOT_EVERY
    twice = f"steps {resumed_from + 1} to {last_done}"
    picture = Picture(
        f"Worker 1 is killed in step {KILLED_IN} of {steps}",
        f"Generation 1 writes a snapshot every {SNAPSHOT_EVERY} steps. Worker 1 is killed in step "
        f"{KILLED_IN}, so that there is no snapshot of it, and worker 0 ends with it. "
        f"Generation 2 resumes from the snapshot of step {resumed_from}: {twice} are done twice.",
        452,
    )

    def x_of(step: int) -> float:
        return 120 + 660 * step / steps

    picture.box(x_of(resumed_from), 54, x_of(last_done) - x_of(resumed_from), 358, GREY, dashed=True)
    middle = x_of((resumed_from + last_done) // 2)
    picture.text(middle, 74, twice, anchor="middle")
    picture.text(middle, 90, "are done twice", anchor="middle")
    for generation, first, last, top in ((1, 0, last_done, 100), (2, resumed_from, steps, 264)):
        picture.text(LEFT, top, f"Generation {generation}", 13, style=BOLD)
        for rank in range(WORLD_SIZE):
            y = top + 10 + 36 * rank
            picture.text(LEFT, y + 19, f"worker {rank}")
            done = f"steps {first + 1} to {last}"
            picture.box(x_of(first), y, x_of(last) - x_of(first), 28, RANK_COLORS[rank], done)
        picture.text(LEFT, top + 101, "snapshots")
        for step in range(first + SNAPSHOT_EVERY, last + 1, SNAPSHOT_EVERY):
            picture.box(x_of(step) - 24, top + 82, 48, 28, GREEN, f"{step}")
    picture.box(x_of(KILLED_IN) - 24, 182, 48, 28, WHITE, f"{KILLED_IN}", dashed=True)
    end = x_of(KILLED_IN) + 10
    picture.text(end, 129, "ends with it")
    picture.text(end + 4, 165, "killed", style=BOLD)
    picture.text(end + 24, 201, "not written")
    for slope in (-1, 1):
        picture.line(end - 18, 160 - 8 * slope, end - 2, 160 + 8 * slope, RED)
    picture.arrow(x_of(resumed_from), 210, x_of(resumed_from), 272)
    picture.text(x_of(resumed_from) - 8, 246, f"resumes from snapshot {resumed_from}", anchor="end")
    for step in range(0, steps + 1, SNAPSHOT_EVERY):
        picture.text(x_of(step), 434, f"step {step}", anchor="middle")
    return picture


def draw_collectives() -> Picture:
    """Draw a lane per event: which part of the model it concerns, and for how many slots of time."""
    units = {name: sum(held) for name, held in parameter_bytes().items()}
    whole, blocks = sum(units.values()), units["h.0"] + units["h.1"]
    forward, backward = ["rest", "block 1", "block 2"], ["block 2", "block 1", "rest"]

    def lane(kind: str, parts: list[str], slots: int = 1) -> list[tuple[str, str, int]]:
        return [(kind, part, slots) for part in parts]

    passes = [*lane("forward", [*forward, "loss"]), *lane("backward", backward)]
    turns = ("micro-batch 1", "micro-batch 2")
    first, second = ([*lane("forward", [name], 2), *lane("backward", [name], 2)] for name in turns)
    update = [("", "", 1), ("update", "AdamW", 1)]
    gathers = [*lane("all-gather", forward), ("", "", 1), *lane("all-gather", backward[:-1])]
    ddp = ([*passes, *update], [("", "", 5), *lane("all-reduce", backward)])
    no_sync = ([*first, *second, *update], [("", "", 7), *lane("all-reduce", ["all gradients"], 2)])
    fsdp = ([("", "", 1), *passes, *update], [*gathers, *lane("reduce-scatter", backward)])
    sections = {
        f"DDP: {whole:,} bytes of gradients are averaged while the backward pass goes on": ddp,
        "DDP with no_sync: micro-batch 1 sends nothing, micro-batch 2 sends the sum of both": no_sync,
        f"FSDP: {whole:,} bytes of parameters, the blocks' {blocks:,} again, {whole:,} of gradients": fsdp,
    }
    picture = Picture("What is sent in a step", ". ".join(sections) + ".", 442)
    fills = {"forward": BLUE, "backward": GREEN, "update": PURPLE}  # as in the pictures over time
    fills |= {"all-reduce": ORANGE, "all-gather": YELLOW, "reduce-scatter": RUST}
    picture.legend(50, fills)
    for number, (title, lanes) in enumerate(sections.items()):
        top = 100 + 108 * number
        picture.text(LEFT, top, title, style=BOLD)
        for y, name, cells in zip((top + 12, top + 46), ("compute", "network"), lanes, strict=True):
            x = 104
            picture.text(LEFT, y + 18, name)
            for kind, label, slots in cells:
                if kind:
                    picture.box(x, y, 70 * slots - 2, 28, fills[kind], label)
                x += 70 * slots
    picture.text(LEFT, 410, "Not to scale. Rest: the parameters that are in no block.")
    picture.text(LEFT, 428, "DDP sends buckets. A model as small as this one fits in one, sent at the end.")
    return picture


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for draw in (draw_who_holds_what, draw_who_reads_what, draw_nodes, draw_restart, draw_collectives):
        (FOLDER / f"{draw.__name__.removeprefix('draw_')}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
