"""The tutorial's pictures: the same when drawn again, readable, and true of torch's FSDP and samplers."""

import inspect
import itertools
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

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
from tutorial.drawing import BLUE, GREEN, ORANGE, PURPLE, WHITE, Picture
from tutorial.pictures import WORLD_SIZE, single

COMMITTED = sorted((ROOT / "tutorial" / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
EM = {"normal": 0.62, "bold": 0.7}  # mean width of a character in DejaVu Sans, a wide font
CONFIG = 'ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)'


class Area(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: "Area") -> bool:
        within = self.left <= other.left and other.right <= self.right
        return within and self.top <= other.top and other.bottom <= self.bottom

    def overlaps(self, other: "Area") -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)

    def center(self) -> "Area":
        x, y = (self.left + self.right) / 2, (self.top + self.bottom) / 2
        return Area(x, y, x, y)

    def size(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.get(name, "0")) for name in names]


def boxes(picture: ElementTree.Element) -> Iterator[Area]:
    for box in picture.iter(f"{SVG}rect"):
        x, y, width, height = numbers(box, "x", "y", "width", "height")
        yield Area(x, y, x + width, y + height)


def texts(picture: ElementTree.Element) -> Iterator[tuple[str, Area]]:
    """Each with about the area that it takes."""
    for element in picture.iter(f"{SVG}text"):
        x, y, size = numbers(element, "x", "y", "font-size")
        text = element.text or ""
        width = len(text) * size * EM[element.get("font-weight", "normal")]
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor", "start")]
        yield text, Area(left, y - 0.8 * size, left + width, y + 0.2 * size)


def unreadable(svg: str) -> list[str]:
    """Texts that overlap, or leave the smallest box around their middle; the picture is a box too."""
    picture = ElementTree.fromstring(svg)
    areas, frames, found = list(texts(picture)), list(boxes(picture)), []
    for number, (text, area) in enumerate(areas):
        around = [frame for frame in frames if frame.holds(area.center())]
        if not around or not min(around, key=Area.size).holds(area):
            found.append(f"{text!r} leaves its box")
        found += [f"{text!r} overlaps {other!r}" for other, there in areas[:number] if area.overlaps(there)]
    return found


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


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_picture_can_be_read_in_a_dark_page_and_by_a_screen_reader(path: Path) -> None:
    picture = ElementTree.fromstring(path.read_text())
    for name in ("title", "desc"):
        element = picture.find(f"{SVG}{name}")
        assert element is not None and element.text
        assert element.attrib["id"] in picture.attrib["aria-labelledby"].split()
    background = next(picture.iter(f"{SVG}rect"))
    assert background.get("fill") == "#ffffff"
    assert numbers(background, "width", "height") == numbers(picture, "width", "height")
    assert unreadable(path.read_text()) == []


def test_texts_that_overlap_or_leave_their_box_are_found() -> None:
    picture = Picture("A title", "", 100)
    picture.box(24, 60, 60, 20, BLUE, "short")
    assert unreadable(picture.svg()) == []
    picture.box(124, 60, 60, 20, BLUE, "longer than its box")
    picture.text(30, 40, "over the title")
    picture.text(780, 90, "out of the picture")
    assert unreadable(picture.svg()) == [
        "'longer than its box' leaves its box",
        "'over the title' overlaps 'A title'",
        "'out of the picture' leaves its box",
    ]


def make_model() -> GPT:
    _, vocab_size = single.make_dataset()
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    return GPT(config, vocab_size=vocab_size, block_size=single.BLOCK_SIZE)


def test_the_bars_are_what_a_model_and_adamw_hold_and_their_halves() -> None:
    assert CONFIG in (ROOT / "tutorial" / "1_single.py").read_text()
    model = make_model()
    whole = sum(weight.nbytes for weight in model.parameters())
    assert sum(map(sum, pictures.parameter_bytes().values())) == whole
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    averages = sum(
        state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    )
    assert averages == 2 * whole
    block = sum(weight.nbytes for weight in model.h[0].parameters())
    gathered = whole - (len(model.h) - 1) * block  # all but the other blocks
    everything = [whole, whole, averages]
    sharded_optimizer = [whole, whole, averages // WORLD_SIZE]
    fsdp = [size // WORLD_SIZE for size in everything] + [gathered]
    bars = 3 * everything + WORLD_SIZE * sharded_optimizer + WORLD_SIZE * fsdp
    assert [label for _, label in labels("who_holds_what")] == [f"{size:,}" for size in bars]


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


def test_ddp_keeps_a_copy_of_the_gradients_and_sends_those_of_this_model_in_one_bucket() -> None:
    assert "DDP's buckets, by default a copy of the gradients" in unescape(words("who_holds_what"))
    settings = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    assert settings["gradient_as_bucket_view"].default is False
    assert "fits in one, sent at the end" in words("collectives")
    assert sum(map(sum, pictures.parameter_bytes().values())) < torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


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


def test_the_steps_done_twice_are_those_after_the_last_snapshot() -> None:
    drawn = labels("restart")
    assert single.EPOCHS * single.WINDOWS // single.BATCH_SIZE == 100
    assert [label for fill, label in drawn if fill == GREEN] == ["20", "40", "60", "80", "100"]
    assert [label for fill, label in drawn if fill == WHITE] == ["60"]
    done = [label for fill, label in drawn if fill in pictures.RANK_COLORS]
    assert done == ["steps 1 to 59"] * WORLD_SIZE + ["steps 41 to 100"] * WORLD_SIZE
    assert "resumes from the snapshot of step 40: steps 41 to 59 are done twice." in words("restart")
