"""What a run takes over: a stored state, of which each rank takes its rows, or weights to start with."""

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.golden import Golden
from support.ranks import results_of_threads
from support.single_process import SingleProcess
from support.snapshots import make_manifest, snapshot_of
from support.training import ARCHITECTURES, NAMES, Arch, Name, make_model, pieces, train
from support.vocabularies import cl100k_like
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.base.rows import RowMap
from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig, SnapshotConfig, to_dict
from mingpt.data import CharTokenizer, Corpus
from mingpt.data.corpus import open_data
from mingpt.distributed import DistributedContext
from mingpt.distributed.transport import Transport
from mingpt.model import parameter_shapes
from mingpt.optim import Optimizer
from mingpt.parallel import ExactReduction, StrategySetup
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot import Manifest, Snapshot, StoredState, search
from mingpt.snapshot.layout import TensorSpec, lay_out
from mingpt.training.contents import check_model, describe_tokenizer, make_tokenizer
from mingpt.training.run import match_weights
from mingpt.training.run_data import load_corpus
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
    """The tensors of a new state into which these are loaded."""
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


def test_learned_positions_are_cut_to_the_block_size() -> None:
    """Positions beyond it are not needed."""
    tensors = trained_tensors()
    name = "model.wpe.weight"
    found = loaded(tensors | {name: torch.cat([tensors[name], torch.ones(4, 16)])})
    assert torch.equal(found[name], tensors[name])


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


@pytest.mark.parametrize(
    "change",
    [
        {"model.h.1.mlp.c_fc.weight": None},
        {"model.lm_head.weight": torch.ones(11, 16)},
        {"model.wte.weight": torch.ones(12, 16)},
        {"model.wpe.weight": torch.ones(5, 16)},
    ],
    ids=["missing", "more", "shape", "too few positions"],
)
def test_the_weights_of_another_model_are_refused(change: dict[str, Tensor | None], golden: Golden) -> None:
    """No weight is taken over."""
    changed = trained_tensors() | change
    stored = make_stored({name: tensor for name, tensor in changed.items() if tensor is not None})
    state, before = make_state("adamw", "gpt2"), make_state("adamw", "gpt2").tensors()
    with pytest.raises(UserError) as error:
        load_state(state, stored, SingleProcess())
    golden(str(error.value))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


VOCABULARY = "abcdefghijk"
TOKENIZER, OTHER = CharTokenizer(VOCABULARY), CharTokenizer("abcdefghijz")
CHARACTERS = TOKENIZER.to_bytes()
MODEL = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=16)


def make_snapshot(name: Name, arch: Arch) -> tuple[Manifest, dict[str, TensorSpec]]:
    """The manifest of a run, and the types and shapes in its file."""
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


@pytest.mark.parametrize(
    ("change", "vocab_size"),
    [
        ({"n_layer": 3}, 11),
        ({"n_layer": 10**9}, 11),
        ({"n_embd": 10**12}, 11),
        ({"arch": "gpt2"}, 11),
        ({}, 3),
        ({}, 2_000_000),
    ],
)
def test_a_configuration_or_a_vocabulary_of_another_model_is_refused_whatever_its_size(
    change: dict[str, Any], vocab_size: int
) -> None:
    """The snapshot is refused at once, and nothing is allocated for it."""
    manifest, entries = make_snapshot("muon", "modern")
    config = manifest.config | {"model": manifest.config["model"] | change}
    other = make_manifest(3, config=config, tokenizer={"kind": "char", "vocab_size": vocab_size})
    with pytest.raises(CorruptSnapshot):
        check_model(other, entries, CHARACTERS)


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (bytes(range(7)), {}),
        (cl100k_like("ab", 257), {"sha256": "0" * 64}),
        (cl100k_like("ab", 257), {"vocab_size": 1}),
        (None, {}),
        (b"ba", {"kind": "char"}),
        (b"", {"kind": "unknown"}),
    ],
    ids=["no tokenizer", "other bytes", "too large", "none", "no characters", "of no kind"],
)
def test_a_tokenizer_that_a_snapshot_carries_and_that_cannot_be_used_is_one_sentence(
    content: bytes | None, more: dict[str, Any], golden: Golden
) -> None:
    manifest = make_manifest(3, tokenizer={"kind": "json", "vocab_size": 11, **more})
    with pytest.raises(UserError) as error:
        make_tokenizer(manifest, content)
    golden(str(error.value).partition(": Exception")[0])  # what follows is of the package tokenizers


CONFIG = Config(model=MODEL, snapshot=SnapshotConfig(init_from="there"))
SHAPES = parameter_shapes(MODEL, vocab_size=11, block_size=8)
WEIGHTS = {name: torch.randn(shape) for name, shape in (SHAPES | {"wpe.weight": (20, 16)}).items()}


def make_initial(
    tensors: dict[str, torch.Tensor], tokenizer: CharTokenizer | None, model: ModelConfig = MODEL
) -> Snapshot:
    """The snapshot of snapshot.init_from, with the weights `tensors`."""
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


def load(path: Path, initial: Snapshot, **data: Any) -> Corpus:
    config = Config(
        data=DataConfig(path=str(path), block_size=4, **data), snapshot=SnapshotConfig(init_from="there")
    )
    origin = initial.manifest, initial.read_tokenizer()
    return load_corpus(config, open_data(config.data), None, False, origin, None, is_told=False)


@pytest.mark.parametrize(("rows", "vocab_size", "expected"), [(9, None, 9), (9, 8, 8)])
def test_a_text_is_encoded_with_the_tokenizer_of_the_weights_and_the_embedding_keeps_its_rows(
    rows: int, vocab_size: int | None, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the sea " * 50)
    weights, characters = {"wte.weight": torch.zeros(rows, 4)}, CharTokenizer(" aehstz")
    corpus = load(tmp_path / "text.txt", make_initial(weights, characters), vocab_size=vocab_size)
    assert corpus.tokenizer and corpus.tokenizer.fingerprint() == characters.fingerprint()
    assert corpus.vocab_size == expected
    with pytest.raises(UserError, match=r"have no tokenizer that can be read: name it by data\."):
        load(tmp_path / "text.txt", make_initial(weights, None))
    # `match_weights` refuses weights with fewer rows than the tokenizer has tokens.
    few = make_initial({"wte.weight": torch.zeros(5, 4)}, None)
    assert load(tmp_path / "text.txt", few, tokenizer="char").vocab_size == 6
