"""Work that takes long, or that only some ranks have, while the ranks exchange heartbeats.

So timeouts do not fire, a lost peer is noticed, and a request to stop is agreed on meanwhile.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from mingpt.distributed.signals import REASONS
from mingpt.errors import StopRequested, UserError

if TYPE_CHECKING:
    from mingpt.distributed.context import DistributedContext

T = TypeVar("T")
HEARTBEAT_S = 0.5


def exchange_heartbeat(context: "DistributedContext", is_busy: bool) -> bool:
    """Whether any rank is busy. Raises StopRequested on all ranks if any has a request that is not deferred.

    One that is deferred becomes `context.agreed_stop`.
    """
    states = context.all_gather_object((is_busy, context.stop_signal.reason))
    received = [name for name in REASONS if any(reason == name for _, reason in states)]
    if received and context.agreed_stop is None:
        context.agreed_stop = received[0]
    if context.agreed_stop and not context.stop_signal.deferred:
        raise StopRequested(context.agreed_stop)
    return any(busy for busy, _ in states)


def run_with_heartbeat(context: "DistributedContext", work: Callable[[], T]) -> T:
    """See DistributedContext.run_with_heartbeat."""
    outcome: Future[T] = Future()

    def run() -> None:
        import torch

        try:
            torch.set_num_threads(context.threads)  # both are set per thread
            if context.device.type == "cuda":
                torch.cuda.set_device(context.device)
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HEARTBEAT_S / 50)  # most often that is enough
    is_busy = True
    while is_busy:
        if outcome.done() and not isinstance(outcome.exception(), UserError | None):
            outcome.result()  # other ranks may wait for this one in their work, so they have to lose a peer
        is_busy = exchange_heartbeat(context, thread.is_alive())
        thread.join(HEARTBEAT_S)
    return context.raise_on_all_ranks(outcome.result)


def heartbeat_while(context: "DistributedContext", work: Callable[[], T]) -> T:
    """See DistributedContext.heartbeat_while."""
    done = threading.Event()

    def exchange_heartbeats() -> None:
        try:
            is_busy = True
            while is_busy:
                is_waiting = not done.wait(HEARTBEAT_S)
                is_busy = exchange_heartbeat(context, is_waiting)
        except StopRequested as request:
            context.stop_signal.exit_before_training(request.reason)
        except BaseException as error:
            context.exit.exit_with_error(error)

    thread = threading.Thread(target=exchange_heartbeats, daemon=True)
    thread.start()
    try:
        return work()
    finally:
        done.set()
        thread.join()
