"""Builds what is trained, from snapshot, weights or seed: model, parallel strategy, optimizer, position."""

import functools
import logging
from typing import Any

import torch

from mingpt import resume, weights
from mingpt.config import Config
from mingpt.data import Corpus, ElasticSampler
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import autocast, enable_determinism, environment_info, resolve_dtype
from mingpt.initial_weights import InitialWeights, init_from, open_weights
from mingpt.model import GPT, LossModule, compile_model, import_compiler
from mingpt.optim import Optimizer
from mingpt.parallel import STRATEGIES, Strategy, StrategySetup
from mingpt.state import TrainState

log = logging.getLogger(__name__)


def open_initial_weights(
    config: Config, context: DistributedContext, start: resume.StartPoint
) -> InitialWeights | None:
    """On rank 0 of a fresh run, those of snapshot.init_from. Raises UserError. Collective."""
    where = config.snapshot.init_from
    if start.snapshot or not where:
        return None
    return context.run_with_heartbeat(lambda: open_weights(where) if context.rank == 0 else None)


def init_environment(config: Config, context: DistributedContext, start: resume.StartPoint) -> dict[str, Any]:
    """What the bits depend on besides the configuration: threads as recorded, dtype, versions, device.

    Raises UserError if the snapshot to go on from needs another device or dtype. Collective.
    """
    if start.snapshot:
        context.use_threads(start.snapshot.manifest["software"]["threads"])
    dtypes = set(context.all_gather_object(str(resolve_dtype(config.trainer.dtype, context.device))))
    (dtype,) = dtypes if len(dtypes) == 1 else ("torch.float32",)  # auto: not native everywhere
    environment = environment_info(context.device, context.threads)
    environment["dtype"] = dtype.removeprefix("torch.")
    if start.snapshot and start.snapshot.manifest["step"] < config.trainer.max_steps:
        resume.check_environment(start, config, environment)
    return environment


def init_state(
    config: Config,
    context: DistributedContext,
    corpus: Corpus,
    start: resume.StartPoint,
    environment: dict[str, Any],
    initial: InitialWeights | None,
) -> tuple[TrainState, ElasticSampler]:
    """The state from a snapshot, other weights (on rank 0), or seed. Raises UserError.

    Whether it is compiled goes into `environment`.
    """
    snapshot = start.snapshot
    torch.manual_seed(config.seed)
    sizes = {"vocab_size": corpus.vocab_size, "block_size": config.data.block_size}
    model = context.heartbeat_while(lambda: GPT(config.model, **sizes))
    step, windows_seen = 0, 0
    if snapshot:
        step, windows_seen = snapshot.manifest["step"], snapshot.manifest["windows"]
        weights.load_weights(model, snapshot.tensors("model."), f"the snapshot of step {step}")
    elif config.snapshot.init_from:  # the other ranks get them below
        context.run_with_heartbeat(lambda: init_from(model, initial, corpus.tokenizer) if initial else None)
    model.to(context.device)
    context.broadcast_parameters(model.parameters())
    sampler = ElasticSampler(
        corpus.train,
        batch_size=config.trainer.batch_size,
        micro_batch_size=config.trainer.micro_batch_size,
        seed=config.seed,
        num_replicas=context.world_size,
        rank=context.rank,
    )
    sampler.seek(windows_seen)
    to_train = step < config.trainer.max_steps and not config.trainer.eval_only
    strategy = make_strategy(config, context, model, sampler, environment, to_train)
    optimizer = Optimizer(model, config.optimizer, context.rank, context.world_size, context.all_gather)
    state = TrainState(model, optimizer, strategy, step, windows_seen)
    if snapshot and snapshot.config.optimizer.name == config.optimizer.name:
        state.load_optimizer(snapshot.tensors("optimizer."))
    if snapshot and to_train:
        resume.compare_environment(snapshot.manifest["software"], environment)
    context.exit.step = step
    return state, sampler


def make_strategy(
    config: Config,
    context: DistributedContext,
    model: GPT,
    sampler: ElasticSampler,
    environment: dict[str, Any],
    to_train: bool,
) -> Strategy:
    """The strategy for `trainer.reduction` around the model, compiled if it is to be."""
    reduction = config.trainer.reduction
    if reduction == "exact":
        enable_determinism()
    forward: Any = LossModule(model)
    grads_are_static = False
    environment["compiled"] = False
    if config.trainer.compile and to_train:
        dtype = getattr(torch, environment["dtype"])
        compiled, is_static = compile_on_all_ranks(config, context, forward, dtype)
        if compiled is not None:
            forward, grads_are_static = compiled, is_static
            environment["compiled"] = True
    setup = StrategySetup(
        forward,
        list(model.parameters()),
        sampler.micro_batches_by_rank(),
        (config.trainer.micro_batch_size, config.data.block_size),
        context,
        grads_are_static,
    )
    return STRATEGIES[reduction](setup)


def compile_on_all_ranks(
    config: Config, context: DistributedContext, loss: LossModule, dtype: torch.dtype
) -> tuple[Any, bool]:
    """The compiled loss, or None if any rank fails, and whether gradients are static."""
    shape = config.trainer.micro_batch_size, config.data.block_size
    example = torch.zeros(shape, dtype=torch.long, device=context.device)
    autocasts = functools.partial(autocast, context.device, dtype)
    graphs = config.trainer.reduction == "exact"
    work = functools.partial(compile_model, loss, example, autocasts, graphs=graphs)
    # The first worker of a node fills the compiler's cache for the others; it is of no use to another GPU.
    is_first = context.launch.local_rank == 0 or context.device.type == "cuda"
    early = context.heartbeat_while(lambda: work() if is_first else import_compiler())
    result = context.heartbeat_while(lambda: early or work())
    succeeded = context.all_gather_object(result[0] is not None)
    return result if all(succeeded) else (None, False)  # all ranks compute with the same kernels
