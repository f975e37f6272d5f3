"""Build what a generation trains with, from snapshot, file or seed: model, strategy, optimizer, sampler."""

import functools
import logging
from dataclasses import asdict, replace
from typing import Any

import torch

from mingpt.base.errors import UserError
from mingpt.config import Config
from mingpt.data import ElasticSampler
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import Environment, autocast, enable_determinism
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
from mingpt.parallel import STRATEGIES, Strategy, StrategySetup
from mingpt.training.audit import make_sampler
from mingpt.training.initial_weights import match_weights
from mingpt.training.start import StartPoint
from mingpt.training.state import LossScale, TrainState, copy_rows, load_state

log = logging.getLogger(__name__)


def build_run(
    config: Config, context: DistributedContext, start: StartPoint
) -> tuple[TrainState, ElasticSampler, Environment, str]:
    """Build the state to train, from the start's snapshot, else snapshot.init_from's weights, else the seed.

    Returns the state, the sampler at its next window, the environment that the bits depend on, and a phrase
    on whether and why the model is compiled: "", and not compiled, if there is nothing to train. Raises
    UserError on all ranks if settings, weights or devices do not go together. Collective.
    """
    trainer, corpus, environment = config.trainer, start.corpus, start.environment
    if trainer.parallel == "fsdp" and context.device.type == "mps":
        raise UserError("trainer.parallel=fsdp needs CPUs or CUDA GPUs: set trainer.device=cpu")
    if trainer.reduction == "exact":
        enable_determinism()
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=corpus.vocab_size, block_size=config.data.block_size)
    model.set_recompute(trainer.recompute == "block")
    strategy_class = STRATEGIES[trainer.parallel, trainer.reduction]
    sampler = make_sampler(config, corpus.train, context.world_size, context.rank, strategy_class.takes_turns)
    sampler.seek(start.manifest.windows)
    setup = StrategySetup(
        model,
        list(model.h),
        sampler.micro_batches_by_rank(),
        (trainer.micro_batch_size, config.data.block_size),
        context,
        shard_optimizer=trainer.shard_optimizer,
        reshard=trainer.fsdp_reshard,
        param_dtype=torch.bfloat16 if trainer.fsdp_param_dtype else None,
        timeout_s=trainer.timeout_s,
        autocasts=functools.partial(autocast, context.device, context.dtype),
    )
    strategy = strategy_class(setup)
    model.init_buffers()
    optimizer = build_optimizer(config, context, strategy)
    windows, skipped = start.manifest.windows, start.manifest.skipped
    loss_scale = None
    if context.dtype == torch.float16:
        stored = start.manifest.loss_scale
        loss_scale = LossScale(stored.scale, stored.good_steps) if stored else LossScale()
    state = TrainState(model, optimizer, strategy, start.step, windows, skipped, loss_scale)
    if start.snapshot:
        load_state(state, start.snapshot, context)
    else:
        init_weights(state, config, context, start)
    if start.step >= trainer.max_steps or trainer.eval_only:
        strategy.prepare(LossModule(model))
        return state, sampler, environment, ""
    choice = choose_compile(config, corpus.vocab_size, context.device.type, start.was_compiled)
    compiled = prepare_forward(config, context, model, strategy, choice.is_compiled)
    environment = replace(environment, compiled=compiled)
    if start.snapshot:
        compare_environment(start.manifest.software.model_dump(), environment)
    failed = choice.is_compiled and not compiled
    return state, sampler, environment, "not compiled: torch.compile failed" if failed else str(choice)


def build_optimizer(config: Config, context: DistributedContext, strategy: Strategy) -> Optimizer:
    """Return the optimizer of this rank's rows of the parameters, with an empty state."""
    exchange = Exchange(  # how a rank's part of the optimizer communicates with the others' parts
        context.rank, strategy.rows, all_to_all=context.all_to_all, all_gather=context.all_gather_parts
    )
    # GPUs without bfloat16 compute in float16, Muon's products, too.
    product_dtype = torch.float16 if context.dtype == torch.float16 else torch.bfloat16
    return Optimizer(strategy.pieces(), config.optimizer, exchange, product_dtype)


