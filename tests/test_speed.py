"""A guard against slowdowns that needs no quiet machine.

It measures what a micro-batch of the default run writes to memory, what a start imports, and what a step
sends.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_jobs import Finish, changed_program
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.config import Config, ModelConfig
from mingpt.distributed.device import autocast
from mingpt.model import GPT
from mingpt.tools.jobs import ROOT, torchrun

CONFIG = Config()
SIZE = CONFIG.trainer.micro_batch_size
WRITTEN_MB = {"modern": 58.3, "gpt2": 52.2}  # measured; a twentieth more is allowed
CPU = torch.device("cpu")


class Written(TorchDispatchMode):
    """Counts the bytes that operations write to new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            in_place = func.name().partition(".")[0].endswith("_")
            if isinstance(tensor, Tensor) and (in_place or tensor.untyped_storage().data_ptr() not in known):
                self.bytes += tensor.nbytes
        return result


def micro_batch(arch: str) -> Callable[[], None]:
    """A function that makes the default run's forward and backward pass, as on a CPU that has bfloat16."""
    torch.manual_seed(0)
    config = ModelConfig(arch=arch)  # type: ignore[arg-type]
    model = GPT(config, vocab_size=65, block_size=CONFIG.data.block_size)
    tokens = torch.randint(0, 65, (SIZE, CONFIG.data.block_size))

    def run() -> None:
        with autocast(CPU, torch.bfloat16):
            loss = model(tokens, tokens)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


@pytest.mark.parametrize("arch", ["modern", "gpt2"])
def test_a_micro_batch_writes_no_more_to_memory_than_it_did(arch: str) -> None:
    work = micro_batch(arch)
    work()
    with Written() as written:
        work()
    written_mb, expected_mb = written.bytes / 1e6, WRITTEN_MB[arch]
    assert expected_mb * 0.8 < written_mb < expected_mb * 1.05, f"{written_mb:.1f} MB"


STARTING_PROGRAM = """
import sys
import torch
from mingpt.base.rows import RowMap
from mingpt.config import Config, ModelConfig
from mingpt.model import GPT
from mingpt.distributed.transport import Transport
from mingpt.optim import Optimizer
from mingpt.parallel.strategy import allocate
import mingpt.training.trainer, mingpt.distributed
weights = dict(GPT(Config().model, vocab_size=5, block_size=4).named_parameters())
shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
optimizer = Optimizer(weights, Config().optimizer, RowMap(shapes), Transport(0, 1))
for arch in ("modern", "gpt2"):
    with torch.device("meta"):
        model = GPT(ModelConfig(arch), vocab_size=5, block_size=4)
    allocate(model, torch.device("cpu"))
slow = ("torch._dynamo", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor")
slow += ("matplotlib", "transformers", "mingpt.extras.ddp_hook", "mingpt.extras.shared_memory")
sys.exit(", ".join(name for name in slow if name in sys.modules) or 0)
"""


def test_model_and_optimizer_are_made_without_the_compiler_and_without_fsdp() -> None:
    """torch._dynamo takes as long to import as torch, sympy a fifth; a fresh process reports its imports."""
    done = subprocess.run(
        [sys.executable, "-c", STARTING_PROGRAM], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


# Each worker writes a step's collectives to a file of `folder`: names, and the bytes that the worker gives.
COUNTING = """
import json, math, os
from mingpt.distributed.transport import TRANSPORTS
TRANSPORTS.clear()  # workers of one node would share memory
sizes = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "bool": 1}
profiles = []
def begin(step):
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile
    if step == 2:  # DDP arranges its buckets after the first step
        config = _ExperimentalConfig(profile_all_threads=True)
        profiles.append(profile(record_shapes=True, experimental_config=config))
        profiles[0].__enter__()
def end(step):
    if step != 3:
        return
    profiles[0].__exit__(None, None, None)
    calls = [e for e in profiles[0].profiler.kineto_results.events() if e.name().startswith("gloo:")]
    tensors = [(e.name()[5:], zip(e.shapes(), e.dtypes())) for e in calls]
    given = [(name, sum(math.prod(shape) * sizes[kind] for shape, kind in pairs)) for name, pairs in tensors]
    with open({folder!r} + "/given-" + os.environ["RANK"], "w") as file:
        json.dump(given, file)
events.subscribe("step_start", begin)
events.subscribe("step_end", end)
"""


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("parallel", "reduction", "calls", "rings"),
    [
        ("ddp", "exact", {"all_to_all": 1, "all_gather": 1, "all_reduce": 1}, 1),
        # Two rounds; the last all_gather is for the norms of rows.
        ("fsdp", "exact", {"all_gather": 2 + 1, "all_to_all": 2, "all_reduce": 1}, 2),
        # gloo's reduce_scatter is an all-reduce.
        ("fsdp", "fast", {"all_gather": 2 + 1, "all_reduce": 2 + 1}, 3),
    ],
)
def test_two_workers_send_the_bytes_of_their_strategy_in_as_many_collectives(
    parallel: str, reduction: str, calls: dict[str, int], rings: int, finish: Finish, tmp_path: Path
) -> None:
    """With gloo. Under fsdp this model is one unit. A ring's all-reduce sends as many bytes as a gradient."""
    program = changed_program(tmp_path, COUNTING.replace("{folder!r}", repr(str(tmp_path))))
    small: dict[str, Any] = {"data__block_size": 16, "model__n_embd": 64, "trainer__batch_size": 4}
    small |= {"trainer__max_steps": 4, "trainer__eval_at_start": False, "trainer__dtype": "float32"}
    small |= {
        "snapshot__every": 100,
        "snapshot__memory_every": 0,
        "optimizer__name": "adamw",
        "trainer__log_every": 100,
    }
    small |= {"trainer__parallel": parallel, "trainer__reduction": reduction}
    finish(launcher=torchrun(2), program=program, run_dir=tmp_path / "run", **small)
    given = [json.loads((tmp_path / f"given-{rank}").read_text()) for rank in range(2)]
    assert Counter(name for name, _ in given[0]) == calls
    of_given = {"all_to_all": 0.5, "all_gather": 1, "all_reduce": 1}
    sent = sum(of_given[name] * size for one in given for name, size in one) / 2
    parameters = re.search(r"([\d,]+) parameters", (tmp_path / "run" / "log.txt").read_text())
    assert parameters
    assert sent == pytest.approx(rings * 4 * int(parameters[1].replace(",", "")), rel=0.03)
