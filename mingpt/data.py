"""Text to tokens to windows.

The text (a path or any fsspec URL, UTF-8) is read once, by one worker, and handed to the others. It is split first:
the tail is the validation part, and no character of it is ever trained on. Each part is encoded once, one token per
character, into one array of the smallest integer type. A window is `block_size + 1` neighbouring tokens: an input and,
one to the right, its targets. A batch of windows is one gather from the array. Which window is read when is the
sampler's business.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mingpt.config import DataConfig, UserError

AHEAD = 64  # batches


def batched(items: Iterable[int], size: int) -> Iterator[list[int]]:
    """Runs of `size` items, the last one perhaps shorter."""
    left = iter(items)
    while chunk := list(itertools.islice(left, size)):
        yield chunk


class Vocabulary:
    """The distinct characters of a text, in code-point order; a token is a character's place among them."""

    def __init__(self, characters: str) -> None:
        if list(characters) != sorted(set(characters)):
            raise ValueError("the characters of a vocabulary must be distinct and in code-point order")
        self.characters = characters
        self._codes = np.array([ord(character) for character in characters], dtype=np.uint32)

    @classmethod
    def of(cls, text: str) -> "Vocabulary":
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """(len(text),) tokens of the smallest unsigned type. Raises UserError naming the first character it lacks."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        smallest = np.min_scalar_type(len(self) - 1)
        table = np.zeros(int(max(codes.max(initial=0), self._codes[-1])) + 1, dtype=smallest)
        table[self._codes] = np.arange(len(self), dtype=smallest)
        tokens = table[codes]
        if len(wrong := np.flatnonzero(self._codes[tokens] != codes)):
            raise UserError(
                f"the character {text[wrong[0]]!r} (U+{ord(text[wrong[0]]):04X}) is not in the vocabulary of the {len(self)} characters trained on"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in tokens)


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a token array, by the position they start at.

    `dataset[start]` is (inputs, targets), each (block_size,) int64; `__getitems__` gathers a batch at once.
    """

    def __init__(self, tokens: np.ndarray, block_size: int) -> None:
        self.tokens = torch.from_numpy(tokens)
        self.block_size = block_size
        self._window = torch.arange(block_size + 1)

    def __len__(self) -> int:
        return len(self.tokens) - self.block_size

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([start])
        return inputs[0], targets[0]

    def __getitems__(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (len(starts), block_size) int64."""
        windows = self.tokens[torch.as_tensor(starts).unsqueeze(1) + self._window].long()  # (B, T + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def batches(self, starts: Iterable[int], batch_size: int, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, ...]]:
        """The windows that begin at `starts`, in batches: inputs and targets here, then the same on the device.

        Many are gathered, and go to the device, at once, so that a batch costs next to nothing.
        """
        for chunk in batched(starts, AHEAD * batch_size):
            here = self.__getitems__(chunk)
            there = [part.to(device) for part in here]
            yield from zip(*(part.split(batch_size) for part in (*here, *there)), strict=True)

    def in_order(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every token but the first as a target exactly once, in windows end to end, (<= batch_size, <= block_size) each.

        The last window may be shorter than the others and is then a batch of its own.
        """
        scored = len(self.tokens) - 1
        whole = scored // self.block_size
        starts = torch.arange(whole) * self.block_size
        for batch in starts.split(batch_size) if whole else ():
            yield self.__getitems__(batch)  # type: ignore[arg-type]
        if scored % self.block_size:
            rest = self.tokens[whole * self.block_size :].long().unsqueeze(0)
            yield rest[:, :-1], rest[:, 1:]


@dataclass(frozen=True)
class Corpus:
    """A text, split and encoded. `fingerprint` is the SHA-256 of its bytes in hex."""

    train: CharDataset
    val: CharDataset
    vocabulary: Vocabulary
    fingerprint: str
    val_bytes: int  # UTF-8 length of the scored validation characters
    entropy_floor: float | None  # nats per character of the validation part, where they are known


def read_bytes(config: DataConfig) -> bytes:
    """The text's bytes, through the cache if `path` is remote. Raises UserError where they cannot be had or have another sha256."""
    remote = "://" in config.path and not config.path.startswith(("file://", "local://", "memory://"))
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mingpt"
    name = hashlib.sha256(config.path.encode(errors="surrogateescape")).hexdigest()[:16] + "-" + config.path.rsplit("/", 1)[-1][:80]
    cached = folder / name
    content = cached.read_bytes() if remote and cached.is_file() else None
    if content is not None and not expected(content, config):
        content = None  # the cache is stale or torn: fetch again
    if content is None:
        content = fetch(config.path)
        if not expected(content, config):
            raise UserError(f"data.path {config.path} has sha256 {hashlib.sha256(content).hexdigest()}, and data.sha256 asks for {config.sha256}")
        if remote:
            folder.mkdir(parents=True, exist_ok=True)
            partial = cached.with_name(f"{cached.name}.{os.getpid()}")
            partial.write_bytes(content)
            partial.replace(cached)
    return content


def expected(content: bytes, config: DataConfig) -> bool:
    return config.sha256 is None or hashlib.sha256(content).hexdigest() == config.sha256.lower()


def fetch(path: str) -> bytes:
    """The bytes at a path or URL. Raises UserError, naming the package if its driver is not installed."""
    try:
        with fsspec.open(path, "rb") as file:
            return bytes(file.read())
    except ImportError as error:
        raise UserError(f"data.path {path} needs a driver that is not installed: {error}") from None
    except FileNotFoundError:
        raise UserError(f"data.path {path} does not exist (relative paths start at {Path.cwd()})") from None
    except Exception as error:  # each driver raises exceptions of its own
        raise UserError(f"data.path {path} cannot be read: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None


def entropy_floor(config: DataConfig, fingerprint: str) -> float | None:
    """Nats per character from the .json beside the text, if that file speaks of this text and this split."""
    beside = Path(config.path.removeprefix("file://")).with_suffix(".json")
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
        matches = about["sha256"] == fingerprint and about["val_fraction"] == config.val_fraction
        return float(about["val_nats_per_character"]) if matches else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no such file, or somebody else's


def prepare(content: bytes, config: DataConfig) -> Corpus:
    """Split and encode. Raises UserError for a text that is empty, too short for the split, or not UTF-8."""
    if not content:
        raise UserError(f"data.path {config.path} is empty")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path {config.path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start:,}") from None
    n_train = int(len(text) * (1 - config.val_fraction))
    for part, length in (("training", n_train), ("validation", len(text) - n_train)):
        if length < config.block_size + 1:
            raise UserError(
                f"the {part} part of {config.path} has {length:,} characters, fewer than one window of data.block_size + 1 = "
                f"{config.block_size + 1}: use a longer text, a smaller data.block_size or another data.val_fraction"
            )
    vocabulary = Vocabulary.of(text)
    tokens, fingerprint = vocabulary.encode(text), hashlib.sha256(content).hexdigest()
    return Corpus(
        CharDataset(tokens[:n_train], config.block_size),
        CharDataset(tokens[n_train:], config.block_size),
        vocabulary,
        fingerprint,
        len(text[n_train + 1 :].encode()),
        entropy_floor(config, fingerprint),
    )
