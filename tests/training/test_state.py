"""What a run takes over: a stored state, of which each rank takes its rows, or weights to start with."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forks import SingleProcess
from support.golden import Golden
from support.ranks import results_of_threads
from support.snapshots import make_manifest, snapshot_of
from support.training import ARCHITECTURES, NAMES, Arch, Name, make_model, pieces, train
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.base.rows import RowMap
from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig, SnapshotConfig, to_dict
from mingpt.data import CharTokenizer
from mingpt.distributed import DistributedContext
from mingpt.distributed.transport import Transport
from mingpt.model import parameter_shapes
from mingpt.optim import Optimizer
from mingpt.parallel import ExactReduction, StrategySetup
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot import Manifest, Snapshot, StoredState, search
from mingpt.snapshot.layout import TensorSpec, lay_out
from mingpt.training.contents import check_model, describe_tokenizer
from mingpt.training.run import match_weights
from mingpt.training.state import TrainState, load_state

Tensors = dict[str, Tensor]


def make_state(name: Name, arch: Arch) -> TrainState:
    model, optimizer = make_model(name, arch)
    setup = StrategySetup(model, [range(2)], SingleProcess(), list(model.h))
    return TrainState(model, optimizer, ExactReduction(setup))


def shard_state(rank: int, workers: int, weights_too: bool) -> TrainState:
    """A rank's state: only the rank's rows of the optimizer's state and, if `weights_too`, of the weights."""
    model, _ = make_model("adamw", "gpt2")
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    rows = RowMap(shapes, workers, ("",))
    held = pieces({name: weight.detach() for name, weight in model.named_parameters()}, rows, rank)
    strategy: Any = SimpleNamespace(
        shapes=shapes,
        rank=rank,
        world_size=workers,
        weights_are_sharded=weights_too,
        updates_are_sharded=True,
        held_weights=lambda: held if weights_too else dict(model.named_parameters()),
    )
    strategy.state_rows = functools.partial(Strategy.state_rows, strategy)
    optimizer = Optimizer(held, OptimizerConfig(name="adamw"), rows, Transport(rank, workers))
    return TrainState(model, optimizer, strategy)


def make_stored(tensors: Tensors, reader: int = 0, rank: int = 0) -> StoredState:
    """A stored state as rank `rank` sees it; only rank `reader` has the snapshot and reads it."""
    snapshot = snapshot_of(make_manifest(7), tensors)
    layouts = [lay_out("", file.specs) for file in snapshot.tensor_files]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return StoredState(make_manifest(7), None, layouts, shapes, reader, snapshot if rank == reader else None)


def trained_tensors(name: Name = "adamw") -> Tensors:
    state = make_state(name, "gpt2")
    train(state.model, state.optimizer, range(2))
    return {key: tensor.clone() for key, tensor in state.tensors().items()}


def loaded(tensors: Tensors) -> Tensors:
    state = make_state("adamw", "gpt2")
    load_state(state, make_stored(tensors), SingleProcess())
    return state.tensors()


@pytest.mark.parametrize("weights_too", [False, True])
@pytest.mark.parametrize("reader", [0, 2])
def test_all_ranks_get_their_rows_of_what_one_of_them_can_read(
    reader: int, weights_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PIECE_BYTES", 200)  # some rows are larger
    tensors = trained_tensors()

    def work(context: DistributedContext) -> TrainState:
        state = shard_state(context.rank, 3, weights_too)
        load_state(state, make_stored(tensors, reader, context.rank), context)
        return state

    for rank, state in enumerate(results_of_threads(3, work)):
        for name, part in state.tensors().items():
            rows = state.rows.by_rank(name)
            expected = tensors[name][rows[rank].start : rows[rank].stop] if rows else tensors[name]
            assert torch.equal(part, expected), name


@pytest.mark.parametrize("kind", ["another", "incomplete", "none"])
def test_the_state_of_another_optimizer_is_left_out(kind: str) -> None:
    tensors = trained_tensors("muon" if kind == "another" else "adamw")
    if kind == "incomplete":
        del tensors["optimizer.wte.weight.exp_avg"]
    elif kind == "none":
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    for name, tensor in loaded(tensors).items():
        expected = tensors[name] if name.startswith("model.") else torch.zeros_like(tensor)
        assert torch.equal(tensor, expected), name


VOCABULARY = "abcdefghijk"
TOKENIZER, OTHER = CharTokenizer(VOCABULARY), CharTokenizer("abcdefghijz")
CHARACTERS = TOKENIZER.to_bytes()
MODEL = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=16)


