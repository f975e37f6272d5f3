"""The job that is planned: a configuration and the sizes that follow from it. No tensor is allocated.

Of token shards only headers and a few KiB are read; a text is read and encoded. A tokenizer that
data.tokenizer names is read, too, or downloaded.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from mingpt.base.errors import UserError
from mingpt.config import Config
from mingpt.data import TOKENIZERS, Tokenizer, load_named_tokenizer
from mingpt.data.windows import Data, TextData, open_data, tokenize, train_tokenizer
from mingpt.model import parameter_shapes
from mingpt.optim import state_shapes
from mingpt.parallel.ddp import fits_one_bucket
from mingpt.parallel.tree import cover
from mingpt.training.run_data import find_tokenizer_file

FLOAT_BYTES = 4
BFLOAT_BYTES = 2


@dataclass(frozen=True)
class Workload:
    """A job that is planned, on `workers` workers. Sizes count elements, unless a name says bytes."""

    config: Config
    vocab_size: int
    workers: int
    on_cpu: bool
    dtype: str  # of matrix products, a value of trainer.dtype, not auto
    train_tokens: int | None = None  # None if the data is not known

    def with_trainer(self, **settings: Any) -> "Workload":
        """Return the same job with other settings of the trainer section."""
        trainer = dataclasses.replace(self.config.trainer, **settings)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, trainer=trainer))

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        config = self.config
        return parameter_shapes(config.model, vocab_size=self.vocab_size, block_size=config.data.block_size)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @functools.cached_property
    def block_parameters(self) -> int:
        """The number of parameters of one block."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name.startswith("h.0."))

    @property
    def root_parameters(self) -> int:
        """The number of parameters outside of the blocks; all if fsdp gathers the model as one bucket."""
        if self.config.trainer.parallel == "fsdp" and fits_one_bucket(FLOAT_BYTES * self.parameters):
            return self.parameters
        return self.parameters - self.config.model.n_layer * self.block_parameters

    @functools.cached_property
    def matrices(self) -> int:
        """The number of weights that take part in matrix products, the head's included."""
        embedding = {"wte.weight", "wpe.weight"} if "lm_head.weight" in self.shapes else {"wpe.weight"}
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if len(shape) == 2 and name not in embedding
        )

    @functools.cached_property
    def optimizer_shapes(self) -> dict[str, tuple[int, ...]]:
        return state_shapes(self.shapes, self.config.optimizer)

    @functools.cached_property
    def optimizer_elements(self) -> int:
        return sum(map(math.prod, self.optimizer_shapes.values()))

    @functools.cached_property
    def muon_elements(self) -> int:
        """The number of elements of the matrices that Muon updates."""
        states = self.optimizer_shapes.items()
        return sum(math.prod(shape) for name, shape in states if name.endswith("momentum_buffer"))

    @property
    def state_bytes(self) -> int:
        """The bytes of weights and optimizer state, which a snapshot holds."""
        return FLOAT_BYTES * (self.parameters + self.optimizer_elements)

    @property
    def element_bytes(self) -> int:
        """The bytes of one number in a matrix product: 2 in bfloat16 and float16, 4 in float32."""
        return FLOAT_BYTES if self.dtype == "float32" else BFLOAT_BYTES

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.config.trainer.micro_batch_size * self.config.data.block_size

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step, over all workers."""
        return self.config.trainer.batch_size // self.config.trainer.micro_batch_size

    @property
    def rounds(self) -> int:
        """The number of micro-batches of the worker that has most."""
        return -(-self.micro_batches // self.workers)

    def neighbours(self, rank: int) -> range:
        """Return the numbers of a rank's micro-batches under ddp, which are consecutive; perhaps none."""
        count = self.micro_batches
        return range(rank * count // self.workers, (rank + 1) * count // self.workers)

    def parts_sent(self) -> int:
        """Return the most partial sums, each of a gradient's size, that a rank sends in a step under ddp."""
        return max(len(cover(self.neighbours(rank), self.micro_batches)) for rank in range(self.workers))

    def partial_sums(self) -> int:
        """Return the most partial sums that a rank keeps beside the gradient that it computes; 0 for fast."""
        count = self.micro_batches
        if self.config.trainer.reduction == "fast":
            return 0
        if self.config.trainer.parallel == "fsdp":  # the sums of all micro-batches of earlier rounds
            return max(start.bit_count() for start in range(0, count, self.workers))
        shares = [self.neighbours(rank) for rank in range(self.workers)]
        return max(len(cover(range(share.start, number), count)) for share in shares for number in share)


def measure_data(config: Config) -> tuple[int, int | None]:
    """Return (vocabulary size, training tokens), or (data.vocab_size, None) if data cannot be used.

    Reads headers and sizes of shards, or reads and encodes a text. Raises UserError for data that cannot be
    used unless data.vocab_size is set.
    """
    given = config.data.vocab_size
    try:
        data = open_data(config.data)
        corpus = tokenize(data, config.data, find_tokenizer(config, data))
        return corpus.vocab_size, len(corpus.train.tokens)
    except UserError as error:
        if given is not None:
            return given, None
        raise UserError(f"{error}; data.vocab_size=N plans without the data") from None


def find_tokenizer(config: Config, data: Data) -> Tokenizer | None:
    """Return the tokenizer that training would use, if need be made of the text; None if shards have none.

    Raises UserError if it cannot be read, or if it follows from snapshot.init_from, which is not read here.
    """
    name, beside = config.data.tokenizer, None
    if name == "auto":
        if config.snapshot.init_from and config.data.vocab_size is None:
            raise UserError(
                "with snapshot.init_from the vocabulary is that of these weights, which a plan does not read"
            )
        beside = find_tokenizer_file(config.data, data)
    if beside or name not in ("auto", *TOKENIZERS):
        return load_named_tokenizer(str(beside or name))
    return train_tokenizer(data, config.data) if isinstance(data, TextData) else None
