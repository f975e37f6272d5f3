"""A worker's rank in its generation, and the collectives of the ranks besides the reduction of gradients.

Every method that exchanges something is collective: all ranks must call it, in the same order. torch is
imported late, so that a wrong setting is reported without waiting.
"""

import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mingpt.base.errors import StopRequested, UserError
from mingpt.base.system import keep_freed_memory
from mingpt.distributed.device import (
    Environment,
    check_device_types,
    check_gloo,
    find_device,
    find_environment,
    idle_gpus,
    resolve_dtype,
)
from mingpt.distributed.ends import GenerationEnd
from mingpt.distributed.exit import ProcessExit, first_line, is_lost_peer
from mingpt.distributed.group import Group, wait_for
from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import Rendezvous
from mingpt.distributed.signals import REASONS, StopSignal

if TYPE_CHECKING:
    import torch

    from mingpt.config import TrainerConfig
    from mingpt.distributed.nccl import NcclWatch
    from mingpt.distributed.shared_memory import SharedMemory
T = TypeVar("T")
SLOWEST_START = 3.0  # a worker waits for the others so many times as long as its own start took
UNMANAGED_WAIT_S = 180.0  # without an agent, workers are started one by one, and are not restarted
BROADCAST_BYTES = 64 << 20  # per collective, so that each ends within its timeout
log = logging.getLogger(__name__)


def connect_gpus(watch: "NcclWatch", device: "torch.device") -> Exception | None:
    """Have NCCL connect the GPUs of all ranks; return its error if a peer or the network is the cause.

    Another rank may know more then. Raises UserError for any other error of NCCL's. Collective.
    """
    from torch.distributed import DistError

    try:
        watch.connect(device)
    except DistError as error:
        if is_lost_peer(error):
            return error
        raise UserError(
            f"{platform.node()} cannot connect its GPUs ({first_line(error)}): remove the cause, or set "
            "trainer.device=cpu"
        ) from None
    return None


class Place(NamedTuple):
    """Where a rank runs."""

    node_rank: int
    local_rank: int
    host: str


