"""Tensor and pipeline parallelism of the tutorial: the loss of one process, bytes as the page computes."""

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT
from support.pages import command_of, run_program

from tutorial.timeline import draw

FOLDER = ROOT / "tutorial"
PAGE = FOLDER / "splitting.md"
EVENTS = FOLDER / "pictures" / "events"
OPTIONS = {
    "1_single": [""],
    "11_tensor": ["", "--torch"],
    "12_pipeline": ["", "--schedule 1f1b --events events.json", "--torch", "--torch --schedule 1f1b"],
}
OWN = ("11_tensor", "12_pipeline", "timeline", "splitting", "stages", "who_waits", "looking")
# The model: blocks, width, heads, positions, vocabulary; the batch; ranks; bytes of a float and of a token.
BLOCKS, C, H, T, V, B, W, FLOAT, TOKEN = 2, 64, 2, 64, 50, 16, 2, 4, 8
CUT, WHOLE = 12 * C * C + 7 * C, 6 * C  # a block's parameters: those that tensor parallelism cuts, and others


def block_saved(windows: int, share: int = 1) -> int:
    """Bytes that a block keeps for its backward pass, if a rank has 1 / share of heads and neurons."""
    activation, attention = windows * T * C, windows * H * T * T
    return FLOAT * (4 * activation + (12 * activation + attention) // share + 4 * windows * T)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each program prints, by its name and options."""
    folder = tmp_path_factory.mktemp("tutorial")
    return {
        f"{name} {options}".strip(): run_program(f"{command_of(FOLDER / f'{name}.py')} {options}", folder)
        for name, all_options in OPTIONS.items()
        for options in all_options
    }


def numbers(output: str, pattern: str) -> list[int]:
    """By rank, the numbers that follow or precede a word, in the order of ranks."""
    return [int(number.replace(",", "")) for number in re.findall(pattern, output)]


@pytest.mark.parametrize("name", OWN)
def test_a_program_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 120
    assert len((FOLDER / "events.py").read_text().splitlines()) <= 40


@pytest.mark.slow
def test_all_end_at_the_loss_of_one_process(runs: Mapping[str, str]) -> None:
    finals = {name: float(output.split("final loss ")[1]) for name, output in runs.items()}
    assert finals == pytest.approx(dict.fromkeys(runs, finals["1_single"]), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", " --torch"])
def test_tensor_parallelism_holds_and_sends_what_the_page_computes(
    options: str, runs: Mapping[str, str]
) -> None:
    output = runs[f"11_tensor{options}"]
    weights = FLOAT * (BLOCKS * (CUT // W + WHOLE) + (V + T + 2) * C)
    head = FLOAT * (2 * B * T * C + 2 * B * T + B * T * V + 1) + 2 * TOKEN * B * T
    assert numbers(output, r"weights ([\d,]+)") == numbers(output, r"gradients ([\d,]+)") == [weights] * W
    assert numbers(output, r"optimizer state ([\d,]+)") == [2 * weights] * W
    assert numbers(output, r"saved activations ([\d,]+)") == [BLOCKS * block_saved(B, W) + head] * W
    assert numbers(output, r"(\d+) all-reduces") == [4 * BLOCKS] * W
    sent = 2 * FLOAT * B * T * C * (W - 1) // W * 4 * BLOCKS
    assert numbers(output, r"all-reduces, ([\d,]+) bytes") == ([] if options else [sent] * W)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_holds_and_sends_what_the_page_computes(schedule: str, runs: Mapping[str, str]) -> None:
    """Also where torch runs the schedule: there the sends and the saved activations are not counted."""
    flag, count = ("", 4) if schedule == "gpipe" else (" --schedule 1f1b", 4)
    output = runs[f"12_pipeline{flag}" + (" --events events.json" if flag else "")]
    weights = [FLOAT * (CUT + WHOLE + rest * C) for rest in (V + T, V + 2)]
    for printed in (output, runs[f"12_pipeline --torch{flag}"]):
        assert numbers(printed, r"weights ([\d,]+)") == numbers(printed, r"gradients ([\d,]+)") == weights
        assert numbers(printed, r"optimizer state ([\d,]+)") == [2 * size for size in weights]
    held = [count, count] if schedule == "gpipe" else [2, 1]
    windows = B // count
    head = FLOAT * (windows * T * (2 * C + 2 + V) + 1)
    saved = [block_saved(windows) + TOKEN * windows * T + more for more in (0, head)]
    expected = [number * size for number, size in zip(held, saved, strict=True)]
    assert numbers(output, r"holds at most (\d+)") == held
    assert numbers(output, r"saved activations ([\d,]+)") == expected
    assert numbers(output, r"sends ([\d,]+)") == [FLOAT * (B * T * C + V * C)] * W


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_each_micro_batch_has_a_forward_pass_and_then_a_backward_pass(schedule: str, count: int) -> None:
    order_of = importlib.import_module("tutorial.12_pipeline").order_of
    for stages_behind in (0, 1, 3):
        order = order_of(schedule, count, stages_behind)
        for kind in ("forward", "backward"):
            assert [number for name, number in order if name == kind] == list(range(count))
        assert all(order.index(("forward", n)) < order.index(("backward", n)) for n in range(count))


@pytest.mark.parametrize("path", sorted(EVENTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_picture_is_what_its_events_give(path: Path) -> None:
    content = json.loads(path.read_text())
    picture = draw(content["title"], content["events"]).svg()
    assert picture.encode() == path.with_suffix(".svg").read_bytes()


@pytest.mark.slow
def test_small_buckets_are_sent_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    command = command_of(FOLDER / "who_waits.py").replace("out/", "")
    before = {}
    for mode in ("overlap", "one_bucket", "fsdp"):
        run_program(command.replace("overlap", mode), tmp_path)
        events = json.loads((tmp_path / f"{mode}.json").read_text())["events"]
        ends = {event["rank"]: event["end"] for event in events if event["name"] == "backward 1"}
        sends = [event for event in events if event["what"] == "send"]
        before[mode] = sum(event["begin"] < ends[event["rank"]] for event in sends)
    assert before["overlap"] >= 2 and before["one_bucket"] == 0
    assert before["fsdp"] == 2 * (3 + 2 + 3)  # of each rank: gathers before both passes, and gradients


@pytest.mark.slow
def test_the_page_shows_what_the_programs_print(runs: Mapping[str, str]) -> None:
    """But for what depends on the machine, which the page calls about."""
    printed = {re.sub("about [0-9]+", "", line) for output in runs.values() for line in output.splitlines()}
    shown = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in shown for line in block.splitlines() if line.startswith(("rank", "final"))]
    assert len(lines) >= 8
    assert {re.sub("about [0-9]+", "", line) for line in lines} <= printed
