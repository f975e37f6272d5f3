"""What is planned: a configuration with the sizes that follow from it, without allocating a tensor."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from mingpt.config import Config
from mingpt.model import flops_per_token, parameter_shapes
from mingpt.optim import state_shapes
from mingpt.parallel import split_rows
from mingpt.parallel.tree import PartialSums, cover, push

FLOAT_BYTES = 4
BFLOAT_BYTES = 2


@dataclass(frozen=True)
class Workload:
    """A job of `workers` workers. Sizes in elements, unless a name says bytes."""

    config: Config
    vocab_size: int
    workers: int
    on_cpu: bool
    dtype: str  # of the products: "float32" or "bfloat16"
    train_tokens: int | None = None  # None where the data is not known

    def with_trainer(self, **settings: Any) -> "Workload":
        """The same job with other settings of the trainer section."""
        trainer = dataclasses.replace(self.config.trainer, **settings)
        return self.with_config(dataclasses.replace(self.config, trainer=trainer))

    def with_config(self, config: Config) -> "Workload":
        return dataclasses.replace(self, config=config)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, by name."""
        config = self.config
        return parameter_shapes(config.model, vocab_size=self.vocab_size, block_size=config.data.block_size)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @functools.cached_property
    def block_parameters(self) -> int:
        """Of one block."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name.startswith("h.0."))

    @property
    def root_parameters(self) -> int:
        """In no block: embeddings, last norm, head."""
        return self.parameters - self.config.model.n_layer * self.block_parameters

    @functools.cached_property
    def matrices(self) -> int:
        """Elements of the weights that take part in products, the head among them."""
        embedding = {"wte.weight", "wpe.weight"} if "lm_head.weight" in self.shapes else {"wpe.weight"}
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if len(shape) == 2 and name not in embedding
        )

    @functools.cached_property
    def muon_elements(self) -> int:
        """Of the matrices that Muon updates."""
        states = state_shapes(self.shapes, self.config.optimizer)
        return sum(math.prod(shape) for name, shape in states.items() if name.endswith("momentum_buffer"))

    @functools.cached_property
    def optimizer_elements(self) -> int:
        return sum(map(math.prod, state_shapes(self.shapes, self.config.optimizer).values()))

    @property
    def state_bytes(self) -> int:
        """Weights and optimizer, which is also what a snapshot holds."""
        return FLOAT_BYTES * (self.parameters + self.optimizer_elements)

    @functools.cached_property
    def first_share(self) -> float:
        """The part of the parameters that the first rank holds where they are sharded: the largest one."""
        held = sum(
            len(split_rows(shape[0], self.workers)[0]) * math.prod(shape[1:])
            for shape in self.shapes.values()
        )
        return held / self.parameters

    @property
    def element_bytes(self) -> int:
        """Of an activation in the type of the products."""
        return BFLOAT_BYTES if self.dtype == "bfloat16" else FLOAT_BYTES

    @property
    def micro_batches(self) -> int:
        """Of a step, of all workers."""
        return self.config.trainer.batch_size // self.config.trainer.micro_batch_size

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.config.trainer.micro_batch_size * self.config.data.block_size

    @property
    def tokens_per_step(self) -> int:
        return self.config.trainer.batch_size * self.config.data.block_size

    @property
    def rounds(self) -> int:
        """Micro-batches of the worker that has most."""
        return -(-self.micro_batches // self.workers)

    def neighbours(self, rank: int) -> range:
        """The micro-batches of a rank where each has neighbouring ones: under ddp."""
        count = self.micro_batches
        return range(rank * count // self.workers, (rank + 1) * count // self.workers)

    def parts_sent(self) -> int:
        """The most partial sums of a gradient that one rank sends to the others: under ddp."""
        count = self.micro_batches
        return max(len(cover(self.neighbours(rank), count)) for rank in range(self.workers))

    def partial_sums(self) -> int:
        """The most partial sums of a gradient that a rank keeps before its last micro-batch."""
        count = self.micro_batches
        if self.config.trainer.reduction == "fast":
            return 0
        if self.config.trainer.parallel == "fsdp":  # of all micro-batches before a round
            return max(start.bit_count() for start in range(0, count, self.workers))
        most = 0
        stack: PartialSums[None] = []
        for number in max((self.neighbours(rank) for rank in range(self.workers)), key=len):
            most = max(most, len(stack))
            push(stack, 0, number, None, count, lambda *_: None)
        return most

    @property
    def flops_per_step(self) -> float:
        """Of forward and backward passes (Chowdhery et al. 2022, appendix B), as the metric mfu counts them.

        What `recompute` computes twice is not counted.
        """
        config = self.config
        per_token = flops_per_token(
            config.model, vocab_size=self.vocab_size, block_size=config.data.block_size
        )
        return per_token * self.tokens_per_step
