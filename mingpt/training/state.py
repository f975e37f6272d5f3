"""The state of a run between two steps, in training and in a snapshot: model, optimizer and counters.

The names, shapes and types of a snapshot's tensors are checked before any tensor is read. If a state is
sharded, each rank holds its part: some rows of each tensor. A stored state is broadcast in pieces by the
ranks that can read it, so that no rank needs memory for a second whole state.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.base.files import PIECE_BYTES
from mingpt.base.rows import RowMap, Shape, split_rows
from mingpt.data import Tokenizer, kind_of, load_tokenizer
from mingpt.distributed import DistributedContext
from mingpt.model import GPT, parameter_shapes
from mingpt.optim import Optimizer, state_shapes
from mingpt.parallel import Strategy
from mingpt.snapshot import Entries, Snapshot, read_config

TOKENIZER_TENSOR = "tokenizer"  # the bytes of a tokenizer.json
GROWTH_STEPS = 2000  # steps in a row without overflow after which the loss scale doubles
# A gradient of zeros never overflows: without a limit its scale would leave float32.
MAX_LOSS_SCALE = 2.0**100


def check_model(manifest: dict[str, Any], entries: Entries) -> None:
    """Raise CorruptSnapshot unless a snapshot has a whole state, with exactly its run's tensors.

    These are the parameters and the optimizer's state in float32 and, if the tokenizer is a tokenizer.json,
    its bytes. Otherwise raises as `check_shard` does. Reads no tensor.
    """
    if manifest.get("shard"):
        raise CorruptSnapshot("it is a part of a sharded state")
    check_shard(manifest, entries)


def check_shard(manifest: dict[str, Any], entries: Entries) -> None:
    """Raise CorruptSnapshot unless a snapshot, or one rank's part of a state, has exactly its run's tensors.

    A part must have the rank's rows of each sharded tensor, and either all tensors that are not sharded or
    none. A tokenizer in the manifest must be intact; the bytes of one that is kept as a tensor are not read.
    """
    config = read_config(manifest)
    if config.model.n_layer > len(entries):
        raise CorruptSnapshot(f"its {len(entries)} tensors cannot have config.model.n_layer blocks")
    fields = tokenizer_fields(manifest)
    if fields["kind"] not in ("json", "none"):
        try:
            load_carried(fields, manifest["vocabulary"].encode())
        except ValueError as error:
            raise CorruptSnapshot(f"its vocabulary is damaged: {error}") from None
    wanted: dict[str, tuple[str, Shape]] = {}
    whole: dict[str, tuple[str, Shape]] = {}  # the tensors that are not sharded
    for name, shape in snapshot_shapes(manifest, snapshot_vocab_size(manifest)).items():
        if is_sharded(manifest, name, shape):
            rows = split_rows(shape[0], manifest["shard"]["workers"])[manifest["shard"]["rank"]]
            wanted[name] = "F32", (len(rows), *shape[1:])
        else:
            whole[name] = "F32", shape
    if fields["kind"] == "json":  # any number of bytes
        there = entries[TOKENIZER_TENSOR].shape if TOKENIZER_TENSOR in entries else ()
        whole[TOKENIZER_TENSOR] = "U8", (math.prod(there),)
    if not manifest.get("shard") or entries.keys() & whole.keys():
        wanted |= whole
    for name, (dtype, shape) in wanted.items():
        if name not in entries:
            raise CorruptSnapshot(f"its tensor file lacks {name}")
        if entries[name].shape != shape:
            raise CorruptSnapshot(
                f"its tensor {name} has shape {list(entries[name].shape)}, not {list(shape)}"
            )
        if entries[name].dtype != dtype:
            raise CorruptSnapshot(f"its tensor {name} has type {entries[name].dtype}, not {dtype}")
    surplus = sorted(entries.keys() - wanted.keys())
    if surplus:
        raise CorruptSnapshot(f"its tensor file holds {surplus[0]!r}, which its model lacks")


def snapshot_shapes(manifest: dict[str, Any], vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of each parameter and optimizer tensor of the manifest's run, by name."""
    config = read_config(manifest)
    parameters = parameter_shapes(config.model, vocab_size=vocab_size, block_size=config.data.block_size)
    states = state_shapes(parameters, config.optimizer)
    shapes = {f"model.{name}": shape for name, shape in parameters.items()}
    return shapes | {f"optimizer.{name}": shape for name, shape in states.items()}


