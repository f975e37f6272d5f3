"""Builds what is trained, from snapshot, weights or seed: model, parallel strategy, optimizer, position."""

import functools
import logging
from typing import Any

import torch

from mingpt import resume
from mingpt.config import Config
from mingpt.data import Corpus, ElasticSampler
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import autocast, enable_determinism, environment_info, resolve_dtype
from mingpt.errors import UserError
from mingpt.initial_weights import InitialWeights, match_weights, open_weights
from mingpt.model import (
    GPT,
    LossModule,
    can_compile_block,
    choose_compile,
    compile_blocks,
    compile_model,
    draw_weight,
    import_compiler,
)
from mingpt.optim import Exchange, Optimizer
from mingpt.parallel import STRATEGIES, Strategy, StrategySetup, split_rows
from mingpt.state import TrainState, copy_rows
from mingpt.stored_state import load_state

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
    software = start.snapshot.manifest["software"] if start.snapshot else {}
    environment["compiled"] = software.get("compiled", False)  # until a forward pass is prepared for training
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

    Whether it is compiled goes into `environment`. Collective.
    """
    snapshot, trainer = start.snapshot, config.trainer
    step, windows_seen = 0, 0
    if snapshot:
        step, windows_seen = snapshot.manifest["step"], snapshot.manifest["windows"]
    to_train = step < trainer.max_steps and not trainer.eval_only
    if trainer.parallel == "fsdp" and context.device.type == "mps":
        raise UserError("trainer.parallel=fsdp needs CPUs or CUDA GPUs: set trainer.device=cpu")
    if trainer.reduction == "exact":
        enable_determinism()
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=corpus.vocab_size, block_size=config.data.block_size)
    model.set_recompute(trainer.recompute == "block")
    strategy_class = STRATEGIES[trainer.parallel, trainer.reduction]
    sampler = make_sampler(config, context, corpus, strategy_class.takes_turns)
    sampler.seek(windows_seen)
    strategy = strategy_class(make_setup(config, context, model, sampler, environment))
    model.init_buffers()
    exchange = make_exchange(context, strategy)
    optimizer = Optimizer(strategy.pieces(), strategy.shapes, config.optimizer, exchange)
    state = TrainState(model, optimizer, strategy, step, windows_seen)
    if snapshot:
        load_state(state, snapshot, context)
    else:
        init_weights(state, config, context, corpus, initial)
    if to_train:
        choice = choose_compile(config, corpus.vocab_size, context.device.type, start.was_compiled)
        prepare_forward(config, context, model, strategy, environment, choice.is_compiled)
        if snapshot:
            resume.compare_environment(snapshot.manifest["software"], environment)
    else:
        strategy.prepare(LossModule(model))
    context.exit.step = step
    return state, sampler


def make_sampler(
    config: Config, context: DistributedContext, corpus: Corpus, takes_turns: bool
) -> ElasticSampler:
    """Of the windows that are trained on, at the first one."""
    return ElasticSampler(
        corpus.train,
        batch_size=config.trainer.batch_size,
        micro_batch_size=config.trainer.micro_batch_size,
        seed=config.seed,
        num_replicas=context.world_size,
        rank=context.rank,
        takes_turns=takes_turns,
    )


def make_setup(
    config: Config,
    context: DistributedContext,
    model: GPT,
    sampler: ElasticSampler,
    environment: dict[str, Any],
) -> StrategySetup:
    trainer = config.trainer
    return StrategySetup(
        model,
        list(model.h),
        sampler.micro_batches_by_rank(),
        (trainer.micro_batch_size, config.data.block_size),
        context,
        shard_optimizer=trainer.shard_optimizer,
        reshard=trainer.fsdp_reshard,
        param_dtype=torch.bfloat16 if trainer.fsdp_param_dtype else None,
        timeout_s=trainer.timeout_s,
        autocasts=functools.partial(autocast, context.device, getattr(torch, environment["dtype"])),
    )


def make_exchange(context: DistributedContext, strategy: Strategy) -> Exchange:
    """How the optimizer's part of a rank meets those of the others."""
    return Exchange(
        context.rank,
        context.world_size,
        strategy.updates_are_sharded,
        rows=functools.partial(split_rows, workers=context.world_size),
        all_to_all=context.all_to_all,
        all_gather=context.all_gather_parts,
    )


def init_weights(
    state: TrainState,
    config: Config,
    context: DistributedContext,
    corpus: Corpus,
    initial: InitialWeights | None,
) -> None:
    """Weights drawn by name from the seed, or `initial` ones of rank 0; one after the other. Collective.

    All ranks get rank 0's, since those drawn from one seed may differ between kinds of machines.
    """
    shapes, parts, first = state.strategy.shapes, state.tensors(), state.first_rows()
    draw = functools.partial(draw_weight, config=config.model, seed=config.seed)
    given = context.run_with_heartbeat(
        lambda: match_weights(initial, config.model, shapes, draw, corpus.tokenizer) if initial else {}
    )
    for name, shape in shapes.items():
        if context.rank == 0:
            weight = given.pop(name) if name in given else draw(name, shape)
            weight = weight.to(context.device, torch.float32).contiguous()
        else:
            weight = torch.empty(shape, device=context.device)
        context.broadcast(weight, 0)
        copy_rows(parts[f"model.{name}"], first[f"model.{name}"], 0, weight)


def prepare_forward(
    config: Config,
    context: DistributedContext,
    model: GPT,
    strategy: Strategy,
    environment: dict[str, Any],
    compiles: bool,
) -> None:
    """Give the strategy the loss, compiled if it is to be."""
    forward: Any = LossModule(model)
    grads_are_static = False
    environment["compiled"] = False
    dtype = getattr(torch, environment["dtype"])
    if compiles and strategy.weights_are_sharded:
        strategy.prepare(forward)
        if compile_blocks_on_all_ranks(config, context, model, dtype):
            environment["compiled"] = "blocks"  # which have other bits than a model compiled as a whole
        return
    if compiles:
        compiled, is_static = compile_on_all_ranks(config, context, forward, dtype)
        if compiled is not None:
            forward, grads_are_static = compiled, is_static
            environment["compiled"] = True
    strategy.prepare(forward, grads_are_static)


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


def compile_blocks_on_all_ranks(
    config: Config, context: DistributedContext, model: GPT, dtype: torch.dtype
) -> bool:
    """Whether the blocks are compiled: on all ranks or on none, so that all compute with the same kernels.

    Each rank first tries one that is not sharded: a rank whose compiler fails inside a forward pass of all
    ranks would leave the others waiting.
    """
    trainer = config.trainer
    x = torch.zeros(
        trainer.micro_batch_size, config.data.block_size, config.model.n_embd, device=context.device
    )
    weights = torch.bfloat16 if trainer.fsdp_param_dtype else torch.float32
    work = functools.partial(
        can_compile_block, model, x, functools.partial(autocast, context.device, dtype), weights
    )
    succeeded = context.all_gather_object(context.heartbeat_while(work))
    if all(succeeded):
        compile_blocks(model)
    return all(succeeded)