class DistributedContext(Group):
    """Rank, world size, device, dtype and collectives. Constructing a context waits for the other workers.

    During the work of `on_rank`, `on_all` or `gather_on_all`, this process exits if a peer is lost, or for a
    request to stop before `StopSignal.defer`. After the work, all ranks raise the UserError of any.

    Without a launcher this is the only worker. All ranks raise UserError if one lacks `trainer.device`, or if
    their kinds of devices differ, and StopRequested after a request to stop. The others raise PeersMissing if
    some do not arrive within `trainer.timeout_s`, or longer after a slow start or without an agent.
    """

    shared_errors = UserError
    stop_signal: StopSignal

    def __init__(
        self, launch: Launch, config: "TrainerConfig", stop_signal: StopSignal, process_exit: ProcessExit
    ) -> None:
        import torch

        from mingpt.distributed import nccl

        super().__init__(launch.rank, launch.world_size, stop_signal)
        self.launch, self.exit = launch, process_exit
        self.threads = launch.threads(config)
        torch.set_num_threads(self.threads)
        self.previous_generation: GenerationEnd | None = None  # its end, as far as the store tells
        self.rendezvous: Rendezvous | None = None
        self.memory: SharedMemory | None = None  # of all ranks, once a strategy has connected it
        if launch.is_distributed:
            own_start_s = time.monotonic() - process_exit.began_at
            least_s = 0.0 if launch.agent_pid else UNMANAGED_WAIT_S
            wait_s = max(config.timeout_s, SLOWEST_START * own_start_s, least_s)
            check_gloo()
            self.rendezvous = Rendezvous(launch, wait_s)
            process_exit.join(self.rendezvous, config.timeout_s)
            stop_signal.watch_siblings()
            self.previous_generation = self.rendezvous.previous_generation
            # NCCL's dump would leave a signal in the agent's store, which ends all later generations.
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
            os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # NcclWatch needs it
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=self.rendezvous.process_group_store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=config.timeout_s),
            )
        self.device = self.on_all(lambda: find_device(config.device, launch))
        own_dtype = resolve_dtype(config.dtype, self.device)
        place = Place(launch.node_rank, launch.local_rank, platform.node())
        found = self.all_gather_object((self.device.type, own_dtype, place))
        self.places = [place for *_, place in found]  # by rank
        types, dtypes = [kind for kind, *_ in found], {dtype for _, dtype, _ in found}
        check_device_types(types)
        self.idle_gpus = idle_gpus(config.device, launch)
        # If auto is not the same on all ranks, it is what all can do: all GPUs have float16.
        common = torch.float16 if self.device.type == "cuda" else torch.float32
        self.dtype = dtypes.pop() if len(dtypes) == 1 else common
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.device.type == "cuda" and self.world_size > 1:
            watch = nccl.NcclWatch(config.timeout_s)
            process_exit.watch_gpus(watch)
            lost = self.on_all(lambda: connect_gpus(watch, self.device))
            if lost is not None:  # no other rank knows why, and all are alive
                raise lost

    def environment(self) -> Environment:
        """Return what the weights' bits depend on besides the configuration; the caller sets `compiled`."""
        return find_environment(self.device, self.threads, self.dtype)

    def use_threads(self, recorded: int) -> None:
        """Set the number of CPU threads to `recorded`, as when the run began, since bits depend on it."""
        import torch

        if recorded != self.threads:
            log.info(f"using {recorded} CPU threads per worker, as this run began, not {self.threads}")
            self.threads = recorded
            torch.set_num_threads(recorded)

    def was_started(self) -> bool:
        """Whether the store tells that an earlier generation of the job passed the checks of its start."""
        return self.rendezvous is not None and self.rendezvous.is_restart()

    def mark_started(self) -> None:
        """Record in the store that a next generation is a restart. Called by rank 0 alone; not collective."""
        if self.rendezvous is not None:
            self.rendezvous.mark_started()

    def all_gather_object(self, value: T) -> list[T]:
        values = super().all_gather_object(value)
        self.exit.note_progress()
        return values

    def broadcast(self, tensor: "torch.Tensor", source: int) -> None:
        """Copy rank `source`'s `tensor` into the other ranks' `tensor`; all are contiguous. Collective."""
        self.broadcast_async(tensor, source)()

    def broadcast_async(self, tensor: "torch.Tensor", source: int) -> Callable[[], None]:
        """Begin a `broadcast`; return a function that waits for it: use `tensor` only then. Collective."""
        import torch

        works = []
        if self.world_size > 1 and tensor.numel():
            for piece in tensor.view(-1).split(max(1, BROADCAST_BYTES // tensor.element_size())):
                works.append(torch.distributed.broadcast(piece, src=source, async_op=True))

        def wait() -> None:
            for work in works:
                wait_for(work)

        return wait

    def all_to_all(
        self, tensor: "torch.Tensor", send: Sequence[int], receive: Sequence[int]
    ) -> "torch.Tensor":
        """Send elements of a vector to the ranks, `send[rank]` to each; return those received. Collective.

        `receive[rank]` is how many a rank sends to this one. The elements of lower ranks come first.
        """
        if self.world_size == 1:
            return tensor
        import torch

        received = tensor.new_empty(sum(receive))
        torch.distributed.all_to_all_single(received, tensor, list(receive), list(send))
        return received

    def all_reduce_async(self, tensor: "torch.Tensor") -> Callable[[], "torch.Tensor"]:
        """Begin to sum over the ranks in place; return a function that waits and returns `tensor`, the sum.

        Exact if all ranks but one have zeros. Collective.
        """
        import torch

        work = torch.distributed.all_reduce(tensor, async_op=True) if self.world_size > 1 else None

        def wait() -> "torch.Tensor":
            if work is not None:
                wait_for(work)
            return tensor

        return wait

    def all_gather(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return the ranks' vectors, equally long, as one tensor, (workers, n), on all ranks. Collective."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        from torch import distributed

        # all_gather_into_tensor is the name before torch 2.13.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        gathered = tensor.new_empty(self.world_size, len(tensor))
        gather(gathered.flatten(), tensor)
        return gathered

    def all_gather_parts(self, own: "torch.Tensor", sizes: Sequence[int]) -> "Iterator[torch.Tensor]":
        """Yield the vector `own` of each rank, with `sizes[rank]` elements; each is valid until the next.

        Collective: all ranks must read to the end.
        """
        if self.memory is not None:
            yield from self.memory.all_gather_parts(own, sizes)
            return
        received = [own if rank == self.rank else own.new_empty(size) for rank, size in enumerate(sizes)]
        waits = [self.broadcast_async(part, rank) for rank, part in enumerate(received)]
        for wait, part in zip(waits, received, strict=True):
            wait()
            yield part

    def connect_memory(self, timeout_s: float) -> "SharedMemory | None":
        """Have all ranks share memory from now on, and return the memory. Collective.

        Return None, on all ranks, with one rank, on GPUs, on several nodes, or if the system refuses.
        """
        from mingpt.distributed.shared_memory import connect

        if self.world_size > 1:
            is_on_cpu = self.device.type == "cpu"
            self.memory = connect(self.rank, self.all_gather_object, is_on_cpu, timeout_s)
        return self.memory

    def reduce_step_status(
        self, losses: "torch.Tensor", newest_written: int
    ) -> Callable[[], tuple[list[float], int]]:
        """Exchange the status of a step; return a function that waits and returns the sums over the ranks.

        `losses` has an element for each micro-batch of the step, zero for those of other ranks, and
        `newest_written`, the step of the newest snapshot that this generation has put on disk, is zero on all
        ranks but one. A request to stop becomes `agreed_stop` in the returned function; if the losses are on
        a GPU, the exchange begins only there. All ranks must call both.
        """
        import torch

        reasons = [float(self.stop_signal.reason == name) for name in REASONS]
        status = torch.tensor([newest_written, *reasons], dtype=torch.float64)

        def begin() -> Callable[[], torch.Tensor]:
            values = torch.cat([losses.detach().cpu().double(), status])
            if self.memory is None or values.nbytes > self.memory.max_message_bytes:
                return self.all_reduce_async(values)
            gathered = self.memory.all_gather(values.numpy().tobytes())
            total = torch.frombuffer(bytearray(b"".join(gathered)), dtype=torch.float64)
            total = total.view(self.world_size, -1).sum(0)
            return lambda: total

        # Copying losses from a GPU waits for the GPU, so they are copied when the result is asked for.
        started = None if losses.is_cuda else begin()

        def wait() -> tuple[list[float], int]:
            wait_for_sum = started or begin()
            values = wait_for_sum().tolist()
            self.exit.note_progress()
            count = len(losses)
            self.agree_to_stop(
                [name for name, value in zip(REASONS, values[count + 1 :], strict=True) if value]
            )
            return values[:count], int(values[count])

        return wait

    def fail_beside_work(self, error: Exception) -> None:
        """Exit, since the main thread cannot be told: a peer is lost, or all ranks agreed to stop."""
        if isinstance(error, StopRequested):
            self.stop_signal.exit_before_training(error.reason)
        self.exit.exit_process(error)

    def should_stop(self) -> bool:
        """Return whether a stop is agreed, so that work may be cut short. Other ranks may learn it later."""
        if self.world_size == 1:
            self.agree_to_stop([self.stop_signal.reason])
        return self.agreed_stop is not None
