"""A Run is what a generation (the workers between two restarts) trains with, such as state and sampler.

The weights come from a snapshot, from snapshot.init_from, or from the seed.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mingpt.base.errors import ExpectedError, UserError
from mingpt.base.files import PIECE_BYTES
from mingpt.base.rows import Shape, in_batches
from mingpt.config import Config
from mingpt.data import CharDataset, Corpus, ElasticSampler, Tokenizer
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import Environment, autocast, enable_determinism
from mingpt.model import GPT, LossModule, can_compile_block, choose_compile, compile_blocks
from mingpt.model.weights import fit_weights
from mingpt.optim import Optimizer
from mingpt.parallel import STRATEGIES, Strategy, StrategySetup
from mingpt.snapshot import Snapshot
from mingpt.snapshot.search import copy_part
from mingpt.training.contents import make_tokenizer
from mingpt.training.start import StartPoint
from mingpt.training.state import LossScale, TrainState, load_state

SHAPE_SETTINGS = ("arch", "n_layer", "n_head", "n_embd")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Everything that a generation (the workers between two restarts) trains with.

    `build_run` makes a Run on each rank.
    """

    config: Config
    context: DistributedContext
    start: StartPoint
    state: TrainState  # at first the state that `start` describes; changes with each step
    sampler: ElasticSampler  # positioned at the next window to read
    environment: Environment  # what the bits depend on, besides the configuration
    compile_choice: str  # a phrase: whether and why the model is compiled; "" if there is nothing to train

    @property
    def corpus(self) -> Corpus:
        return self.start.corpus

    @property
    def strategy(self) -> Strategy:
        return self.state.strategy


@contextlib.contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Return a context that turns torch's out-of-memory errors, on CPU or CUDA GPU, into an ExpectedError."""
    try:
        yield
    except RuntimeError as error:
        messages = ("can't allocate memory", "not enough memory")
        if isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in messages):
            raise ExpectedError(
                "out of memory: lower trainer.micro_batch_size, the batch stays the "
                "same; or train a smaller model"
            ) from error
        raise


@out_of_memory_explained()
def build_run(config: Config, context: DistributedContext, start: StartPoint) -> Run:
    """Build the run. Its weights come from the snapshot in `start`, else snapshot.init_from, else the seed.

    Raises UserError on all ranks if settings and weights do not go together. A rank may raise ExpectedError
    if it has too little memory, CorruptSnapshot or UnreadableSnapshot if a snapshot cannot be read.
    Collective.
    """
    trainer = config.trainer
    if trainer.reduction == "exact":
        enable_determinism()
    state, sampler = build_state(config, context, start)
    if start.snapshot:
        load_state(state, start.snapshot, context)
    else:
        init_weights(state, config, context, start)
    environment = context.environment()
    state.strategy.prepare(LossModule(state.model))
    if start.step >= trainer.max_steps or trainer.eval_only:
        compiled = start.manifest.software.compiled if start.snapshot else False
        return Run(config, context, start, state, sampler, replace(environment, compiled=compiled), "")
    flops, kind = state.model.flops_per_token(), context.device.type
    is_chosen, reason = choose_compile(config, flops, kind, environment.dtype, start.was_compiled)
    is_compiled = is_chosen and compile_on_all_ranks(config, context, state.model)
    if is_chosen and not is_compiled:
        reason = "torch.compile failed"
    environment = replace(environment, compiled="blocks" if is_compiled else False)
    if start.snapshot:
        compare_environment(start.manifest.software.model_dump(), environment)
    said = f"{'compiled' if is_compiled else 'not compiled'}: {reason}"
    return Run(config, context, start, state, sampler, environment, said)


def build_state(
    config: Config, context: DistributedContext, start: StartPoint
) -> tuple[TrainState, ElasticSampler]:
    """Return the state and the sampler, both at the step of `start`. Collective.

    Weights are not yet set, and the optimizer's tensors are those of a new run. All ranks raise UserError if
    no strategy is registered for trainer.parallel and trainer.reduction, or if the model or the strategy
    cannot be built with these settings.
    """
    trainer, corpus, manifest = config.trainer, start.corpus, start.manifest
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=corpus.vocab_size, block_size=config.data.block_size)
    model.set_recompute(trainer.recompute == "block")
    strategy_class = STRATEGIES.get((trainer.parallel, trainer.reduction))
    if strategy_class is None:
        raise UserError(
            f"trainer.parallel={trainer.parallel} does not go with trainer.reduction={trainer.reduction}: "
            f"take {', or '.join(' and '.join(pair) for pair in STRATEGIES)}"
        )
    sampler = make_sampler(config, corpus.train, context.world_size, context.rank, strategy_class.takes_turns)
    sampler.seek(manifest.windows)
    setup = StrategySetup(
        model,
        sampler.micro_batches_by_rank(),
        context,
        list(model.h),
        torch.zeros(
            2, trainer.micro_batch_size, config.data.block_size, dtype=torch.long, device=context.device
        ).unbind(),
        shard_optimizer=trainer.shard_optimizer,
        reshard=trainer.fsdp_reshard,
        param_dtype=torch.bfloat16 if trainer.fsdp_param_dtype else None,
        timeout_s=trainer.timeout_s,
        autocasts=functools.partial(autocast, context.device, context.dtype),
    )
    strategy = strategy_class(setup)
    model.init_buffers()
    # GPUs without bfloat16 compute in float16, also the matrix products of Muon.
    product_dtype = torch.float16 if context.dtype == torch.float16 else torch.bfloat16
    optimizer = Optimizer(
        strategy.pieces(), config.optimizer, strategy.rows, context.transport, product_dtype
    )
    loss_scale = None
    if context.dtype == torch.float16:
        stored = manifest.loss_scale
        loss_scale = LossScale(stored.scale, stored.good_steps) if stored else LossScale()
    state = TrainState(
        model, optimizer, strategy, manifest.step, manifest.windows, manifest.skipped, loss_scale
    )
    return state, sampler


