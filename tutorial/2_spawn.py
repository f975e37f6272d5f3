"""Lesson 2, part 1: two processes, started by mp.spawn, add up what each of them has.

    python -m tutorial.2_spawn

No model yet: a store in which the processes find each other, a process group, and a collective.
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2


def work(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"greeting {rank}", f"I am rank {rank}")
    other = (rank + 1) % WORLD_SIZE
    greeting = store.get(f"greeting {other}").decode()  # waits until the key is there
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    numbers = torch.tensor([1.0 + rank, 10.0])
    before = numbers.tolist()
    dist.all_reduce(numbers)  # replaces the tensor by the sum of all ranks' tensors, on all ranks
    line = f"rank {rank} read '{greeting}', had {before} and has {numbers.tolist()}\n"
    print(line, end="", flush=True)  # written at once, so that the lines of two ranks do not mix
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb


def main() -> None:
    # A small server of keys and values in this process, at a port that the system chooses.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(work, args=(store.port,), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