def make_snapshot(name: Name, arch: Arch) -> tuple[Manifest, dict[str, TensorSpec]]:
    config = Config(
        data=DataConfig(block_size=8), model=replace(MODEL, arch=arch), optimizer=OptimizerConfig(name=name)
    )
    about = describe_tokenizer(TOKENIZER, len(VOCABULARY))
    manifest = make_manifest(3, config=to_dict(config), tokenizer=about)
    return manifest, snapshot_of(manifest, make_state(name, arch).tensors()).entries


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_tensors_of_a_run_are_those_that_its_manifest_describes(name: Name, arch: Arch) -> None:
    manifest, entries = make_snapshot(name, arch)
    check_model(manifest, entries, CHARACTERS)
    wrong = []
    for key, entry in entries.items():
        wrong.append((f"lacks {key}", {name: entries[name] for name in entries if name != key}))
        for other in (replace(entry, shape=(*entry.shape, 1)), replace(entry, dtype=torch.int32)):
            wrong.append((f"{key} has", entries | {key: other}))
    for more in ("model.more", "optimizer.more.step", "optimizer.wte.weight.code", "other"):
        wrong.append((f"holds '{more}', which", entries | {more: entries["model.wte.weight"]}))
    for sentence, changed in wrong:
        with pytest.raises(CorruptSnapshot, match=sentence):
            check_model(manifest, changed, CHARACTERS)


CONFIG = Config(model=MODEL, snapshot=SnapshotConfig(init_from="there"))
SHAPES = parameter_shapes(MODEL, vocab_size=11, block_size=8)
WEIGHTS = {name: torch.randn(shape) for name, shape in (SHAPES | {"wpe.weight": (20, 16)}).items()}


def make_initial(
    tensors: dict[str, torch.Tensor], tokenizer: CharTokenizer | None, model: ModelConfig = MODEL
) -> Snapshot:
    about = describe_tokenizer(tokenizer, len(tensors["wte.weight"]))
    manifest = make_manifest(3, config=to_dict(Config(model=model)), tokenizer=about)
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return snapshot_of(manifest, named, tokenizer.to_bytes() if tokenizer else None)


def test_weights_to_start_with_are_fitted() -> None:
    """Positions are cut, and all other weights are unchanged."""
    found = match_weights(make_initial(WEIGHTS, TOKENIZER), CONFIG, SHAPES, TOKENIZER)
    assert found.keys() == SHAPES.keys()
    assert all(torch.equal(weight, WEIGHTS[name][: SHAPES[name][0]]) for name, weight in found.items())


@pytest.mark.parametrize(
    ("model", "tokenizer", "changes"),
    [
        (replace(MODEL, n_layer=5, n_head=4), None, {}),
        (MODEL, OTHER, {}),
        (MODEL, None, {"ln_f.bias": torch.zeros(1)}),
        (MODEL, None, {"wpe.weight": torch.zeros(5, 16)}),
    ],
    ids=["model", "tokenizer", "shape", "positions"],
)
def test_weights_to_start_with_of_another_model_or_tokenizer_are_one_sentence(
    model: ModelConfig, tokenizer: CharTokenizer | None, changes: dict[str, torch.Tensor], golden: Golden
) -> None:
    initial = make_initial(WEIGHTS | changes, tokenizer, model)
    with pytest.raises(UserError) as error:
        match_weights(initial, CONFIG, SHAPES, TOKENIZER)
    golden(str(error.value))
