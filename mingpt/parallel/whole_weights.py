"""Every rank holds all weights; with `shard_optimizer` each updates its rows, then all gather them."""

import torch
from torch import Tensor

from mingpt.distributed.shared_memory import SharedMemory
from mingpt.parallel.buckets import allocate, make_buckets
from mingpt.parallel.shards import numel_by_rank
from mingpt.parallel.strategy import Strategy, StrategySetup


class WholeWeights(Strategy):
    """What DDPReduction and ExactReduction share."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        allocate(setup.model, self.context.device)
        self.weights = dict(setup.model.named_parameters())
        self.names, self.parameters = list(self.weights), list(self.weights.values())
        self.updates_are_sharded = setup.shard_optimizer and self.world_size > 1
        self.buckets = make_buckets(self.parameters)
        self.memory: SharedMemory | None = None  # of all ranks, where a strategy has it and they can

    def held_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.weights.items()}

    def pieces(self) -> dict[str, Tensor]:
        return self.own_rows(self.held_weights())

    def own_rows(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of whole tensors, the rows that this rank updates."""
        if not self.updates_are_sharded:
            return tensors
        return {name: tensor[self.my_rows(name)] for name, tensor in tensors.items()}

    def gradients(self) -> dict[str, Tensor]:
        whole = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        assert whole.keys() == self.weights.keys(), "every parameter takes part in every micro-batch"
        return self.own_rows(whole)

    def finish_update(self) -> None:
        for weight in self.parameters:
            weight.grad = None
        if self.updates_are_sharded:
            for bucket in self.buckets:
                self.gather_weights([self.names[number] for number in bucket])

    @torch.no_grad()
    def gather_weights(self, names: list[str]) -> None:
        """Give all ranks the rows of these parameters that each has updated."""
        counts = [numel_by_rank(self.shapes[name], self.world_size) for name in names]
        sizes = [sum(count[rank] for count in counts) for rank in range(self.world_size)]
        pieces = [self.weights[name][self.my_rows(name)].flatten() for name in names]
        if self.memory is not None:
            self.memory.begin(max(sizes) * pieces[0].element_size())
            torch.cat(pieces, out=self.memory.of(self.rank, pieces[0].dtype, 0, sizes[self.rank]))
            self.memory.barrier()
            gathered = [self.memory.of(rank, pieces[0].dtype, 0, size) for rank, size in enumerate(sizes)]
        else:
            padding = pieces[0].new_zeros(max(sizes) - sizes[self.rank])
            gathered = list(self.context.all_gather(torch.cat([*pieces, padding])))
        for rank, row in enumerate(gathered):
            parts = row[: sizes[rank]].split([count[rank] for count in counts])
            for name, count, part in zip(names, counts, parts, strict=True):
                if rank != self.rank:
                    first = sum(count[:rank])
                    self.weights[name].view(-1)[first : first + len(part)] = part
        if self.memory is not None:
            self.memory.end()
