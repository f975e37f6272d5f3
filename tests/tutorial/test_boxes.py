"""Lessons 9 and 10 end at the loss of lesson 1, and hold and send the bytes of the formulas of the page."""

import re

import pytest
from support.forked import WAYS
from support.pages import blocks, command_of, not_printed

from mingpt.config import ModelConfig
from mingpt.model import GPT
from mingpt.tools.jobs import ROOT

FOLDER = ROOT / "tutorial"
PAGE = FOLDER / "boxes.md"
ROW = re.compile(r"^(\w[\w ]*?) {2,}([\d,]+) +([\d,]+)$", re.MULTILINE)
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 64, 2, 64, 50
WINDOWS, MASK = 8, 4 * LENGTH * LENGTH  # of a rank; bytes of the buffer that DDP broadcasts


def parameter_bytes() -> tuple[int, int]:
    """The bytes of the whole model's weights, and of a block's."""
    config = ModelConfig(arch="gpt2", n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH)
    model = GPT(config, vocab_size=VOCABULARY, block_size=LENGTH)
    return sum(weight.nbytes for weight in model.parameters()), sum(w.nbytes for w in model.h[0].parameters())


def saved_activations(windows: int, kept_by_block: int) -> int:
    """What a backward pass needs: floats of each token, the token and its target, and the count of tokens."""
    floats = LAYERS * kept_by_block + 2 * WIDTH + VOCABULARY + 2
    return windows * LENGTH * (4 * floats + 16) + 4


WHOLE, BLOCK = parameter_bytes()
REST, HALF = WHOLE - LAYERS * BLOCK, WHOLE // 2
KEPT = 16 * WIDTH + HEADS * LENGTH + 4  # floats of a token in a block
ALL = {"weights": WHOLE, "gradients": WHOLE, "optimizer state": 2 * WHOLE}
ALL |= {"saved activations": saved_activations(WINDOWS, KEPT), "sent in a step": WHOLE}
ZERO_1 = ALL | {"optimizer state": WHOLE, "sent in a step": WHOLE + HALF}
ZERO_3 = ALL | {"weights": HALF, "gradients": HALF, "optimizer state": WHOLE}
ZERO_3 |= {"weights at most": HALF + REST + BLOCK, "sent in a step": (2 * WHOLE + LAYERS * BLOCK) // 2}
BY_HAND = {"buckets": WHOLE}
FEWER = {"saved activations": saved_activations(WINDOWS // 2, KEPT)}
# The largest bucket: the attention's matrices and the norm before the MLP. It is the last but one.
LARGEST = 4 * (4 * WIDTH * WIDTH + 4 * WIDTH + 2 * WIDTH)
AT_MOST = {"gradients at most": (WHOLE - LARGEST - REST) // 2 + 2 * LARGEST}
# What each program prints for rank 0. Where it prints more for rank 0 than for rank 1, it is DDP's broadcast.
EXPECTED = {
    "9_ddp": ALL | BY_HAND,
    "9_ddp --torch": ALL | {"sent in a step": WHOLE + MASK},
    "9_ddp --micro_batches 2": ALL | BY_HAND | FEWER,
    "9_ddp --micro_batches 2 --no_no_sync": ALL | BY_HAND | FEWER | {"sent in a step": 2 * WHOLE},
    "9_ddp --link_mb_per_s 20": ALL | BY_HAND,
    "9_ddp --link_mb_per_s 20 --no_overlap": ALL | BY_HAND,
    "10_zero1": ZERO_1,
    "10_zero1 --torch": ZERO_1 | {"sent in a step": WHOLE + HALF + MASK},
    "10_zero2": ALL | AT_MOST | {"gradients": HALF, "optimizer state": WHOLE},
    "10_zero2 --torch": ALL | {"weights": HALF, "gradients": HALF, "optimizer state": WHOLE},
    "10_zero3": ZERO_3,
    "10_zero3 --torch": ZERO_3,
    "10_zero3 --checkpoint": ZERO_3 | {"saved activations": saved_activations(WINDOWS, WIDTH)},
}


@pytest.fixture(scope="module", params=WAYS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What lesson 1 and the programs of EXPECTED print, by program and options."""
    folder, found = tmp_path_factory.mktemp("boxes"), {}
    for name in ("1_single", *EXPECTED):
        program, _, options = name.partition(" ")
        found[name] = request.param(f"{command_of(FOLDER / f'{program}.py')} {options}", folder)
    return found


def final_loss(output: str) -> float:
    return float(output.splitlines()[-1].removeprefix("final loss "))


def bytes_by_rank(output: str) -> dict[str, tuple[int, int]]:
    return {row: (as_int(first), as_int(second)) for row, first, second in ROW.findall(output)}


def as_int(figure: str) -> int:
    return int(figure.replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_ends_at_the_loss_of_lesson_1_with_the_bytes_of_the_formula(
    name: str, runs: dict[str, str]
) -> None:
    assert final_loss(runs[name]) == pytest.approx(final_loss(runs["1_single"]), abs=1e-5)
    mask = MASK if name in ("9_ddp --torch", "10_zero1 --torch") else 0
    expected = {row: (size, size) for row, size in EXPECTED[name].items()}
    sent = EXPECTED[name]["sent in a step"]
    assert bytes_by_rank(runs[name]) == expected | {"sent in a step": (sent, sent - mask)}


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", " --no_overlap"])
def test_a_declared_link_takes_its_time(options: str, runs: dict[str, str]) -> None:
    time_ms = re.search(r"about (\d+) ms a step", runs[f"9_ddp --link_mb_per_s 20{options}"])
    assert time_ms and int(time_ms[1]) >= WHOLE // 20_000


@pytest.mark.slow
def test_the_page_shows_the_bytes_that_the_programs_print(runs: dict[str, str]) -> None:
    shown = {given["run"].replace(",", " "): text for _, given, text in blocks(PAGE) if "run" in given}
    assert len(shown) > 3
    assert [not_printed(text, runs[name]) for name, text in shown.items()] == [[]] * len(shown)
    table = re.findall(r"^\| (\S+?\.py[^|]*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    names = ("weights", "gradients", "optimizer state", "sent in a step")
    for program, cells in table:
        found = bytes_by_rank(runs[program.replace(".py", "").replace("`", "")])
        assert [as_int(cell) for cell in cells.split(" | ")] == [found[name][1] for name in names], program
    assert len(table) == 8


def test_code_and_commands_on_the_page_are_those_of_the_programs() -> None:
    commands = [command_of(path) for path in sorted(FOLDER.glob("*_*.py")) if path.name[:2] in ("9_", "10")]
    for kind, given, text in blocks(PAGE):
        if kind == "python":
            assert text in (FOLDER / given["of"]).read_text(), text
        if kind == "bash":
            assert all(line.startswith(tuple(commands)) for line in text.splitlines()), text
    used = {given.get("of") for _, given, _ in blocks(PAGE)}
    assert used >= {path.name for path in FOLDER.glob("10_*.py")} | {"9_ddp.py"}