def make_sampler(
    config: Config, dataset: CharDataset, num_replicas: int, rank: int, takes_turns: bool
) -> ElasticSampler:
    """Return the sampler of the windows (token sequences) that one rank trains on, at step 0.

    `num_replicas` is the number of ranks. With `takes_turns`, the rank gets every num_replicas-th micro-batch
    of a step instead of consecutive micro-batches.
    """
    return ElasticSampler(
        dataset,
        batch_size=config.trainer.batch_size,
        micro_batch_size=config.trainer.micro_batch_size,
        seed=config.seed,
        num_replicas=num_replicas,
        rank=rank,
        takes_turns=takes_turns,
    )


def init_weights(state: TrainState, config: Config, context: DistributedContext, start: StartPoint) -> None:
    """Set the weights of `state` to those of snapshot.init_from, if that is set; else draw random weights.

    A random weight depends on the seed and on the weight's name. All ranks get the weights of rank 0, because
    machines of different kinds may draw different numbers from one seed. Raises the errors of
    `match_weights`: a UserError on all ranks, any other error on rank 0. Collective.
    """
    initial, tokenizer = start.initial, start.corpus.tokenizer
    shapes, parts = state.strategy.shapes, state.tensors()
    draw = functools.partial(state.model.draw_weight, seed=config.seed)
    given: dict[str, Tensor] = {}
    if config.snapshot.init_from:
        given = context.on_all(lambda: match_weights(initial, config, shapes, tokenizer) if initial else {})
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    for names in in_batches(shapes, lambda name: 4 * sizes[name], PIECE_BYTES):
        buffer = torch.empty(sum(sizes[name] for name in names), device=context.device)
        weights = dict(zip(names, buffer.split([sizes[name] for name in names]), strict=True))
        for name, weight in weights.items() if context.rank == 0 else ():
            weight.copy_((given.pop(name) if name in given else draw(name, shapes[name])).reshape(-1))
        context.transport.broadcast(buffer, 0)
        for name, weight in weights.items():
            copy_part(parts[f"model.{name}"], state.rows.first(f"model.{name}", context.rank), 0, weight)


def match_weights(
    initial: Snapshot, config: Config, shapes: Mapping[str, Shape], tokenizer: Tokenizer | None
) -> dict[str, Tensor]:
    """Return the weights of `initial`, by name, for a new run with parameters of the shapes `shapes`.

    `initial` is the snapshot of snapshot.init_from, `tokenizer` that of the new run. Learned positions past
    those in `shapes` are left out. Raises UserError if model.arch or any other size differs, or if the
    tokenizer of `initial` is unusable or known to differ. May raise CorruptSnapshot or UnreadableSnapshot.
    """
    origin = f"snapshot.init_from={config.snapshot.init_from}"
    there, here = vars(initial.config.model), vars(config.model)
    wrong = [f"model.{name}={there[name]}" for name in SHAPE_SETTINGS if there[name] != here[name]]
    if wrong:
        raise UserError(f"{origin} holds the weights of another model: set {' '.join(wrong)}")
    its = make_tokenizer(initial.manifest, initial.read_tokenizer())
    if tokenizer and its and tokenizer.fingerprint() != its.fingerprint():
        raise UserError(
            f"{origin} was trained with another tokenizer than this run's, and its embeddings fit only that "
            "one: leave data.tokenizer out, keep no other tokenizer.json beside the data, or drop "
            "snapshot.init_from"
        )
    tensors = fit_weights(initial.tensors("model."), shapes, origin)
    log.info(f"weights taken from {config.snapshot.init_from}")
    return tensors


def compile_on_all_ranks(config: Config, context: DistributedContext, model: GPT) -> bool:
    """Let torch.compile compile each block of `model` at its first call; return whether it will. Collective.

    Each rank first tries to compile one block that is not sharded. If that fails on any rank, no block is
    compiled on any rank, so that all ranks compute with the same kernels.
    """
    trainer = config.trainer
    x = torch.zeros(
        trainer.micro_batch_size, config.data.block_size, config.model.n_embd, device=context.device
    )
    weights = torch.bfloat16 if trainer.fsdp_param_dtype else torch.float32
    autocasts = functools.partial(autocast, context.device, context.dtype)
    work = functools.partial(can_compile_block, model, x, autocasts, weights)
    # The first worker of a node fills the compiler's cache for the others. A different GPU cannot use it.
    is_first = context.launch.local_rank == 0 or context.device.type == "cuda"
    early = context.on_all(lambda: is_first and work())
    succeeded = all(context.gather_on_all(lambda: early if is_first else work()))
    if succeeded:
        compile_blocks(model)
    return succeeded


def compare_environment(then: dict[str, Any], environment: Environment) -> None:
    """Log one line if `environment` differs from `then`, the environment in which the snapshot was written.

    The run may then give other bits than an undisturbed run. Fields that `then` lacks do not count.
    """
    now = asdict(environment)
    changed = [f"{name}: {then[name]} -> {now[name]}" for name in then if then[name] != now.get(name)]
    if changed:
        log.info(
            "the bits may differ from those of an undisturbed run, because the snapshot was written with "
            f"other software or hardware ({'; '.join(changed)})"
        )
