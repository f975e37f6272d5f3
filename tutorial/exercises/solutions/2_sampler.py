import torch


class Sampler:
    def __init__(self, windows: int, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.rank, self.world_size, self.step = rank, world_size, 0

    def next_step(self) -> list[int]:
        epoch, batch = divmod(self.step, -(-self.windows // self.batch_size))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.windows, generator=generator)
        self.step += 1
        return order.split(self.batch_size)[batch][self.rank :: self.world_size].tolist()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