def init_weights(state: TrainState, config: Config, context: DistributedContext, start: StartPoint) -> None:
    """Set the weights of `state` to snapshot.init_from's, if it is given, else to draws from seed and name.

    All ranks get the weights of rank 0, since kinds of machines may draw differently from one seed. Raises
    UserError on all ranks if snapshot.init_from's weights do not fit. Collective.
    """
    initial, tokenizer = start.initial, start.corpus.tokenizer
    shapes, parts = state.strategy.shapes, state.tensors()
    draw = functools.partial(draw_weight, config=config.model, seed=config.seed)
    given = context.on_all(
        lambda: match_weights(initial, config.model, shapes, draw, tokenizer) if initial else {}
    )
    for name, shape in shapes.items():
        if context.rank == 0:
            weight = given.pop(name) if name in given else draw(name, shape)
            weight = weight.to(context.device, torch.float32).contiguous()
        else:
            weight = torch.empty(shape, device=context.device)
        context.broadcast(weight, 0)
        first = state.rows.of(f"model.{name}", context.rank).start
        copy_rows(parts[f"model.{name}"], first, 0, weight)


def prepare_forward(
    config: Config, context: DistributedContext, model: GPT, strategy: Strategy, compiles: bool
) -> bool | str:
    """Give the strategy the loss module, compiled if `compiles` and no rank's compiler fails. Collective.

    Returns what is compiled: True for the whole module, "blocks" for each block by itself, False for nothing.
    """
    forward: Any = LossModule(model)
    if compiles and strategy.weights_are_sharded:
        strategy.prepare(forward)
        # Compiled blocks have other bits than a model compiled as a whole.
        return "blocks" if compile_blocks_on_all_ranks(config, context, model) else False
    compiled, grads_are_static = None, False
    if compiles:
        compiled, grads_are_static = compile_on_all_ranks(config, context, forward)
    strategy.prepare(forward if compiled is None else compiled, grads_are_static)
    return compiled is not None


def compile_on_all_ranks(config: Config, context: DistributedContext, loss: LossModule) -> tuple[Any, bool]:
    """Compile the loss; return (the compiled module, whether it uses CUDA graphs). Collective.

    If any rank fails, returns (None, False). With CUDA graphs, the memory of the loss and the gradients is
    static: the next call overwrites them.
    """
    shape = config.trainer.micro_batch_size, config.data.block_size
    example = torch.zeros(shape, dtype=torch.long, device=context.device)
    autocasts = functools.partial(autocast, context.device, context.dtype)
    graphs = config.trainer.reduction == "exact"
    work = functools.partial(compile_model, loss, example, autocasts, graphs=graphs)
    # The first worker of a node fills the compiler's cache for the others. Another GPU cannot use it.
    is_first = context.launch.local_rank == 0 or context.device.type == "cuda"
    early = context.on_all(lambda: work() if is_first else import_compiler())
    result = context.on_all(lambda: early or work())
    succeeded = context.all_gather_object(result[0] is not None)
    return result if all(succeeded) else (None, False)  # all ranks compute with the same kernels


def compile_blocks_on_all_ranks(config: Config, context: DistributedContext, model: GPT) -> bool:
    """Compile each block of `model` in place, unless a rank's compiler fails; return whether. Collective.

    Each rank first compiles one block that is not sharded: a compiler that fails on one rank inside a forward
    pass of all ranks would leave the others waiting.
    """
    trainer = config.trainer
    x = torch.zeros(
        trainer.micro_batch_size, config.data.block_size, config.model.n_embd, device=context.device
    )
    weights = torch.bfloat16 if trainer.fsdp_param_dtype else torch.float32
    work = functools.partial(
        can_compile_block, model, x, functools.partial(autocast, context.device, context.dtype), weights
    )
    succeeded = context.gather_on_all(work)
    if all(succeeded):
        compile_blocks(model)
    return all(succeeded)


def compare_environment(then: dict[str, Any], environment: Environment) -> None:
    """Log one line if `environment` differs from `then`, the snapshot's: then the bits may differ, too."""
    now = asdict(environment)
    changed = [f"{name}: {then[name]} -> {now[name]}" for name in then if then[name] != now.get(name)]
    if changed:
        log.info(
            "the bits may differ from those of an undisturbed run, because the snapshot was written with "
            f"other software or hardware ({'; '.join(changed)})"
        )
