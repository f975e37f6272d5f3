"""A process group for the background threads, one per rank, that save snapshots while the ranks train."""

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from mingpt.base.errors import SaveAborted
from mingpt.distributed.exit import is_lost_peer

# The time limit of an exchange, in which a rank may write slowly. A dead rank is noticed at once, a frozen
# rank by the timeout of training's collectives.
TIMEOUT = timedelta(hours=2)

T = TypeVar("T")


@contextlib.contextmanager
def save_needs_peers() -> Iterator[None]:
    """In this context, raise SaveAborted for an error that means a lost peer; pass on any other error."""
    try:
        yield
    except RuntimeError as error:
        if is_lost_peer(error):
            raise SaveAborted from error
        raise


class BackgroundGroup:
    """A gloo process group of all ranks, for one background thread of each. Constructing it is collective.

    The methods raise SaveAborted if a rank is gone. With one rank there is no process group: do not call
    `send` and `receive` then; the other methods exchange nothing.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.group: dist.ProcessGroup | None = (
            dist.new_group(backend="gloo", timeout=TIMEOUT) if world_size > 1 else None
        )

    def all_gather_object(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with save_needs_peers():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on all ranks; return results by rank, or raise the first rank's error. Collective."""
        if self.world_size == 1:
            return [work()]
        result, error = None, None
        try:
            result = work()
        except SaveAborted:
            raise  # a rank is gone: there is nothing to exchange with it
        except Exception as problem:  # of any kind: all ranks raise it
            error = problem
        outcomes = self.all_gather_object((result, picklable(error)))
        for _, error_there in outcomes:
            if error_there is not None:
                raise error_there
        return [result_there for result_there, _ in outcomes]  # type: ignore[misc]

    def on_rank(self, rank: int, work: Callable[[], T]) -> T:
        """Run `work` on rank `rank` only; all ranks return its result or raise its error. Collective."""
        is_here = self.rank == rank
        result = self.on_all_ranks(lambda: work() if is_here else None)[rank]
        return result  # type: ignore[return-value]

    def send(self, rank: int, pieces: Iterable[Tensor]) -> list[dist.Work]:
        """Begin to send these tensors to a rank; `wait` for the result. Until then they must not change.

        Not collective. For each tensor the rank must receive one of the same size, in the same order.
        """
        with save_needs_peers():
            return [checked(dist.isend(piece, rank, group=self.group)) for piece in pieces]

    def receive(self, rank: int, piece: Tensor) -> None:
        """Receive a tensor that `rank` sends into `piece`. Not collective."""
        with save_needs_peers():
            checked(dist.irecv(piece, rank, group=self.group)).wait()

    def wait(self, sent: Iterable[dist.Work]) -> None:
        """Wait until all that was sent has been received."""
        with save_needs_peers():
            for work in sent:
                work.wait()


def checked(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def picklable(error: Exception | None) -> Exception | None:
    """Return `error` (also None), or an OSError with its type and text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # storage drivers put connections and the like into theirs
        return OSError(f"{type(error).__name__}: {error}")
    return error
