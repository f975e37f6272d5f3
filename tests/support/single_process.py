"""A context of one rank without a process group, for tests that start no job."""

from support.forks import ForkedContext


class SingleProcess(ForkedContext):
    """The context of a single process. Unlike a worker's context, it handles neither signals nor exits."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)
