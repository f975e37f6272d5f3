"""Turn a text or token shards into tokens and windows, and choose the windows that each worker reads.

The data are split first, and the model never trains on the validation part; only a tokenizer may be made from
all of a text. A window is `block_size + 1` neighbouring tokens: an input, and its targets one token to the
right. The order of windows is a seeded permutation per epoch, cut into micro-batches.
"""

import codecs
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from mingpt.base.errors import UserError
from mingpt.base.files import decode_text, read_json
from mingpt.config import DataConfig
from mingpt.data.shards import ShardData, TokenShards, is_shards, open_shards
from mingpt.data.source import hint_to_prepare, read_bytes
from mingpt.data.tokenizers import TOKENIZERS, CharTokenizer, Tokenizer, bytes_of_token

PREFETCH_BATCHES = 64  # gathered, and moved to the device, together
PREFETCH_FROM_DISK = 128  # windows of token shards that are read ahead
FEISTEL_ROUNDS = 6
PREFETCH_STEPS = 32  # permuted at once: a thousand windows cost about as much as ten
MIX_1, MIX_2, GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
MASK_64 = 0xFFFFFFFFFFFFFFFF
GPT2_VOCABULARY = 50257  # tokens; for shards without a tokenizer


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a token array or of token shards, by the position of their first token.

    `dataset[start]` is (inputs, targets), each (block_size,) int64; `__getitems__` gathers a batch at once.
    Reading a token of shards that is `vocab_size` or more raises UserError; an array is not checked.
    """

    def __init__(
        self, tokens: np.ndarray | TokenShards, block_size: int, vocab_size: int | None = None
    ) -> None:
        self.tokens = torch.from_numpy(tokens) if isinstance(tokens, np.ndarray) else tokens
        self.block_size, self.vocab_size = block_size, vocab_size

    def __len__(self) -> int:
        return len(self.tokens) - self.block_size

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([start])
        return inputs[0], targets[0]

    def __getitems__(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the windows at `starts`, each (len(starts), block_size) int64."""
        windows = self.read(starts, self.block_size + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def read(self, starts: Sequence[int], length: int) -> Tensor:
        """Return the `length` tokens from each of `starts` on, (len(starts), length) int64.

        Raises IndexError past the end; with shards also UserError for a token outside of the vocabulary or a
        file that is gone or has changed, and ExpectedError if reading fails otherwise.
        """
        if isinstance(self.tokens, Tensor):
            return self.tokens[torch.as_tensor(starts).unsqueeze(1) + torch.arange(length)].long()
        windows = torch.from_numpy(self.tokens.read(starts, length))
        if self.vocab_size is not None and int(windows.max()) >= self.vocab_size:
            row, column = (windows >= self.vocab_size).nonzero()[0].tolist()
            raise UserError(
                f"{self.tokens.where(starts[row] + column)} is {int(windows[row, column])}, and the "
                f"vocabulary has {self.vocab_size} tokens: set data.vocab_size, or data.tokenizer, to "
                "what the shards were made with"
            )
        return windows

    def batches(
        self, starts: Iterable[int], batch_size: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the windows that begin at `starts` in batches: (inputs, targets, then both on `device`).

        `starts`, which may be endless, is read ahead; the last batch may be smaller. With shards, an error of
        `read` for a batch is raised only after the batches before it are yielded.
        """
        remaining = iter(starts)
        if isinstance(self.tokens, Tensor):
            while chunk := list(itertools.islice(remaining, PREFETCH_BATCHES * batch_size)):
                yield from self.split(self.__getitems__(chunk), batch_size, device)
            return
        reading = deque[Future[tuple[Tensor, Tensor]]]()
        with ThreadPoolExecutor(1) as thread:  # the next batches are read while these are used
            while batch := list(itertools.islice(remaining, batch_size)):
                reading.append(thread.submit(self.__getitems__, batch))
                if len(reading) > max(1, PREFETCH_FROM_DISK // batch_size):
                    yield from self.split(reading.popleft().result(), batch_size, device)
            for windows in reading:
                yield from self.split(windows.result(), batch_size, device)

    def split(
        self, on_cpu: tuple[Tensor, Tensor], batch_size: int, device: torch.device | str
    ) -> Iterator[tuple[Tensor, ...]]:
        """Split `on_cpu`, the (inputs, targets) of many windows, and yield batches as `batches` does."""
        on_device = to_device(on_cpu, device)
        yield from zip(*(part.split(batch_size) for part in (*on_cpu, *on_device)), strict=True)

    def eval_batches(self, batch_size: int, max_windows: int | None = None) -> "EvalBatches":
        """Return batches of all windows end to end, or of `max_windows`, evenly spaced, if that is fewer."""
        return EvalBatches(self, batch_size, max_windows)


def to_device(batch: tuple[Tensor, Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Return inputs and targets, which have one shape, on `device`; does not wait for a GPU."""
    if torch.device(device).type != "cuda":
        return tuple(part.to(device) for part in batch)
    # The allocator of pinned memory gives the pages to nobody else until the copy has ended.
    return torch.stack(batch).pin_memory().to(device, non_blocking=True).unbind()


class EvalBatches(Sequence[tuple[Tensor, Tensor]]):
    """Batches of inputs and targets, each (<= batch_size, block_size) int64, read on access.

    The windows lie end to end: every token but the first is a target exactly once, and a last window of fewer
    than `block_size` targets is a batch of its own. If `max_windows` is less than the number of these
    windows, the batches have `max_windows` evenly spaced whole windows instead.
    """

    def __init__(self, dataset: CharDataset, batch_size: int, max_windows: int | None) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.whole, rest = divmod(len(dataset.tokens) - 1, dataset.block_size)
        is_subset = max_windows is not None and max_windows < self.whole + (rest > 0)
        self.windows = max_windows if max_windows is not None and is_subset else self.whole
        self.has_last = rest > 0 and not is_subset

    def __len__(self) -> int:
        return math.ceil(self.windows / self.batch_size) + self.has_last

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        block_size = self.dataset.block_size
        first = number * self.batch_size
        if first >= self.windows:
            start = self.whole * block_size
            last = self.dataset.read([start], len(self.dataset.tokens) - start)
            return last[:, :-1], last[:, 1:]
        numbers = range(first, min(first + self.batch_size, self.windows))
        return self.dataset.__getitems__([one * self.whole // self.windows * block_size for one in numbers])


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of `numbers` and their order (SplitMix64's finalizer, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + GOLDEN) & MASK_64
        state = ((state ^ (state >> 30)) * MIX_1) & MASK_64
        state = ((state ^ (state >> 27)) * MIX_2) & MASK_64
        state ^= state >> 31
    return state


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the images of `indices` under a permutation of range(size) that `key` chooses, (N,) uint64.

    Memory does not grow with `size`: the permutation is a balanced Feistel network over the next power of
    four, repeated until the result is in range (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"). numpy and torch promise no stable permutations across versions, so this program has its own.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, number)) for number in range(FEISTEL_ROUNDS)]
    outside = np.ones(len(indices), dtype=bool)
    indices = indices.astype(np.uint64)
    while outside.any():
        left, right = indices[outside] >> half, indices[outside] & mask
        for round_key in keys:
            mixed = (right + round_key) * np.uint64(MIX_1)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(MIX_2)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        indices[outside] = (left << half) | right
        outside = indices >= size
    return indices


class ElasticSampler(DistributedSampler[int]):
    """Assign the windows of a shuffled epoch to any number of workers.

    The order depends on the data, `seed` and the epoch alone: if another number of workers goes on, each
    window of the epoch is still read exactly once. The only state is the integer `windows_seen`, the number
    of windows that all workers together read before iteration begins. `seek` sets it, iterating does not.

    An epoch's windows lie end to end from a random offset, and are read in a random order. A step takes the
    next `batch_size` windows, across the end of an epoch, too, in micro-batches of `micro_batch_size`.
    Iterating yields the start of each of this worker's windows, from `windows_seen` on, without end; nothing
    for a worker without micro-batches.
    """

    def __init__(
        self,
        dataset: CharDataset,
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        num_replicas: int = 1,
        rank: int = 0,
        takes_turns: bool = False,
    ) -> None:
        super().__init__(
            dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=False
        )
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.takes_turns = takes_turns
        self.block_size = dataset.block_size
        self.windows_per_epoch = (len(dataset.tokens) - 1) // dataset.block_size
        self.offsets = (len(dataset.tokens) - 1) % dataset.block_size + 1
        self.windows_seen = 0

    def seek(self, windows_seen: int) -> None:
        """Let iteration begin after the first `windows_seen` windows of the run, in constant time."""
        self.windows_seen = windows_seen

    def micro_batches_by_rank(self) -> list[range]:
        """Return the micro-batches that each rank reads, out of the m micro-batches of a step.

        Rank r of n reads range(r * m // n, (r + 1) * m // n): contiguous shares whose sizes differ by one at
        most; with `takes_turns` it reads r, r + n, r + 2 n, ... If n > m, n - m ranks read none.
        """
        count, workers = self.batch_size // self.micro_batch_size, self.num_replicas
        if self.takes_turns:
            return [range(rank, count, workers) for rank in range(workers)]
        return [range(rank * count // workers, (rank + 1) * count // workers) for rank in range(workers)]

    def my_micro_batches(self) -> range:
        return self.micro_batches_by_rank()[self.rank]

    def window_starts(self, first: int, count: int) -> np.ndarray:
        """Return the positions where `count` windows of the run begin, from number `first` on, (count,)."""
        starts = []
        while count:
            epoch, place = divmod(first, self.windows_per_epoch)
            here = min(count, self.windows_per_epoch - place)
            places = np.arange(place, place + here, dtype=np.uint64)
            order = permute(places, self.windows_per_epoch, mix(self.seed, epoch, 0))
            offset = mix(self.seed, epoch, 1) % self.offsets
            starts.append(order.astype(np.int64) * self.block_size + offset)
            first, count = first + here, count - here
        return np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[int]:
        next_window, micro_batches = self.windows_seen, self.my_micro_batches()
        size = self.micro_batch_size
        columns = np.add.outer(np.array(micro_batches, dtype=np.int64) * size, np.arange(size)).ravel()
        while micro_batches:
            starts = self.window_starts(next_window, PREFETCH_STEPS * self.batch_size)
            yield from starts.reshape(PREFETCH_STEPS, self.batch_size)[:, columns].ravel().tolist()
            next_window += starts.size

    def __len__(self) -> int:
        """The number of windows in an epoch, of all workers together."""
        return self.windows_per_epoch


@dataclass(frozen=True)
class Corpus:
    """The data of a run: windows for training and evaluation, and their tokenizer."""

    train: CharDataset
    val: CharDataset
    tokenizer: Tokenizer | None
    vocab_size: int  # rows of the embedding; at least the tokenizer's size
    fingerprint: str  # of the data, 64 hexadecimal digits
    files: Mapping[str, str] = field(default_factory=dict)  # {shard's name: fingerprint}; empty for a text
    val_bytes: int | None = None  # of the validation text in UTF-8, after its first token; None: unknown
    entropy_floor: float | None = None  # nats per token of the validation part, if known


class TextData:
    """A text, not yet split. Raises UserError if it is empty, not UTF-8, or named *.jsonl or *.ndjson."""

    def __init__(self, content: bytes, config: DataConfig) -> None:
        if config.path.endswith((".jsonl", ".ndjson")):
            raise UserError(f"data.path {config.path} is no text{hint_to_prepare(config.path)}")
        try:
            self.text = decode_text(content)
        except ValueError as error:
            raise UserError(f"data.path {config.path} is {error}{hint_to_prepare(config.path)}") from None
        if not self.text:
            raise UserError(f"data.path {config.path} is empty")
        self.files: Mapping[str, str] = {}
        # Without a byte order mark, so that a run that has trained on one does not go on with other windows.
        self.fingerprint = hashlib.sha256(content.removeprefix(codecs.BOM_UTF8)).hexdigest()


Data = TextData | ShardData


def open_data(config: DataConfig) -> Data:
    """Read the text, or open the token shards, of data.path on this machine. Raises UserError if unusable."""
    if is_shards(config.path):
        return open_shards(config.path, config.val_fraction)
    return TextData(read_bytes(config), config)


def make_corpus(content: bytes, config: DataConfig) -> Corpus:
    """Return the Corpus of a text, `content`, encoded by the tokenizer that `train_tokenizer` makes of it.

    Raises UserError for an unusable text, KeyError if data.tokenizer is neither auto nor in TOKENIZERS.
    """
    data = TextData(content, config)
    return tokenize(data, config, train_tokenizer(data, config))


def tokenize(data: Data, config: DataConfig, tokenizer: Tokenizer | None, rows: int | None = None) -> Corpus:
    """Return the Corpus of `data`. `tokenizer`, which a text needs, encodes it; shards are tokens already.

    The last `data.val_fraction` of a text is for validation. `rows`, the number of embedding rows of a model
    to continue, becomes `vocab_size` without a comparison with the tokenizer. Raises UserError if the
    training or validation part is shorter than a window, if the tokenizer cannot encode the text or, without
    `rows`, if it has more tokens than data.vocab_size.
    """
    meta = data.meta if isinstance(data, ShardData) else None
    vocab_size = rows or vocabulary_size(config, tokenizer, meta)
    if isinstance(data, ShardData):
        val_bytes = meta["val_bytes"] if meta else None
        known = vocab_size if tokenizer is None else len(tokenizer)
        parts = [CharDataset(part, config.block_size, known) for part in (data.train, data.val)]
    else:
        assert tokenizer is not None, "a text needs a tokenizer"
        n_train = int(len(data.text) * (1 - config.val_fraction))
        val_text = data.text[n_train:]
        tokens = [tokenizer.encode(text) for text in (data.text[:n_train], val_text)]
        val_bytes = len(val_text.encode()) - sum(bytes_of_token(tokenizer, int(one)) for one in tokens[1][:1])
        if tokenizer.loses(val_text):
            val_bytes = None
        parts = [CharDataset(part, config.block_size) for part in tokens]
    for part, dataset in zip(("training", "validation"), parts, strict=True):
        if len(dataset.tokens) < config.block_size + 1:
            raise UserError(
                f"the {part} part of {config.path} has {len(dataset.tokens):,} tokens, fewer than one window "
                f"of data.block_size + 1 = {config.block_size + 1}: use a longer text, a smaller "
                "data.block_size or another data.val_fraction"
            )
    floor = entropy_floor(config, data.fingerprint) if isinstance(tokenizer, CharTokenizer) else None
    train, val = parts
    return Corpus(train, val, tokenizer, vocab_size, data.fingerprint, data.files, val_bytes, floor)


def train_tokenizer(data: TextData, config: DataConfig) -> Tokenizer:
    """Make a tokenizer of a text, of the kind that data.tokenizer names; auto means char.

    Raises KeyError if TOKENIZERS lacks the kind, UserError if tokenizers of this kind are not made of a text.
    """
    return TOKENIZERS["char" if config.tokenizer == "auto" else config.tokenizer].train(data.text)


def vocabulary_size(config: DataConfig, tokenizer: Tokenizer | None, meta: dict[str, Any] | None) -> int:
    """Return the number of rows of a new model's embedding: data.vocab_size, else the tokenizer's size.

    Without both, it is the size in `meta`, the content of the shards' meta.json, else GPT-2's. Raises
    UserError if data.vocab_size is less than the tokenizer's size.
    """
    size = meta["tokenizer"]["vocab_size"] if meta else GPT2_VOCABULARY
    size = size if tokenizer is None else len(tokenizer)
    if tokenizer is not None and config.vocab_size is not None and config.vocab_size < size:
        raise UserError(f"data.vocab_size is {config.vocab_size}, and the tokenizer has {size} tokens")
    return config.vocab_size or size


def entropy_floor(config: DataConfig, fingerprint: str) -> float | None:
    """Return the nats per character that a .json beside the text gives for this text and split, else None."""
    beside = Path(config.resolved_path.removeprefix("file://")).with_suffix(".json")
    try:
        about = read_json(beside)
        matches = about["sha256"] == fingerprint and about["val_fraction"] == config.val_fraction
        return float(about["val_nats_per_character"]) if matches else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is no such file, or it has another purpose
