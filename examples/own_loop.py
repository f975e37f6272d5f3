"""Train a small convolutional network by a loop of your own, on any number of workers, which may be killed.

    torchrun --standalone --nproc_per_node=2 --max-restarts=3 examples/own_loop.py

This project must be on PYTHONPATH, or installed. The last line of output, a hash of the weights, is the same
for any number of workers and kills, on one kind of device. The same command, when started again, goes on from
the newest snapshot in the folder own_loop/.
"""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mingpt.data import ElasticSampler
from mingpt.distributed import DistributedContext, Worker, enable_determinism
from mingpt.parallel import ExactReduction, StrategySetup
from mingpt.snapshot import Checkpoint

SEED, STEPS, BATCH, MICRO_BATCH, SAVE_EVERY, CLASSES = 1, 900, 96, 8, 20, 6


def make_images(count: int) -> TensorDataset:
    """Return noise images, (count, 1, 24, 24), and each one's lightest vertical strip by number, (count,)."""
    images = torch.randn(count, 1, 24, 24, generator=torch.Generator().manual_seed(SEED))
    return TensorDataset(images, F.avg_pool2d(images, (24, 24 // CLASSES)).flatten(1).argmax(1))


def train(context: DistributedContext) -> str | None:
    """Train until step STEPS or a request to stop; return the request that all ranks agreed on, or None."""
    enable_determinism()
    torch.manual_seed(SEED)  # all workers draw the same weights: nothing broadcasts them
    # There is no BatchNorm, because its statistics would depend on the micro-batches.
    layers = nn.Conv2d(1, 16, 5, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(1600, CLASSES)
    model, data = nn.Sequential(*layers).to(context.device), make_images(6000)
    sampler = ElasticSampler(
        data, batch_size=BATCH, micro_batch_size=MICRO_BATCH, seed=SEED,
        num_replicas=context.world_size, rank=context.rank,
    )  # fmt: skip
    strategy = ExactReduction(StrategySetup(model, sampler.micro_batches_by_rank(), context))
    strategy.prepare(model)
    weights = strategy.pieces()  # the parameters' memory
    optimizer = torch.optim.SGD(weights.values(), lr=0.02, momentum=0.9)
    checkpoint, state = Checkpoint("own_loop", keep=2), {"model": model, "optimizer": optimizer}
    step = checkpoint.load(state) or 0
    sampler.seek(step * BATCH)
    batches = iter(DataLoader(data, batch_size=MICRO_BATCH, sampler=sampler))
    context.stop_signal.defer()  # from here on a request to stop waits for the end of a step
    while step < STEPS and not context.agreed_stop:
        losses = torch.zeros(BATCH // MICRO_BATCH)  # zero for other workers' micro-batches
        strategy.start_step()
        for number in strategy.my_micro_batches:
            images, directions = (tensor.to(context.device) for tensor in next(batches))
            with strategy.micro_batch(number):
                loss = F.cross_entropy(strategy.forward(images), directions)
                (loss * strategy.loss_factor).backward()
            losses[number] = loss.detach()
        strategy.finish_step()
        for name, gradient in strategy.gradients().items():
            weights[name].grad = gradient
        optimizer.step()
        strategy.finish_update()
        step += 1
        losses_of_all, _ = context.reduce_step_status(losses)()  # sends, then waits; agrees on stops
        if context.rank == 0 and step % 50 == 0:
            print(f"step {step}  loss {sum(losses_of_all) / len(losses_of_all):.4f}", flush=True)
        if step % SAVE_EVERY == 0 or step == STEPS or context.agreed_stop:
            checkpoint.save(step, state)
    checkpoint.wait()
    if context.rank == 0 and step == STEPS:
        content = b"".join(weight.cpu().numpy().tobytes() for weight in weights.values())
        print("weights", hashlib.sha256(content).hexdigest())
    return context.agreed_stop


if __name__ == "__main__":
    with Worker() as worker:  # exits at once if another worker is killed; torchrun restarts all
        worker.stopped_by = train(worker.connect())
