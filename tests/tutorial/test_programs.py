"""The programs of the tutorial run by the command that each gives, and end at the same loss."""

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import WAYS
from support.pages import blocks, command_of, not_printed, run_program

from mingpt.tools.jobs import ROOT

FOLDER = ROOT / "tutorial"
TALK = "2_spawn"  # trains nothing
STEPS = sorted({path.stem for path in FOLDER.glob("[1-8]_*.py")} - {TALK})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module", params=WAYS)
def runs(request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    ways = {step: run_program if step[0] in "45" else request.param for step in STEPS}
    return {step[0]: way(command_of(FOLDER / f"{step}.py"), folder) for step, way in ways.items()}


def losses(output: str) -> dict[int, list[float]]:
    """By step, what has been printed for it: more than one loss if the step was done again."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"^step +(\d+) loss (\d\.\d{6})$", output, re.MULTILINE):
        found.setdefault(int(step), []).append(float(loss))
    return found


def saved(folder: Path, number: str) -> dict[str, Any]:
    (path,) = (path for path in folder.glob(f"out/tutorial/{number}_*.pt") if "snapshot" not in path.name)
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.slow
def test_all_lessons_end_at_the_same_loss(runs: dict[str, str]) -> None:
    expected = losses(runs["1"])
    assert list(expected) == list(range(10, 101, 10))
    for number, output in runs.items():
        assert losses(output).keys() == expected.keys(), number
        for step, found in losses(output).items():
            assert found == pytest.approx(expected[step] * len(found), abs=1e-5), number
        final = output.splitlines()[-1].removeprefix("final loss ")
        assert float(final) == pytest.approx(expected[100][0], abs=1e-5), number


@pytest.mark.slow
def test_the_bits_agree_between_lessons_that_add_in_the_same_order(
    runs: dict[str, str], folder: Path
) -> None:
    """On the CPU: 2 to 5 share whole batches, 6 to 8 add micro-batches; the page says so."""
    states = {number: saved(folder, number) for number in runs if number != "1"}
    weights = {number: state.get("model", state) for number, state in states.items()}
    for same in ("2345", "678"):
        first = weights[same[0]]
        assert all(torch.equal(weights[number][name], first[name]) for number in same for name in first)
    assert any(not torch.equal(weights["2"][name], weights["6"][name]) for name in weights["2"])


@pytest.mark.slow
@pytest.mark.parametrize("number", ["4", "5"])
def test_a_worker_is_killed_and_the_steps_after_the_snapshot_are_done_again(
    number: str, runs: dict[str, str]
) -> None:
    assert all(f"rank {rank} resumed from step 40" in runs[number] for rank in range(2))
    printed = losses(runs[number])
    assert [len(printed[step]) for step in (40, 50, 60)] == [1, 2, 1]
    assert printed[50][0] == printed[50][1]


def shown(step: str) -> str:
    """What the page's section on a program says that it prints."""
    sections = re.split(r"^## ", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)
    section = next(text for text in sections[1:] if f"-m tutorial.{step}" in text)
    return section.partition("```text\n")[2].partition("```")[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step in STEPS if step[0] not in "36"])
def test_the_page_shows_what_a_program_prints(step: str, runs: dict[str, str]) -> None:
    """3 shows what 2 does, and 6 what it prints with --bf16."""
    # Two workers that write a line at once may write its end only after both.
    printed = re.sub(r"(?<=\w)(?=rank \d)", "\n", runs[step[0]])
    assert shown(step) and not_printed(shown(step), printed) == []


@pytest.mark.slow
def test_two_processes_add_up_what_each_of_them_has(tmp_path: Path) -> None:
    output = run_program(command_of(FOLDER / f"{TALK}.py"), tmp_path)
    assert sorted(output.splitlines()) == shown(TALK).splitlines()


def test_every_line_of_a_diff_on_the_page_is_one_of_the_diff_between_the_programs() -> None:
    shown = [
        (given, content) for language, given, content in blocks(FOLDER / "README.md") if language == "diff"
    ]
    assert {given["to"] for given, _ in shown} == {f"{step}.py" for step in STEPS} - {"1_single.py"}
    for given, content in shown:
        old, new = ((FOLDER / given[key]).read_text().splitlines() for key in ("from", "to"))
        changed = {line for line in difflib.ndiff(old, new) if line[0] in "+-"}
        for line in content.splitlines():
            assert f"{line[0]} {line[1:]}" in changed, f"{given}: {line}"
