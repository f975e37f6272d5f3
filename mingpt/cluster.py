"""The workers of one generation: who they are, how they meet, what they agree on, how they part.

It promises:

- Workers of one generation meet under keys that no earlier generation wrote. The agent's store outlives the workers, and
  neither the restart count nor the port tells generations apart when there are several agents. So each worker offers a
  fresh nonce, and rank 0 answers under that nonce with the generation's name: nothing a dead worker left can be mistaken
  for an answer.
- What one worker cannot accept, all refuse, and rank 0 says why, once.
- A worker that leaves says so in the store, unless it was killed; the next generation knows who left no word.

torch is imported where it is needed, so that a wrong setting is answered without waiting for it.
"""

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mingpt.config import TrainerConfig, UserError
from mingpt.launch import GAVE_UP, Departure, Launch, Told
from mingpt.stopping import REQUESTS, Listener

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
log = logging.getLogger(__name__)
MEETING_S = 180.0  # a worker may still be importing torch from a slow disk
AGENT_S = 10.0
FAREWELL_S = 2.0
POLL_S = 0.01
TURN_S = 1.0
LAST_WORDS_S = 1.0
SLICE_BYTES = 64 << 20
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


class Cluster:
    """This worker's place in its generation. Every method that exchanges something must be called by all workers.

    `step` is the last completed step, kept by the trainer for whoever asks how far this worker came.
    """

    def __init__(self, launch: Launch, config: TrainerConfig, listener: Listener) -> None:
        import torch

        self.launch, self.rank, self.world_size, self.step = launch, launch.rank, launch.world_size, 0
        self.threads = launch.threads(config)
        torch.set_num_threads(self.threads)
        self.generation, self.before = uuid.uuid4().hex, None
        self.listener = listener
        self._store: Any = None
        self.timeout_s, self.siblings = config.timeout_s, dict[int, int]()
        if launch.master:
            self._store, self._farewells = self._connect(hosting=launch.rank == 0 and not launch.agent_hosts_store), self._connect(hosting=False)
            listener.say_farewell = self.say_farewell
            self.generation = self._meet()
            self.before = self._departed() if self.rank == 0 else None
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            torch.distributed.init_process_group(
                backend,
                store=torch.distributed.PrefixStore(self.generation, self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=config.timeout_s),
            )
            self.siblings = self._siblings()
        self.device = self.all_or_none(lambda: find_device(config.device, launch))
        if len(set(self.gather(self.device.type))) > 1:  # one group works with one kind of device
            self.device = torch.device("cpu")
        if self.device.type == "cpu":
            keep_memory()

    def use_threads(self, recorded: int) -> None:
        """Compute with the number of threads that the run began with: it decides bits."""
        import torch

        if recorded != self.threads:
            log.info("using %d CPU threads per worker, as this run began, not %d", recorded, self.threads)
            self.threads = recorded
            torch.set_num_threads(recorded)

    def arithmetic(self, wanted: str) -> "torch.dtype":
        """The type of the matrix products: bfloat16 where it is asked for or, under auto, native."""
        import torch

        kind = self.device.type
        native = torch.cuda.get_device_capability() >= (8, 0) if kind == "cuda" else kind == "cpu" and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if wanted == "bfloat16" or (wanted == "auto" and native) else torch.float32

    def software(self) -> dict[str, Any]:
        """What the bits depend on beside the configuration."""
        import torch

        amx = " AMX" if torch.cpu._is_amx_tile_supported() else ""  # other units for products than AVX512's, and other bits
        cpu = f"{self.device.type} {torch.backends.cpu.get_cpu_capability()}{amx}"
        return {"torch": torch.__version__, "device": torch.cuda.get_device_name() if self.device.type == "cuda" else cpu, "threads": self.threads}

    def insist_on_determinism(self) -> None:
        """From here on an operation without a deterministic kernel is an error that names it."""
        import torch

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import torch._inductor, which takes as long as torch
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # finds bugs in kernels, for the price of writing every tensor twice

    def listen(self, stop_file: Path) -> None:
        """From here on a request to stop waits for the end of a step, where all workers agree on it."""
        self.listener.stop_file = stop_file
        self.listener.agreeing = True

    def _connect(self, hosting: bool) -> Any:
        from torch.distributed import TCPStore

        assert self.launch.master
        host, port = self.launch.master
        # A store that the agent hosts is there already, or never: then the agent died before this worker could watch over it.
        there_within = AGENT_S if self.launch.agent_hosts_store else MEETING_S
        store = TCPStore(host, port, is_master=hosting, wait_for_workers=False, timeout=timedelta(seconds=there_within))
        store.set_timeout(timedelta(seconds=MEETING_S))
        return store

    def _meet(self) -> str:
        """The name of this generation, which every worker of it and nobody else gets from its rank 0."""
        store, nonce = self._store, uuid.uuid4().hex
        if self.rank:
            store.set(f"hello/{self.rank}", nonce)
            name = str(store.get(f"answer/{nonce}").decode())  # waits for it
            store.set(f"{name}/here/{self.rank}", "")
            return name
        answered: dict[int, bytes] = {}
        missing = set(range(1, self.world_size))
        deadline = time.monotonic() + MEETING_S
        while missing:
            for rank in sorted(missing):
                if store.check([f"hello/{rank}"]) and answered.get(rank) != (offered := store.get(f"hello/{rank}")):
                    answered[rank] = offered  # perhaps a dead worker's; then another offer follows
                    store.set(f"answer/{offered.decode()}", nonce)
            missing = {rank for rank in missing if not store.check([f"{nonce}/here/{rank}"])}
            if missing and time.monotonic() > deadline:
                raise TimeoutError(f"workers {sorted(missing)} did not come within {MEETING_S:g} s")
            time.sleep(POLL_S if missing else 0)
        return nonce

    def _departed(self) -> Departure | None:
        """On rank 0: how the last generation in this store ended; and this one's name in its place."""
        before = None
        if self._store.check(["generation"]):
            name, size = json.loads(self._store.get("generation"))
            words = {rank: json.loads(self._store.get(f"{name}/left/{rank}")) for rank in range(size) if self._store.check([f"{name}/left/{rank}"])}
            before = Departure(size, words)
        self._store.set("generation", json.dumps([self.generation, self.world_size]))
        return before

    def _siblings(self) -> dict[int, int]:
        """{rank: handle of its process} of the other workers of our agent, where the system has handles that no later process inherits."""
        found = {}
        for rank, (node, pid) in enumerate(self.gather((self.launch.node, os.getpid()))):
            here = node == self.launch.node and pid != os.getpid() and parent(pid) == self.launch.agent
            if here and self.launch.agent and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # an old kernel, or one that is not allowed to: the agent ends it then
                    found[rank] = os.pidfd_open(pid)
        return found

    def admitted(self) -> bool:
        """Whether an earlier generation of this job has passed the checks of its first start."""
        # A store that the agent hosts outlives the generations; another is as young as this one, and the agent's count must do.
        here = bool(self._store is not None and self._store.check(["admitted"])) if self.launch.agent_hosts_store else self.launch.restarts > 0
        return any(self.gather(here))

    def admit(self) -> None:
        if self._store is not None:
            self._store.set("admitted", "")

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank."""
        if self.world_size == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[Any] = [None] * self.world_size
        all_gather_object(values, value)
        return values

    def broadcast(self, value: T | None, source: int) -> T:
        """The source's value."""
        if self.world_size == 1:
            return value  # type: ignore[return-value]
        from torch.distributed import broadcast_object_list

        box = [value]
        broadcast_object_list(box, src=source)
        return box[0]  # type: ignore[return-value]

    def share(self, content: bytes | None, source: int) -> bytes:
        """The source's bytes, however many."""
        if self.world_size == 1:
            return content or b""
        import torch

        size = self.broadcast(None if content is None else len(content), source)
        box = torch.empty(size, dtype=torch.uint8) if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for piece in box.split(SLICE_BYTES) if size else ():  # each within the time that a worker may be silent
            torch.distributed.broadcast(piece, src=source)
        return box.numpy().tobytes()

    def sum(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Everybody's sum, in place. Exact, and so free of order, where all but one contribute zeros."""
        return self.begin_sum(tensor)()

    def begin_sum(self, tensor: "torch.Tensor") -> Callable[[], "torch.Tensor"]:
        """`sum`, as a function that waits for it."""
        import torch

        work = torch.distributed.all_reduce(tensor, async_op=True) if self.world_size > 1 else None

        def result() -> "torch.Tensor":
            if work is not None:
                work.wait()
            return tensor

        return result

    def level(self, weights: "Iterable[torch.nn.Parameter]") -> None:
        """Give everybody rank 0's weights: initial values from one seed may differ between kinds of machines."""
        if self.world_size > 1:
            import torch

            weights = list(weights)
            vector = torch.nn.utils.parameters_to_vector(weights).detach()
            torch.distributed.broadcast(vector, src=0)
            for weight, values in zip(weights, vector.split([weight.numel() for weight in weights]), strict=True):
                weight.detach().copy_(values.view_as(weight))

    def everybodys(self, mine: "torch.Tensor") -> "torch.Tensor":
        """(n,) of each worker as (workers, n), the same on all."""
        if self.world_size == 1:
            return mine.unsqueeze(0)
        import torch

        whole = mine.new_empty(self.world_size, len(mine))
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor  # the name before torch 2.13
        gather(whole.flatten(), mine)
        return whole

    def exchange(self, losses: "torch.Tensor", written: int) -> Callable[[], tuple[list[float], int, str | None]]:
        """Begin to share (M,) losses, zero where they are another worker's, the step of the last snapshot written, zero where another
        writes them, and the wish to stop; the result waits for all of it.

        Returns every micro-batch's loss, that step, and the request to stop that any worker has heard, the same on all workers.
        """
        import torch

        rest = torch.tensor([written, *(self.listener.asked == name for name in REQUESTS)], dtype=torch.float64)

        def begin() -> Callable[[], torch.Tensor]:
            return self.begin_sum(torch.cat([losses.detach().cpu().double(), rest]))

        summed = None if losses.is_cuda else begin()  # to look at a GPU's losses is to wait for them: not before the result is asked for

        def result() -> tuple[list[float], int, str | None]:
            values = (summed or begin())().tolist()
            asked = values[len(losses) + 1 :]
            return values[: len(losses)], int(values[len(losses)]), next((name for name, count in zip(REQUESTS, asked, strict=True) if count), None)

        return result

    def all_or_none(self, work: Callable[[], T]) -> T:
        """The work's result here; if it raised UserError on some workers, then the lowest one's error on all."""
        result, error = None, None
        try:
            result = work()
        except UserError as refusal:
            error = str(refusal)
        for refusal_there in self.gather(error):
            if refusal_there is not None:
                raise UserError(refusal_there)
        return result  # type: ignore[return-value]

    def in_turns(self, work: Callable[[], T]) -> T:
        """`all_or_none` for work that may take long, or that only some have: nobody is silent meanwhile, so nobody is given up."""
        if self.world_size == 1:
            return work()
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                import torch

                torch.set_num_threads(self.threads)  # each thread has a number, and a current device, of its own
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(TURN_S / 100)  # most often that is enough
        while any(self.gather(thread.is_alive())):
            thread.join(TURN_S)
        return self.all_or_none(outcome.result)

    def with_signs_of_life(self, work: Callable[[], T]) -> T:
        """`in_turns` for work that belongs to the calling thread, as a compiler's does. A peer lost meanwhile ends this process."""
        if self.world_size == 1:
            return work()
        done = threading.Event()

        def speak() -> None:
            try:
                while any(self.gather(not done.wait(TURN_S))):
                    pass
            except BaseException as error:
                self.leave_after(error)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        try:
            return work()
        finally:
            done.set()
            thread.join()

    def say_farewell(self, why: str) -> None:
        """Leave word for the next generation. The first word stands."""
        if self._store is not None:
            # In a thread, and not waited for beyond reason: the store may have died with its agent, or be cut off.
            word = (f"{self.generation}/left/{self.rank}", "", json.dumps({"why": why, "step": self.step}))
            writing = threading.Thread(target=leave_word, args=(self._farewells, word), daemon=True)
            writing.start()
            writing.join(FAREWELL_S)

    def leave_after(self, error: BaseException) -> NoReturn:
        """Exit code 1 after an error; where a peer vanished, without the backend's traceback, which tells only that."""
        lost = is_lost_peer(error)
        if lost:
            self.say_farewell(f"{GAVE_UP} for {self.timeout_s:g} s" if is_timeout(error) else "left without a peer")
            self.end_siblings()
        else:
            self.say_farewell(f"failed ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''})")
        if isinstance(error, Told):
            sys.stderr.write(f"error: worker {self.rank}: {error}\n")
        elif not lost:
            traceback.print_exception(error)
        elif not self.launch.another_chance():
            sys.stderr.write(f"worker {self.rank} lost a peer after step {self.step}, and torchrun has no restart left (--max-restarts)\n")
        sys.stderr.flush()
        os._exit(1)

    def end_siblings(self) -> None:
        """Kill the workers of this node that do not notice for themselves that their generation is over.

        The agent would do it, but only after 30 s where a process is frozen, and a worker in the middle of something long would finish it first.
        """
        deadline = time.monotonic() + LAST_WORDS_S
        for handle in self.siblings.values():
            exit_ = select.poll()
            exit_.register(handle, select.POLLIN)
            if not exit_.poll(1000 * max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)

    def leave(self, stopped_by: str | None = None) -> NoReturn:
        """At once: a peer that dies while this process tidies up would wait for it in vain.

        Exit code 0; under torchrun, 128 + signal after SIGTERM and SIGINT, so that the agent decides whether to start a next generation.
        """
        again = stopped_by in ("SIGTERM", "SIGINT") and self.launch.agent
        if again:
            self.say_farewell(f"told to stop by {stopped_by}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + getattr(signal, str(stopped_by)) if again else 0)


def leave_word(store: Any, word: tuple[str, str, str]) -> None:
    from torch.distributed import DistError

    try:
        store.compare_set(*word)
    except DistError:
        pass  # nobody is left to read it


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another worker is gone. Gloo says so in words only."""
    from torch.distributed import DistError

    text = str(error)
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed" in text or "Connection reset" in text)
    )


def is_timeout(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def parent(pid: int) -> int | None:
    """The parent's process id, where the system tells."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def keep_memory() -> None:
    """Have the C library keep what is freed. By default glibc gives large blocks back to the system, and every step faults them in again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20)):
            mallopt(option, value)


def find_device(wanted: str, launch: Launch) -> "torch.device":
    """Raises UserError if the device is not there."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" or (wanted == "auto" and gpus >= launch.local_world_size):  # NCCL refuses two workers on one GPU
        if launch.local_rank >= gpus:
            raise UserError(
                f"trainer.device=cuda asks for GPU {launch.local_rank} and this machine has {gpus}: start fewer workers or set trainer.device=cpu"
            )
        torch.cuda.set_device(launch.local_rank)
        return torch.device("cuda", launch.local_rank)
    if wanted == "mps" or (wanted == "auto" and launch.world_size == 1 and torch.backends.mps.is_available()):
        if not torch.backends.mps.is_available():
            raise UserError("trainer.device=mps asks for Apple's GPU and this machine has none: set trainer.device=cpu")
        if launch.world_size > 1:
            raise UserError(f"trainer.device=mps works for one process, not for {launch.world_size}: set trainer.device=cpu")
        return torch.device("mps")
    return torch.device("cpu")
