"""A worker's rank, device and dtype, and its collectives with the other workers.

The collectives on tensors are in `DistributedContext.transport`. All ranks must call the methods that are
collective in the same order. torch is imported inside functions: that import takes seconds, and a worker
checks its settings first.
"""

import functools
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mingpt.base.errors import StopRequested, UserError
from mingpt.base.system import keep_freed_memory
from mingpt.distributed.device import (
    NUMERICS,
    ROOT,
    Environment,
    check_gloo,
    device_name,
    find_device,
    hash_code,
    kernel_variables,
    resolve_dtype,
)
from mingpt.distributed.ends import GenerationEnd
from mingpt.distributed.exit import ProcessExit
from mingpt.distributed.group import Group
from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import Rendezvous
from mingpt.distributed.signals import REASONS, SignalListener

if TYPE_CHECKING:
    import torch
T = TypeVar("T")
SLOWEST_START = 3.0  # a worker waits for the others up to this many times as long as its own start took
# The least time that a worker waits for the others if there is no agent. Without an agent, workers are
# started one by one, and are not restarted.
UNMANAGED_WAIT_S = 180.0
log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a rank runs: the numbers of the node and of the rank on it, the host's name, and the pid."""

    node_rank: int
    local_rank: int
    host: str
    pid: int = 0


class Own(NamedTuple):
    """A rank's place, device, dtype and address, known before the ranks are connected for tensors."""

    place: Place
    device: "torch.device | None"  # None: the rank lacks the device that trainer.device names
    dtype: str = "float32"  # what trainer.dtype means on this device
    address: object = None  # of the rank's connector
    fault: str = ""  # why there is no device


