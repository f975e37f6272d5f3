"""The tutorial's pictures: the same when drawn again, and true of torch's FSDP and samplers."""

import itertools
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.config import ModelConfig
from mingpt.model import GPT
from tutorial import pictures
from tutorial.drawing import ORANGE, PURPLE
from tutorial.pictures import WORLD_SIZE, single

COMMITTED = sorted((ROOT / "tutorial" / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def words(name: str) -> str:
    return (ROOT / "tutorial" / "pictures" / f"{name}.svg").read_text()


def labels(name: str) -> list[tuple[str, str]]:
    """(colour, label) of every box with a label, in the order drawn."""
    elements = list(ElementTree.fromstring(words(name)))
    return [
        (box.attrib["fill"], text.text or "")
        for box, text in itertools.pairwise(elements)
        if box.tag == f"{SVG}rect" and text.get("text-anchor") == "middle"
    ]


@pytest.fixture(autouse=True)
def _in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the tutorial's programs read data/input.txt


def test_the_committed_pictures_are_what_the_program_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in COMMITTED}


def make_model() -> GPT:
    _, vocab_size = single.make_dataset()
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    return GPT(config, vocab_size=vocab_size, block_size=single.BLOCK_SIZE)


class Collectives(TorchDispatchMode):
    """Keeps the name of each collective and the bytes of the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d."):
            self.seen.append((name.split(".")[1].strip("_"), max(tensor.nbytes for tensor in args[:2])))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_fsdp_holds_and_sends_what_the_pictures_say(rank: int) -> None:
    """With a process group that sends nothing: every rank alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    try:
        model, units = make_model(), pictures.parameter_bytes()
        for module in [*model.h, model]:
            fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,)))
        share = sum(unit[rank] for unit in units.values())
        held = [weight.to_local() for weight in model.parameters() if isinstance(weight, DTensor)]
        assert sum(tensor.nbytes for tensor in held) == share
        tokens = torch.zeros(1, single.BLOCK_SIZE, dtype=torch.long)
        with Collectives() as collectives:
            _, loss = model(tokens, tokens)
            loss.backward()
    finally:
        dist.destroy_process_group()
    assert f">{share:,}<" in words("who_holds_what")
    sizes = {"block 1": sum(units["h.0"]), "block 2": sum(units["h.1"]), "rest": sum(units["rest"])}
    kinds = {ORANGE: "allgather_base", PURPLE: "reduce_scatter_base"}
    lane = [(kinds[fill], sizes[label]) for fill, label in labels("collectives") if fill in kinds]
    assert collectives.seen == lane
    sent = [sum(size for kind, size in lane if kind == wanted) for wanted in kinds.values()]
    whole = sum(sizes.values())
    assert sent == [2 * whole - sizes["rest"], whole]
    blocks = whole - sizes["rest"]
    line = f"{whole:,} bytes of parameters, the blocks' {blocks:,} again, {whole:,} of gradients"
    assert line in unescape(words("collectives"))


def test_in_each_step_two_ranks_read_the_batch_of_one_process() -> None:
    by_rank = pictures.windows_read(WORLD_SIZE)
    order = torch.randperm(single.WINDOWS, generator=torch.Generator().manual_seed(single.SEED)).tolist()
    drawn = [(fill, int(label)) for fill, label in labels("who_reads_what")]
    batch, share = single.BATCH_SIZE, single.BATCH_SIZE // WORLD_SIZE
    assert len(drawn) == 3 * 2 * batch  # each window by one process, by DDP, and in a micro-batch
    for step in range(2):
        windows = order[step * batch : (step + 1) * batch]
        mine = drawn[3 * step * batch : 3 * (step + 1) * batch]
        assert [window for _, window in mine[::3]] == windows
        assert mine[1::3] == mine[2::3]
        for rank, fill in enumerate(pictures.RANK_COLORS):
            read = [window for color, window in mine[1::3] if color == fill]
            assert read == windows[rank::WORLD_SIZE] == by_rank[rank][step * share : (step + 1) * share]
