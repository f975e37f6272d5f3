# The checker says: 8 workers did 3 of 7 .*A place in one rank's list means a different window
import torch


class Sampler:
    def __init__(self, windows: int, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.rank, self.world_size, self.epoch, self.done = rank, world_size, 0, 0

    def next_step(self) -> list[int]:
        order = torch.randperm(self.windows, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        mine = [batch[self.rank :: self.world_size].tolist() for batch in order.split(self.batch_size)]
        starts = [sum(map(len, mine[:batch])) for batch in range(len(mine))]
        batch = next((batch for batch, start in enumerate(starts) if start >= self.done), len(mine) - 1)
        self.done += len(mine[batch])
        if batch == len(mine) - 1:
            self.epoch, self.done = self.epoch + 1, 0
        return mine[batch]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "read_by_this_rank": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["read_by_this_rank"]