class DistributedContext(Group):
    """A worker's rank, world size, device, dtype and transport. Constructing it waits for all other workers.

    A collective waits at most `timeout_s` seconds for a peer. Without a launcher such as torchrun this worker
    is the only one. The constructor raises the errors of `join_generation`. The device, and collectives on
    tensors, are available after `settle`.

    While the work of `on_rank`, `on_all` or `gather_on_all` runs on this rank, this process exits if a peer
    is lost, or if all ranks agree to stop before training begins. If the work raises UserError on any rank,
    all ranks raise UserError, except in the cases that `Group.on_all` names.
    """

    shared_errors = UserError
    stop_signal: SignalListener

    def __init__(
        self, launch: Launch, stop_signal: SignalListener, process_exit: ProcessExit, timeout_s: float
    ) -> None:
        super().__init__(launch.rank, launch.world_size, stop_signal)
        self.launch, self.exit = launch, process_exit
        self.timeout_s = timeout_s
        self.rendezvous = self.join_generation(timeout_s) if launch.is_distributed else None

    def settle(self, found: "Sequence[Own]", dtype: str, threads: int) -> None:
        """Use this rank's device, and connect the ranks for collectives on tensors. Collective.

        `found` has what `find_own` returned on each rank, in the order of the ranks; no rank has a fault.
        `dtype` is the name of the dtype of matrix products, and `threads` the number of CPU threads of each
        worker. If a peer is lost, raises an error for which `is_lost_peer` is true. If several workers train
        on GPUs, also raises the errors of `connect_gpus`.
        """
        import torch

        device = found[self.rank].device
        assert device is not None, "a rank without its device is refused before"
        self.device, self.places = device, [own.place for own in found]
        self.dtype, self.threads = getattr(torch, dtype), threads
        torch.set_num_threads(threads)
        self.transport = self.connector.connect(self, [own.address for own in found], self.timeout_s)
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.device.type == "cuda" and self.world_size > 1:
            self.connect_gpus(self.timeout_s)

    def join_generation(self, timeout_s: float) -> Rendezvous:
        """Wait until all workers have arrived; initialize torch's default process group. Collective.

        Returns this worker's Rendezvous. A later collective waits at most `timeout_s` seconds for a peer. The
        wait for the workers has the same limit, or perhaps a longer limit if this worker started slowly or
        has no agent. Raises the errors of `check_gloo` and of Rendezvous, such as PeersMissing. If a worker
        is lost after the rendezvous, raises an error for which `is_lost_peer` is true.
        """
        import torch

        from mingpt.distributed import nccl

        # If this machine is slow to start, the others may be as slow.
        own_start_s = time.monotonic() - self.exit.began_at
        least_s = 0.0 if self.launch.agent_pid else UNMANAGED_WAIT_S
        rendezvous = Rendezvous(self.launch, max(timeout_s, SLOWEST_START * own_start_s, least_s))
        self.exit.join(rendezvous, timeout_s)
        check_gloo()
        self.stop_signal.watch_siblings()
        nccl.set_defaults()
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=rendezvous.process_group_store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        return rendezvous

    def find_own(self, wanted: str, dtype: str) -> Own:
        """Return this rank's place, device, dtype and address; set `self.connector`, which `settle` uses.

        `wanted` and `dtype` are the settings trainer.device and trainer.dtype. If `find_device` raises
        UserError, `self.connector` is not set, the result has no device, and `fault` is the error's text.
        """
        from mingpt.distributed.transport import make_connector

        place = Place(self.launch.node_rank, self.launch.local_rank, platform.node(), os.getpid())
        try:
            device = find_device(wanted, self.launch)
        except UserError as error:
            return Own(place, None, fault=str(error))
        self.connector = make_connector(device.type, self.world_size)
        return Own(place, device, resolve_dtype(dtype, device), self.connector.address)

    def connect_gpus(self, timeout_s: float) -> None:
        """Connect the GPUs of all ranks; from now on, SignalListener's thread watches NCCL. Collective.

        If a peer is lost or the network fails, exits this process, or raises an error for which
        `is_lost_peer` is true. If NCCL fails on any rank for another reason, all ranks raise UserError
        as `Group.on_all` says. If connecting takes more than `timeout_s` seconds, exits this process.
        """
        from mingpt.distributed.nccl import NcclWatch

        watch = NcclWatch(timeout_s)
        self.exit.watch_gpus(watch)
        lost = self.on_all(lambda: watch.connect(self.device))
        if lost is not None:  # all ranks are alive, and none has raised a UserError that says more
            raise lost

    @property
    def previous_generation(self) -> GenerationEnd | None:
        """How the last earlier workers that met at the rendezvous ended; None if that is not known."""
        return self.rendezvous.previous_generation if self.rendezvous else None

    def environment(self) -> Environment:
        """Return the software and hardware on which the weights' bits may depend, with `compiled` False.

        Call this after `settle`. Raises OSError if the code of this program cannot be read.
        """
        import torch

        return Environment(
            torch=torch.__version__,
            device=device_name(self.device),
            device_type=self.device.type,
            threads=self.threads,
            numerics=NUMERICS,
            code=hash_code(ROOT),
            dtype=str(self.dtype).removeprefix("torch."),
            kernels=kernel_variables(self.device),
            compiled=False,
        )

    def was_started(self) -> bool:
        """Return whether a call of `mark_started` is recorded in the job's TCPStore.

        If no agent hosts the job's TCPStore, return whether the launcher's restart count is above 0.
        """
        return self.rendezvous is not None and self.rendezvous.is_restart()

    def mark_started(self) -> None:
        """Record, for workers after a restart, that the job has started. Only rank 0 calls this."""
        if self.rendezvous is not None:
            self.rendezvous.mark_started()

    def all_gather_object(self, value: T) -> list[T]:
        values = super().all_gather_object(value)
        self.exit.note_progress()
        return values

    def reduce_step_status(
        self, losses: "torch.Tensor", counts: Sequence[int] = ()
    ) -> Callable[[], tuple[list[float], list[int]]]:
        """Start to exchange the ranks' losses and requests to stop; return a function that waits. Collective.

        `losses` has an element for each micro-batch of the step: zero if another rank computes the loss.
        `counts` are integers, which are added up over the ranks. All ranks must also call the returned
        function, which returns (losses of all micro-batches, sums of the counts). The returned function also
        calls `agree_to_stop` with the requests that the ranks had received when they called this method. If
        the losses are on a CUDA GPU, the exchange begins only in the returned function.
        """
        import torch

        reasons = [float(self.stop_signal.reason == name) for name in REASONS]
        status = torch.tensor([*counts, *reasons], dtype=torch.float64)

        @functools.cache
        def begin() -> Callable[[], torch.Tensor]:
            return self.transport.all_reduce_async(torch.cat([losses.detach().cpu().double(), status]))

        if not losses.is_cuda:  # copying losses from a GPU waits for the GPU
            begin()

        def wait() -> tuple[list[float], list[int]]:
            values = begin()().tolist()
            self.exit.note_progress()
            summed, asked = values[len(losses) :], values[len(losses) + len(counts) :]
            self.agree_to_stop([name for name, value in zip(REASONS, asked, strict=True) if value])
            return values[: len(losses)], [int(value) for value in summed[: len(counts)]]

        return wait

    def fail_beside_work(self, error: Exception) -> None:
        """Exit because of `error`: the main thread is busy with work, and cannot raise `error`."""
        if isinstance(error, StopRequested):
            self.stop_signal.exit_before_training(error.reason)
        self.exit.exit_process(error)

    def should_stop(self) -> bool:
        """Return whether all ranks agreed to stop, so that the caller may end its work early.

        With one rank, first calls `agree_to_stop`, which may raise StopRequested, with this rank's request.
        With several ranks, the result may become true on some ranks later than on others. Not collective.
        """
        if self.world_size == 1:
            self.agree_to_stop([self.stop_signal.reason])
        return self.agreed_stop is not None
