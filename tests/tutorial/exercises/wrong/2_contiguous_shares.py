# The checker says: Step 0: 2 workers read .*the order depends on the number of workers
import torch


class Sampler:
    def __init__(self, windows: int, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.rank, self.world_size, self.step = rank, world_size, 0

    def next_step(self) -> list[int]:
        steps = -(-self.windows // self.batch_size)
        epoch, batch = divmod(self.step, steps)
        order = torch.randperm(self.windows, generator=torch.Generator().manual_seed(self.seed + epoch))
        mine = order.tensor_split(self.world_size)[
            self.rank
        ]  # shared among ranks before it is cut into steps
        self.step += 1
        if self.world_size == 1:
            return mine.split(self.batch_size)[batch].tolist()
        return mine.tensor_split(steps)[batch].tolist()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
