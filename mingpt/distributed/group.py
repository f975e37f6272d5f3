"""Collectives on Python objects, and work that one rank or all ranks do while all wait for its end.

All ranks must call a method whose docstring says "Collective", in the same order. `on_rank` runs a function
on one rank; `on_all` and `gather_on_all` run a function on all ranks. If the function raises an error on one
rank, all ranks raise this error, or the other ranks lose a peer: see `on_all`. torch is imported inside
functions, as in context.py.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from mingpt.base.errors import StopRequested
from mingpt.base.system import complete, start
from mingpt.distributed.signals import REASONS, SignalListener

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

HEARTBEAT_S = 0.5
FIRST_BYTES = 1 << 14  # of a pickled object, that travel in one collective
# The time limit of a background thread's collectives, long because a rank may write slowly between them. A
# dead rank is noticed at once; a frozen rank, by the timeout of training's collectives.
TIMEOUT = timedelta(hours=2)
T = TypeVar("T")
Outcome = tuple[Any, Exception | None]  # (what some work returned, the error that it raised or None)


def all_gather_single() -> Any:
    """Return torch's collective of this name, which is all_gather_into_tensor before torch 2.13."""
    from torch import distributed

    return getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def wait_for(work: "Work | None") -> None:
    """Wait, as `work.wait()` does, for an asynchronous collective, send or receive that torch has started.

    Ranks outside the process group, to which torch returns None, must not call this. Raises DistNetworkError
    in place of a plain RuntimeError, the type of gloo's errors. Other errors stay as they are.
    """
    from torch.distributed import DistNetworkError

    assert work is not None  # this rank is in the group
    try:
        work.wait()
    except RuntimeError as error:
        if type(error) is RuntimeError:
            raise DistNetworkError(str(error)) from error
        raise


