# The checker says: 2 workers: of 103 windows, 1 are read .*is padded .*mistakes/padded_evaluation\.py
from torch.utils.data import DistributedSampler


class Sampler:
    def __init__(self, windows: int, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        self.share, self.step = -(-batch_size // world_size), 0
        indices = range(windows)
        self.sampler: DistributedSampler[int] = DistributedSampler(indices, world_size, rank, seed=seed)  # type: ignore[arg-type]

    def next_step(self) -> list[int]:
        steps = -(-len(self.sampler) // self.share)
        epoch, batch = divmod(self.step, steps)
        self.sampler.set_epoch(epoch)
        self.step += 1
        return list(self.sampler)[batch * self.share :][: self.share]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
