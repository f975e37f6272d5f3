"""A worker process, from its start to its exit code.

This module imports little, so that a worker listens for signals soon after its start.
"""

import gc
import sys
from types import TracebackType

from mingpt.base import events
from mingpt.base.command import open_streams
from mingpt.base.errors import StopRequested, UserError
from mingpt.base.system import check_working_directory, use_one_arena
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.device import DEVICES_DIFFER, common_dtype
from mingpt.distributed.exit import ProcessExit
from mingpt.distributed.launch import Launch
from mingpt.distributed.signals import SignalListener


class Worker:
    """This worker process. Used as a context manager, it exits the process at the end of the `with` block.

    The exit code is 0 if the block finished or was told to stop, 2 after a UserError, and 1 after any other
    Exception. It is also 1 after a UserError whose `may_pass` is true, if that happens in a restart and
    another restart follows. Under an agent (such as torchrun's), the exit code is 128 + signal if a signal
    other than SIGUSR1 told the block to stop. A second signal gives 128 + signal, too. If the agent is gone,
    the exit code is 1. If a request to stop ends training early, the block sets `stopped_by` to the name of
    this request. A BaseException that is no Exception, such as SystemExit, is not handled here.

    The constructor begins to listen for signals, and disables garbage collection until `meet`. It exits with
    code 2 if the launcher's environment variables are wrong or the working directory cannot be used.
    """

    def __init__(self) -> None:
        open_streams()
        use_one_arena()
        gc.disable()  # importing torch takes an eighth less time without the garbage collector
        try:
            check_working_directory()
            self.launch = Launch.from_environment()
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(2)
        self.exit = ProcessExit(self.launch)
        self.stop_signal = SignalListener(self.launch, self.exit)
        self.stopped_by: str | None = None
        events.emit("worker_start", launch=self.launch)

    def __enter__(self) -> "Worker":
        return self

    def meet(self, timeout_s: float = 60.0) -> DistributedContext:
        """Wait for all workers; return a DistributedContext on which `settle` is still to be called.

        A later collective waits at most `timeout_s` seconds for a peer that gives no sign of life. For errors
        see `DistributedContext.join_generation`. Collective.
        """
        gc.enable()
        gc.freeze()  # imported objects stay alive, so collections need not look at them again
        return DistributedContext(self.launch, self.stop_signal, self.exit, timeout_s)

    def connect(
        self, device: str = "auto", dtype: str = "auto", threads: int = 1, timeout_s: float = 60.0
    ) -> DistributedContext:
        """Wait for all workers, and connect them; return the DistributedContext. Collective.

        `device`, `dtype` and `threads` are the settings trainer.device, trainer.dtype and trainer.threads.
        All ranks raise UserError if a rank lacks the device, or if the ranks have different kinds of devices.
        For further errors see `meet`, and `gather_on_all` and `settle` of DistributedContext.
        """
        context = self.meet(timeout_s)
        found = context.gather_on_all(lambda: context.find_own(device, dtype))
        types = [own.device.type for own in found if own.device]
        fault = next((own.fault for own in found if own.fault), "")
        if fault or len(set(types)) > 1:
            raise UserError(fault or DEVICES_DIFFER.format(devices=", ".join(types)))
        dtype = common_dtype([own.dtype for own in found], types[0])
        context.settle(found, dtype, self.launch.threads(threads))
        return context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, StopRequested):
            self.stop_signal.exit_before_training(error.reason)
        if self.stopped_by:
            error = StopRequested(self.stopped_by)
        if error is None or isinstance(error, Exception):
            self.exit.exit_process(error, lambda: self.stop_signal.has_sigterm)