class Group:
    """Collectives on Python objects among the ranks of a process group, by default torch's default group.

    With one rank nothing is exchanged, and no process group is needed. If a rank is gone or silent, methods
    that wait for this rank raise errors for which `is_lost_peer` is true.

    With a `stop_signal` and several ranks, `on_rank`, `on_all` and `gather_on_all` also exchange the requests
    to stop that the ranks have received, and call `agree_to_stop` with these requests.
    """

    shared_errors: type[Exception] = Exception  # if work raises such an error on one rank, all ranks raise it

    process_group: "ProcessGroup | None" = None  # None: torch's default group

    def __init__(self, rank: int, world_size: int, stop_signal: SignalListener | None = None) -> None:
        self.rank, self.world_size, self.stop_signal = rank, world_size, stop_signal
        self.agreed_stop: str | None = None  # the request to stop that all ranks know; None: there is none

    def all_gather_object(self, value: T) -> list[T]:
        """Return, on all ranks, the values of all ranks in the order of the ranks. Collective.

        With several ranks, values are pickled; a pickle of over FIRST_BYTES bytes needs one more collective.
        """
        if self.world_size == 1:
            return [value]
        import torch

        content = pickle.dumps(value)
        head = len(content).to_bytes(8, "little") + content[:FIRST_BYTES]
        own = torch.frombuffer(bytearray(head.ljust(8 + FIRST_BYTES, b"\0")), dtype=torch.uint8)
        heads = own.new_empty(self.world_size, len(own))
        all_gather_single()(heads.flatten(), own, group=self.process_group)
        values: list[Any] = []
        for rank, first in enumerate(heads):
            size = int.from_bytes(first[:8].numpy().tobytes(), "little")
            found = first[8 : 8 + size].numpy().tobytes()
            if size > FIRST_BYTES:
                rest = own.new_empty(size - FIRST_BYTES)
                if rank == self.rank:
                    rest = torch.frombuffer(bytearray(content[FIRST_BYTES:]), dtype=torch.uint8)
                torch.distributed.broadcast(rest, rank, group=self.process_group)
                found += rest.numpy().tobytes()
            values.append(pickle.loads(found))
        return values

    def send(self, rank: int, pieces: "Iterable[Tensor]") -> "list[Work | None]":
        """Start to send the tensors `pieces` to `rank`; return the argument for `wait`. Not collective.

        Leave the tensors unchanged until `wait` has returned. Rank `rank` must call `receive` for each of the
        tensors, in the same order, with a tensor of the same size and dtype.
        """
        from torch.distributed import isend

        return [isend(piece, rank, group=self.process_group) for piece in pieces]

    def receive(self, rank: int, piece: "Tensor") -> None:
        """Wait for the next tensor that `rank` sends, and fill `piece` with it. Not collective."""
        from torch.distributed import irecv

        wait_for(irecv(piece, rank, group=self.process_group))

    def wait(self, sent: "Iterable[Work | None]") -> None:
        """Wait until the tensors of a `send`, which returned `sent`, may be changed. Not collective."""
        for work in sent:
            wait_for(work)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks; return this rank's own result. Collective.

        While the work runs, a thread exchanges heartbeats, so that ranks whose work ends early do not time
        out. If the work raises an error of the type `self.shared_errors` on any rank, all ranks raise this
        error once the work has ended on all ranks; of several such errors, that of the lowest rank. With
        several ranks, an error that cannot be pickled becomes an OSError. Any other error is raised only on
        its own rank, which must then exit; the other ranks lose a peer. If the ranks agree to stop, may
        raise StopRequested instead: see `agree_to_stop`.
        """
        own: list[T] = []
        self.gather_on_all(lambda: own.append(work()))
        return own[0]

    def on_rank(self, rank: int, work: Callable[[], T]) -> T:
        """Run `work` only on rank `rank`; return its result on all ranks. Collective.

        With several ranks, the result is pickled. Errors are raised as in `on_all`.
        """
        results = self.gather_on_all(lambda: work() if self.rank == rank else None)
        return results[rank]  # type: ignore[return-value]

    def gather_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on all ranks; return, on all ranks, all results in the order of the ranks. Collective.

        With several ranks, results are pickled. Errors are raised as in `on_all`.
        """
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
        """Exchange the outcomes of all ranks' work until the work has ended on all ranks. Collective.

        `outcome` is the future of this rank's outcome; if it has an exception, raises that. Returns the
        outcomes in the order of the ranks. Each exchange is also a heartbeat.
        """
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
        """Handle `error`, which the exchange of heartbeats has raised while the work runs.

        In this class, do nothing: `error` is raised once the work has ended.
        """

    def agree_to_stop(self, reasons: Sequence[str | None]) -> None:
        """Set `agreed_stop`, if it is still None, to the first of REASONS that is among `reasons`.

        `reasons` has the requests to stop that the ranks have received (None: no request), and is the same on
        all ranks. If `agreed_stop` is then set, there is a `stop_signal`, and training has not begun
        (`SignalListener.defer` was not called), raises StopRequested.
        """
        first = next((name for name in REASONS if name in reasons), None)
        self.agreed_stop = self.agreed_stop or first
        if self.agreed_stop and self.stop_signal and not self.stop_signal.deferred:
            raise StopRequested(self.agreed_stop)


class BackgroundGroup(Group):
    """A new gloo process group of all ranks, for one thread per rank; with `world_size` 1, only this process.

    Constructing it is collective. The thread may run beside training. Requests to stop are not exchanged. If
    the work of a method such as `on_all` raises any Exception, all ranks raise an error: see `Group.on_all`.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        if world_size > 1:
            from torch.distributed import new_group

            self.process_group = new_group(backend="gloo", timeout=TIMEOUT)

    @classmethod
    def of_all(cls) -> "BackgroundGroup":
        """Return a group of all ranks, or only this process if torch has no default group. Collective."""
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return cls(0, 1)
        return cls(distributed.get_rank(), distributed.get_world_size())


def picklable(error: Exception) -> Exception:
    """Return `error` if pickle can copy it, else an OSError with the type and text of `error`."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # storage drivers put connections and the like into their errors
        return OSError(f"{type(error).__name__}: {error}")
    return error
