"""The ranks of a process group: what they exchange, and work whose outcome all of them learn.

Every method that exchanges something is collective: all ranks must call it, in the same order. `on_rank` runs
work on one rank, `on_all` and `gather_on_all` on each, and all ranks raise the error of any. The ranks also
tell each other of a request to stop. torch is imported late, as in context.py.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from mingpt.base.errors import StopRequested
from mingpt.base.system import complete, start
from mingpt.distributed.signals import REASONS, StopSignal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

HEARTBEAT_S = 0.5
# The time limit of a background thread's exchange, in which a rank may write slowly. A dead rank is noticed
# at once, a frozen rank by the timeout of training's collectives.
TIMEOUT = timedelta(hours=2)
T = TypeVar("T")
Outcome = tuple[Any, Exception | None]  # what work has returned, what it has raised


def wait_for(work: "Work | None") -> None:
    """Wait for an asynchronous collective. Raises DistNetworkError for gloo's errors, which have no type."""
    from torch.distributed import DistNetworkError

    assert work is not None  # this rank is in the group
    try:
        work.wait()
    except RuntimeError as error:
        if type(error) is RuntimeError:
            raise DistNetworkError(str(error)) from error
        raise


class Group:
    """Rank, world size and exchanges of a process group, by default of the one with all ranks.

    With one rank nothing is exchanged, and there need not be a process group. `is_lost_peer` is true for the
    errors that the methods raise if a rank is gone or silent. If there is a `stop_signal`,
    `on_rank`, `on_all` and `gather_on_all` carry a request to stop: once a rank has received one, it becomes
    `agreed_stop` on all ranks in the same call. Before `StopSignal.defer` all ranks raise StopRequested then.
    """

    shared_errors: type[Exception] = Exception  # errors of work that all ranks raise

    process_group: "ProcessGroup | None" = None

    def __init__(self, rank: int, world_size: int, stop_signal: StopSignal | None = None) -> None:
        self.rank, self.world_size, self.stop_signal = rank, world_size, stop_signal
        self.agreed_stop: str | None = None  # the request to stop that all ranks know

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on all ranks. Values are pickled. Collective."""
        if self.world_size == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[Any] = [None] * self.world_size
        all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast_object(self, value: T | None, source: int) -> T:
        """Return rank `source`'s value, pickled, on all ranks; ignore the values of others. Collective."""
        box = [value]
        if self.world_size > 1:
            from torch.distributed import broadcast_object_list

            broadcast_object_list(box, src=source, group=self.process_group)
        return box[0]  # type: ignore[return-value]

    def send(self, rank: int, pieces: "Iterable[Tensor]") -> "list[Work | None]":
        """Begin to send these tensors to a rank; give the result to `wait`. Until then they must not change.

        Not collective. For each tensor the rank must receive one of the same size, in the same order.
        """
        from torch.distributed import isend

        return [isend(piece, rank, group=self.process_group) for piece in pieces]

    def receive(self, rank: int, piece: "Tensor") -> None:
        """Receive a tensor that `rank` sends into `piece`. Not collective."""
        from torch.distributed import irecv

        wait_for(irecv(piece, rank, group=self.process_group))

    def wait(self, sent: "Iterable[Work | None]") -> None:
        """Wait until all that was sent has been received."""
        for work in sent:
            wait_for(work)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks; return this rank's result, which is not sent. Collective.

        Meanwhile another thread exchanges heartbeats, so that timeouts do not fire, however long the work
        takes. Once the work has ended everywhere, all ranks raise the first rank's error, if it is one of
        `shared_errors`. A rank raises another error at once, alone: others may wait for this rank in their
        work, and then lose a peer.
        """
        own: list[T] = []
        self.gather_on_all(lambda: own.append(work()))
        return own[0]

    def on_rank(self, rank: int, work: Callable[[], T]) -> T:
        """Run `work` on rank `rank` alone; all ranks return its result, pickled. Otherwise as `on_all`."""
        results = self.gather_on_all(lambda: work() if self.rank == rank else None)
        return results[rank]  # type: ignore[return-value]

    def gather_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on all ranks; return the results of all, pickled, by rank. Otherwise as `on_all`."""
        if self.world_size == 1:
            return [work()]
        outcome: Future[Outcome] = Future()
        exchanged = start(lambda: self._exchange_outcomes(outcome))
        complete(outcome, lambda: self._attempt(work))
        results, errors = zip(*exchanged.result(), strict=True)
        for error in filter(None, errors):
            raise error
        return list(results)

    def _attempt(self, work: Callable[[], T]) -> Outcome:
        try:
            return work(), None
        except self.shared_errors as error:
            return None, picklable(error)

    def _exchange_outcomes(self, outcome: "Future[Outcome]") -> list[Outcome]:
        """Exchange the outcome of each rank's work, None before its end, until all have ended. Collective."""
        try:
            while True:
                wait([outcome], HEARTBEAT_S)
                own = outcome.result() if outcome.done() else None
                stop_reason = self.stop_signal.reason if self.stop_signal else None
                outcomes, stop_reasons = zip(*self.all_gather_object((own, stop_reason)), strict=True)
                self.agree_to_stop(stop_reasons)
                if None not in outcomes:
                    return list(outcomes)
        except Exception as error:
            if not outcome.done():
                self.fail_beside_work(error)
            raise

    def fail_beside_work(self, error: Exception) -> None:
        """Act on an error of the exchanges while the work goes on; later, the work's caller raises it."""

    def agree_to_stop(self, reasons: Sequence[str | None]) -> None:
        """Set `agreed_stop`, if it is not set, to the first of REASONS that is among `reasons`.

        `reasons` are those that any rank has received: the same on all ranks. Raises StopRequested as the
        class says.
        """
        first = next((name for name in REASONS if name in reasons), None)
        self.agreed_stop = self.agreed_stop or first
        if self.agreed_stop and self.stop_signal and not self.stop_signal.deferred:
            raise StopRequested(self.agreed_stop)


class BackgroundGroup(Group):
    """A gloo process group of all ranks, for one background thread of each. Constructing it is collective.

    All ranks raise any error of the work. No request to stop is carried: training agrees on it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        if world_size > 1:
            from torch.distributed import new_group

            self.process_group = new_group(backend="gloo", timeout=TIMEOUT)


def picklable(error: Exception) -> Exception:
    """Return `error`, or an OSError with its type and text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # storage drivers put connections and the like into theirs
        return OSError(f"{type(error).__name__}: {error}")
    return error
