"""Commands in folders full of a user's files with names like ours leave these files alone."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Finish, Start

from mingpt.__main__ import main
from mingpt.base.command import run_command

USERS = (
    "mingpt-x/a", f"mingpt-{32 * '0'}-01234567/a", f"{32 * '0'}-0/a", "partial-results.csv", "partial-x/a",
    "probe-x", "probe-1", "claim-x", "step_x", "step_00000003.txt", "suspect-x", "damaged-x/a",
    "stacks/a.txt", "damaged-run.json", "tokenizer.json", "compare.png", "run.json.partial",
    "loss.png.partial",
)  # fmt: skip


@pytest.mark.slow
def test_no_command_changes_a_users_files(
    finish: Finish, start: Start, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is fresh, resumed by two workers, sampled and compared; an export and data are refused."""
    run, snapshots, memory, here = folders = [
        tmp_path / name for name in ("run", "snapshots", "memory", "here")
    ]
    mine = [folder / name for folder in folders for name in USERS]
    then = time.time() - 3 * 24 * 3600
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {path.name}")
        for one in (path, path.parent):
            os.utime(one, (then, then))
    settings: dict[str, Any] = {"snapshot__path": snapshots, "snapshot__memory_path": memory}
    settings |= {"snapshot__memory_every": 1, "snapshot__every": 3, "snapshot__resume": "changed"}
    finish(trainer__workers=1, trainer__max_steps=3, **settings)
    finish(trainer__workers=2, trainer__max_steps=5, **settings)
    sampled = start([sys.executable, "sample.py", str(run), "--tokens=3"])
    assert sampled.wait(60) == 0, sampled.err()
    monkeypatch.chdir(here)
    codes = {
        f"compare {run} {run}": 0,
        f"snapshots {run}": 0,
        f"timeline {run}": 0,
        f"plan run_dir={here} data.path={text}": 0,
        f"export {run} {here}": 2,
        f"prepare {text} --out={here}": 2,
    }
    assert {words: run_command(main, words.split()) for words in codes} == codes
    assert [path.read_text() for path in mine] == [f"mine: {path.name}" for path in mine]
    assert {*os.listdir(here)} == {*os.listdir(memory)} == {name.split("/")[0] for name in USERS}
