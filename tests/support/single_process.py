"""A context of one rank without a process group, for tests that start no job."""

from support.forks import ForkedContext


class SingleProcess(ForkedContext):
    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)
