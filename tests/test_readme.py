"""The commands of README.md after those that start jobs, which are in test_docs.py."""

from pathlib import Path

import pytest
from support.pages import halves_of_the_readme, run_all


@pytest.mark.slow
def test_the_commands_of_the_readme_about_settings_data_and_results_run(text: Path, tmp_path: Path) -> None:
    """The commands run with one worker each, since the other half shows several workers."""
    before, lines = halves_of_the_readme()
    assert len(lines) > 8
    four = next(line for line in before if "run_dir=out/four" in line)
    ours = "python train.py " + four.partition("train.py ")[2]
    run_all([ours, *lines], text, tmp_path, trainer__workers=1)
    assert (tmp_path / "out/hf/config.json").exists() and (tmp_path / "out/again/tensorboard").is_dir()