def is_sharded(manifest: dict[str, Any], name: str, shape: tuple[int, ...]) -> bool:
    """Whether the manifest is of one rank's part, in which tensor `name` has that rank's rows alone.

    `shape` is the shape of the whole tensor.
    """
    shard = manifest.get("shard")
    if not shard or not shape:
        return False
    return name.startswith("optimizer.") or (shard["weights"] and name.startswith("model."))


def load_carried(fields: dict[str, Any], content: bytes) -> Tokenizer:
    """Return the tokenizer in `content`; `fields` is what the manifest says of it (see `tokenizer_fields`).

    Raises ValueError if the content is no tokenizer, has another SHA-256 than the fields say, or has more
    tokens than the model's embedding has rows.
    """
    digest = hashlib.sha256(content).hexdigest()
    if fields.get("sha256", digest) != digest:
        raise ValueError("its SHA-256 is not the one that the manifest says")
    tokenizer = load_tokenizer(fields["kind"], content)
    if len(tokenizer) > fields.get("vocab_size", len(tokenizer)):
        raise ValueError(f"it has {len(tokenizer)} tokens, and the model {fields['vocab_size']}")
    return tokenizer


def tokenizer_fields(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's fields on the tokenizer: "kind", and if they are known "vocab_size", "sha256"."""
    return manifest.get("tokenizer") or {"kind": "char"}


def snapshot_tokenizer(snapshot: Snapshot) -> Tokenizer | None:
    """Return the tokenizer that a snapshot carries, or None. Raises UserError if it cannot be used."""
    tensor = snapshot.read(TOKENIZER_TENSOR) if TOKENIZER_TENSOR in snapshot.entries else None
    return make_tokenizer(snapshot.manifest, tensor)


def make_tokenizer(manifest: dict[str, Any], tensor: Tensor | None) -> Tokenizer | None:
    """Return the tokenizer that a manifest describes; None if its run has none.

    `tensor` has the tokenizer's bytes, one-dimensional uint8 on the CPU; if it is None, the manifest has
    them. Raises UserError if the tokenizer is damaged, or needs a package that is not installed.
    """
    fields = tokenizer_fields(manifest)
    if fields["kind"] == "none":
        return None
    content = manifest["vocabulary"].encode() if tensor is None else tensor.numpy().tobytes()
    try:
        return load_carried(fields, content)
    except ValueError as error:
        raise UserError(f"the tokenizer of the snapshot cannot be used: {error}") from None


def snapshot_vocab_size(manifest: dict[str, Any]) -> int:
    """Return the number of rows of the embedding of the model that a manifest describes."""
    return int(tokenizer_fields(manifest).get("vocab_size") or len(manifest["vocabulary"]))


def manifest_tokenizer(
    tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the (manifest fields, tensors) that carry a tokenizer; `vocab_size` is the embedding's rows."""
    if tokenizer is None:
        return {"vocabulary": "", "tokenizer": {"kind": "none", "vocab_size": vocab_size}}, {}
    content = tokenizer.to_bytes()
    digest = hashlib.sha256(content).hexdigest()
    about = {"kind": kind_of(tokenizer), "vocab_size": vocab_size, "sha256": digest}
    if not tokenizer.stored_as_tensor:
        return {"vocabulary": content.decode(), "tokenizer": about}, {}
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return {"vocabulary": "", "tokenizer": about}, {TOKENIZER_TENSOR: tensor}


def fit_weights(tensors: dict[str, Tensor], shapes: Mapping[str, Shape], origin: str) -> dict[str, Tensor]:
    """Return views of the weights, without the learned positions past those in `shapes`.

    Raises UserError as `check_shapes` does.
    """
    there = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    check_shapes(there, shapes, origin)
    return {name: tensor[: shapes[name][0]] for name, tensor in tensors.items()}


def check_shapes(
    there: Mapping[str, tuple[Shape, torch.dtype]], here: Mapping[str, Shape], origin: str
) -> None:
    """Raise UserError unless weights of the shapes and types `there` fit a model of the shapes `here`.

    Weights may have any floating-point type, and more learned positions than the model. Messages call them
    `origin`.
    """
    wrong = []
    for name, shape in here.items():
        found: Any = "missing"
        if name in there:
            found, dtype = there[name]
            if name.endswith("wpe.weight"):
                if found[0] < shape[0]:
                    raise UserError(
                        f"{origin} holds {found[0]} positions and data.block_size is {shape[0]}: set "
                        f"data.block_size={found[0]}, or less"
                    )
                found = (min(found[0], shape[0]), *found[1:])
            found = found if dtype.is_floating_point else dtype
        if found != shape:
            wrong.append(f"{name}: {found} -> {shape}")
    surplus = there.keys() - here.keys()
    if wrong or surplus:
        reasons = wrong[:3] + ([f"{len(surplus)} tensors that this model lacks"] if surplus else [])
        raise UserError(f"{origin} holds the weights of another model ({'; '.join(reasons)})")


def load_weights(model: GPT, tensors: dict[str, Tensor], origin: str) -> None:
    """Copy all weights into `model`, except learned positions past its block_size.

    Raises UserError, which names `origin`, for the weights of another model.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    model.load_state_dict(fit_weights(tensors, shapes, origin), strict=False)  # buffers are not stored


@dataclass
class LossScale:
    """The power of two by which a run in float16 multiplies its loss (Micikevicius et al. 2018, section 3.2).

    Without it, small gradients are zero in float16. The values are those of torch.amp.GradScaler.
    """

    scale: float = 65_536.0
    good_steps: int = 0  # in a row, at this scale

    def after_step(self, is_finite: bool) -> bool:
        """Adapt to a step whose gradient is finite or not; return whether the scale has been halved."""
        if not is_finite and self.scale > 1.0:
            self.scale, self.good_steps = self.scale / 2, 0
            return True
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if self.good_steps >= GROWTH_STEPS:
            self.scale, self.good_steps = min(self.scale * 2, MAX_LOSS_SCALE), 0
        return False


class TrainState:
    """The state that a snapshot holds.

    `step` counts completed steps, `windows_seen` the windows (block_size + 1 tokens) that all ranks together
    have read. `skipped` counts the updates left out as not finite: (in all, in a row up to `step`).
    `loss_scale` is None unless the run computes in float16.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: Optimizer,
        strategy: Strategy,
        step: int = 0,
        windows_seen: int = 0,
        skipped: Sequence[int] = (0, 0),
        loss_scale: LossScale | None = None,
    ) -> None:
        self.model, self.optimizer, self.strategy = model, optimizer, strategy
        self.step, self.windows_seen, self.skipped = step, windows_seen, skipped
        self.loss_scale = loss_scale

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's rows of each tensor, by "model.<name>" or "optimizer.<parameter>.<state>".

        They are the state itself, not copies, and change with the next step.
        """
        weights = {f"model.{name}": weight for name, weight in self.strategy.held_weights().items()}
        return weights | {f"optimizer.{name}": part for name, part in self.optimizer.state_dict().items()}

    @functools.cached_property
    def rows(self) -> RowMap:
        """The rows of each tensor that each rank holds; `tensors` returns this rank's."""
        shapes = {f"model.{name}": shape for name, shape in self.strategy.shapes.items()}
        for name, part in self.optimizer.state_dict().items():
            parameter = name.rpartition(".")[0]
            shapes[f"optimizer.{name}"] = self.strategy.shapes[parameter] if part.ndim else ()
        return self.strategy.state_rows(shapes)


@torch.no_grad()
def copy_rows(part: Tensor, first: int, begin: int, rows: Tensor) -> None:
    """Copy into `part` those of `rows` that belong there, and leave the rest of `part` as it is.

    `rows` are the rows of a tensor from row `begin` on; `part` holds the rows of the same tensor from row
    `first` on. Either may also be a scalar.
    """
    if not part.ndim:
        part.copy_(rows.view(()))
        return
    low, high = max(first, begin), min(first + len(part), begin + len(rows))
    if low < high:
        part[low - first : high - first].copy_(rows[low - begin : high - begin])


class Rows(NamedTuple):
    """Rows `begin` to before `end` of a tensor, which the rank `rank` can read; a scalar is one row."""

    name: str
    begin: int
    end: int
    rank: int
    part: int = 0  # the number of the part that holds them, among the parts that the rank has found
    first: int = 0  # the first row of that part


@dataclass(frozen=True)
class StoredState:
    """A snapshot that all ranks read together, piece by piece; `read` alone differs between ranks."""

    manifest: dict[str, Any]
    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]
    rows: list[Rows]  # together they make up all tensors
    read: Callable[[Rows], Tensor]  # reads those of the rows that this rank can read

    def tensor(self, name: str, context: DistributedContext) -> Tensor:
        """Return a whole tensor, on the CPU, on all ranks. KeyError for an unknown name. Collective."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        for _, begin, rows in self.stream([name], context):
            copy_rows(whole, 0, begin, rows)
        return whole

    def stream(self, names: Iterable[str], context: DistributedContext) -> Iterator[tuple[str, int, Tensor]]:
        """Yield pieces of these tensors, the same on all ranks: (name, number of its first row, its rows).

        The rows are on the CPU. Collective: all ranks must iterate to the end.
        """
        wanted = set(names)
        for pieces in self.batches(part for part in self.rows if part.name in wanted):
            sizes = [self.size(piece) for piece in pieces]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            source = pieces[0].rank
            parts = buffer.split(sizes) if context.rank == source else ()
            fill = functools.partial(self.fill, pieces, parts)
            context.run_with_heartbeat(fill)  # a store may be slow
            context.broadcast(buffer, source)
            for piece, part in zip(pieces, buffer.split(sizes), strict=True):
                rows = part.view(self.dtypes[piece.name]).view(-1, *self.shapes[piece.name][1:])
                yield piece.name, piece.begin, rows

    def fill(self, pieces: Sequence[Rows], parts: Sequence[Tensor]) -> None:
        """Read the bytes of each piece into the part at the same place, a one-dimensional uint8 tensor.

        `parts` is empty on the ranks that only receive: they read nothing.
        """
        for piece, part in zip(pieces, parts, strict=False):
            part.copy_(self.read(piece).reshape(-1).view(torch.uint8))

    def batches(self, parts: Iterable[Rows]) -> Iterator[list[Rows]]:
        """Yield the pieces of each message: read by one rank, of at most PIECE_BYTES in all, or one row."""
        batch: list[Rows] = []
        size = 0
        for part in parts:
            for piece in self.cut(part):
                if batch and (piece.rank != batch[0].rank or size + self.size(piece) > PIECE_BYTES):
                    yield batch
                    batch, size = [], 0
                batch.append(piece)
                size += self.size(piece)
        if batch:
            yield batch

    def cut(self, part: Rows) -> Iterator[Rows]:
        """Yield the rows of `part` in pieces of at most PIECE_BYTES, or of one row if that is larger."""
        row_bytes = max(1, self.size(part) // max(1, part.end - part.begin))
        count = max(1, PIECE_BYTES // row_bytes)
        for begin in range(part.begin, part.end, count):
            end = min(begin + count, part.end)
            yield Rows(part.name, begin, end, part.rank, part.part, part.first)

    def size(self, part: Rows) -> int:
        """Return the number of bytes of these rows, in the type in which their tensor is stored."""
        columns = torch.Size(self.shapes[part.name][1:]).numel()
        return (part.end - part.begin) * columns * self.dtypes[part.name].itemsize


def load_state(state: TrainState, stored: StoredState, context: DistributedContext) -> None:
    """Copy the stored weights into `state`, and the optimizer's state if it is of the same kind. Collective.

    Learned positions past block_size are left out. Raises UserError for the weights of another model. The
    counters `step`, `windows_seen` and `skipped` are not set.
    """
    parts, held, rank = state.tensors(), state.rows, state.strategy.rank
    names = [name for name in stored.shapes if name.startswith("model.")]
    there = {name: (stored.shapes[name], stored.dtypes[name]) for name in names}
    here = {name: shape for name, shape in held.shapes.items() if name.startswith("model.")}
    check_shapes(there, here, f"the snapshot of step {stored.manifest['step']}")
    optimizer = [name for name in stored.shapes if name.startswith("optimizer.")]
    if set(optimizer) == {name for name in held.shapes if name.startswith("optimizer.")}:
        names += optimizer
    for name, begin, rows in stored.stream(names, context):
        copy_rows(parts[name], held.of(name, rank).start, begin, rows)
