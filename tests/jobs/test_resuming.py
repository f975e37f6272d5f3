"""A job that is started again, from its own snapshots or from the weights of another run."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, assert_same_run, contents
from support.jobs import read_history, read_metric


@pytest.mark.slow
def test_a_finished_run_says_so_and_trains_on_only_if_a_longer_one_is_asked_for(
    finish: Finish, undisturbed: Path, copied: Path
) -> None:
    settings: dict[str, Any] = {"run_dir": copied, "trainer__workers": 1}
    before = contents(copied)
    evaluation = finish(**settings, trainer__eval_only=True)
    assert contents(copied) == before
    assert f"val/loss {read_metric(undisturbed, 'val/loss')[30]:.4f}" in evaluation.err()
    assert "already stands at step 30" in finish(**settings).err()
    assert_same_run(copied, undisturbed)
    longer = finish(**settings, trainer__max_steps=32, snapshot__resume="changed")
    assert "trainer.max_steps: 30 -> 32" in longer.err()
    changes = read_history(copied)["changes"]
    assert changes == [{"step": 30, "settings": ["trainer.max_steps: 30 -> 32"]}]
    assert max(read_metric(copied)) == 32


def test_a_run_begins_with_the_weights_of_another(
    finish: Finish, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The other text lacks a character, but keeps all rows: the first loss is far below a fresh model's."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("F", "f"))
    settings: dict[str, Any] = {"data__path": other, "trainer__max_steps": 0, "trainer__workers": 1}
    for origin in (undisturbed, undisturbed / "snapshots" / "step_00000030.safetensors"):
        run_dir = tmp_path / origin.name
        finish(run_dir=run_dir, snapshot__init_from=origin, **settings)
        assert read_metric(run_dir, "val/loss")[0] < read_metric(undisturbed, "val/loss")[10]
