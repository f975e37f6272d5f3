"""Exercise 2: write a sampler that any number of workers can resume. The problem: 2_sampler.md

python -m tutorial.check 2
"""


class Sampler:
    """The windows that one rank reads, step by step, in epochs without end.

    A step has `batch_size` windows over all ranks, the last step of an epoch those that are left. Each epoch
    has all windows once, in a random order that depends only on `seed` and the epoch. In each step the ranks
    together read the same windows, however many there are; each rank's share is larger than another's by one
    window at most, and may be empty. Processes share no random generator.
    """

    def __init__(self, windows: int, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        raise NotImplementedError("Sampler")

    def next_step(self) -> list[int]:
        """Return the windows of this rank in the next step."""
        raise NotImplementedError("next_step")

    def state_dict(self) -> dict[str, int]:
        """Return where the job is. Rank 0's goes into the snapshot."""
        raise NotImplementedError("state_dict")

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there: called on each rank of a new job, with any number of workers."""
        raise NotImplementedError("load_state_dict")
