"""The programs of the tutorial run by the command that each gives, and end at the same loss."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from support.forked import WAYS
from support.pages import command_of, run_program

from mingpt.config import ModelConfig
from mingpt.model import GPT

FOLDER = ROOT / "tutorial"
TALK = "2_spawn"  # trains nothing
STEPS = sorted({path.stem for path in FOLDER.glob("[1-8]_*.py")} - {TALK})
PROGRAMS = [*FOLDER.glob("[0-9]*_*.py"), *FOLDER.glob("mistakes/*.py")]
LIMITS = {"1_single": 60, TALK: 50}


@pytest.mark.parametrize("path", sorted(PROGRAMS), ids=lambda path: path.stem)
def test_a_program_is_short(path: Path) -> None:
    limit = 40 if path.parent.name == "mistakes" else LIMITS.get(path.stem, 120)
    assert len(path.read_text().splitlines()) <= limit


@dataclass(frozen=True)
class Run:
    """What a lesson printed, and the weights that it saved."""

    losses: dict[int, list[str]]
    final: str
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any] | None
    output: str

    @property
    def bits(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(self.weights[name].contiguous().numpy().tobytes())
        return digest.hexdigest()


@pytest.fixture(scope="module", params=WAYS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All lessons, each run once, by its number. An agent restarts the workers of 4 and 5."""
    folder = tmp_path_factory.mktemp("tutorial")
    found = {}
    for step in STEPS:
        run = run_program if step[0] in "45" else request.param
        output = run(command_of(FOLDER / f"{step}.py"), folder)
        losses: dict[int, list[str]] = {}
        for number, loss in re.findall(r"^step +(\d+) loss (\d\.\d{6})$", output, re.MULTILINE):
            losses.setdefault(int(number), []).append(loss)
        last_line = output.splitlines()[-1]
        final = re.fullmatch(r"final loss (\d\.\d{6})", last_line)
        assert final, f"{step} ended with {last_line!r}"
        path = folder / "out" / "tutorial" / f"{step}.pt"
        state = torch.load(path, weights_only=True) if path.exists() else {}
        is_snapshot = "optimizer" in state
        weights = state["model"] if is_snapshot else state
        optimizer = state["optimizer"] if is_snapshot else None
        found[step[0]] = Run(losses, final[1], weights, optimizer, output)
    return found


@pytest.mark.slow
def test_all_lessons_end_at_the_same_loss(runs: dict[str, Run]) -> None:
    for number, run in runs.items():
        assert float(run.final) == pytest.approx(float(runs["1"].final), abs=1e-5), number
        assert sorted(run.losses) == list(range(10, 101, 10)), number
        for step, losses in run.losses.items():
            expected = float(runs["1"].losses[step][0])
            assert [float(loss) for loss in losses] == pytest.approx([expected] * len(losses), abs=1e-5)


@pytest.mark.slow
def test_the_bits_agree_between_lessons_that_add_in_the_same_order(runs: dict[str, Run]) -> None:
    """On the CPU: 2 to 5 share whole batches, 6 to 8 add micro-batches; the page says so."""
    assert len({runs[number].bits for number in "2345"}) == 1
    assert len({runs[number].bits for number in "678"}) == 1
    assert runs["2"].bits != runs["6"].bits


@pytest.mark.slow
@pytest.mark.parametrize("number", ["4", "5"])
def test_a_worker_is_killed_and_the_steps_after_the_snapshot_are_done_again(
    number: str, runs: dict[str, Run]
) -> None:
    run = runs[number]
    assert "rank 0 resumed from step 40" in run.output and "rank 1 resumed from step 40" in run.output
    assert len(run.losses[50]) == 2 and len(set(run.losses[50])) == 1
    assert len(run.losses[40]) == 1 and len(run.losses[60]) == 1


@pytest.mark.slow
def test_evaluation_counts_every_window_once(runs: dict[str, Run]) -> None:
    assert "windows by rank [51, 50]" in runs["7"].output
    losses = [re.search(r"validation loss (\d\.\d{6})", runs[number].output) for number in "78"]
    assert losses[0] and losses[1] and losses[0][1] == losses[1][1]


@pytest.mark.slow
def test_the_snapshot_of_shards_is_the_one_of_whole_tensors(runs: dict[str, Run]) -> None:
    whole, sharded = runs["4"], runs["8"]
    assert whole.optimizer and sharded.optimizer
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    for weights, state in ((whole.weights, whole.optimizer), (sharded.weights, sharded.optimizer)):
        model = GPT(config, vocab_size=len(weights["wte.weight"]), block_size=64)
        model.load_state_dict(weights)
        torch.optim.AdamW(model.parameters()).load_state_dict(state)
    assert sharded.optimizer["param_groups"] == whole.optimizer["param_groups"]
    for index, state in whole.optimizer["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(sharded.optimizer["state"][index][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_the_page_shows_what_the_programs_print(runs: dict[str, Run]) -> None:
    """Numbers may differ in the last digits on another kind of processor."""
    for number, run in runs.items():
        if number in "36":
            continue  # 3 shows what 2 does, and 6 what it prints with --bf16
        block = first_block(next(step for step in STEPS if step[0] == number))
        # Two workers that write a line at once may write its end only after both.
        output = re.sub(r"(?<=\w)(?=rank \d)", "\n", run.output)
        printed = [_numbers_apart(line) for line in output.splitlines()]
        for line in block.splitlines():
            if line == "...":
                continue
            words, expected = _numbers_apart(line)
            assert words in [other for other, _ in printed], line
            if "loss" in line or "hardest" in line:
                found = [values for other, values in printed if other == words]
                assert any(values == pytest.approx(expected, abs=1e-4) for values in found), line


def first_block(step: str) -> str:
    """What the page's section on a program says that it prints."""
    sections = re.split(r"^## ", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)
    section = next(text for text in sections[1:] if f"-m tutorial.{step}" in text)
    block = re.search(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert block, step
    return block[1]


@pytest.mark.slow
def test_two_processes_add_up_what_each_of_them_has(tmp_path: Path) -> None:
    output = run_program(command_of(FOLDER / f"{TALK}.py"), tmp_path)
    assert sorted(output.splitlines()) == first_block(TALK).splitlines()


def _numbers_apart(line: str) -> tuple[str, list[float]]:
    """A line without the numbers that have a decimal point or stand at its end, and those numbers."""
    number = r"\d+\.\d+|\d+$"
    return re.sub(number, "#", line), [float(value) for value in re.findall(number, line)]
