"""Every mistake shows its effect, and the right way beside it does not have it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked import WAYS
from support.pages import command_of

from mingpt.tools.jobs import ROOT

# What must hold for the two numbers that a program prints last.
EFFECTS: dict[str, Callable[[float, float], bool]] = {
    "additive_mask": lambda wrong, right: wrong > 0.01 and right == 0,
    "all_reduce_every_micro_batch": lambda wrong, right: wrong == 8 and right == 1,
    "barrier_hides_race": lambda wrong, right: wrong == 100 and right == 200,
    "batch_grows_with_workers": lambda wrong, right: wrong > 0.5 and right < 0.0001,
    "batch_norm": lambda wrong, right: wrong > 0.01 and right < 0.0001,
    "clip_before_reduce": lambda wrong, right: wrong > 0.1 and right < 0.0001,
    "clip_before_unscale": lambda wrong, right: wrong > 4.7 and right < 3.8,
    "collective_on_rank_0": lambda wrong, right: wrong == 2 and right == 0,
    "every_local_rank_0": lambda wrong, right: wrong == 0 and right > 40_000,
    "flipped_bit": lambda wrong, right: wrong >= 80 and right == 0,
    "learning_rate_not_scaled": lambda wrong, right: wrong > 2.5 and right < 2.1,
    "loss_not_divided": lambda wrong, right: wrong == 20 and right == 0,
    "module_prefix": lambda wrong, right: wrong == 0 and right == 16,
    "no_set_epoch": lambda wrong, right: wrong == 400 and right <= 20,
    "only_snapshot": lambda wrong, right: wrong == 0 and right == 100,
    "padded_evaluation": lambda wrong, right: wrong > 0.005 and right < 0.00001,
    "part_of_each_rank": lambda wrong, right: wrong == 0 and right == 4096,
    "repeated_augmentation": lambda wrong, right: wrong == 16 and right == 128,
    "same_dropout_seed": lambda wrong, right: wrong > 1.4 and 0.9 < right < 1.1,
    "uneven_batches": lambda wrong, right: wrong == 16 and right == 17,
    "unused_parameters": lambda wrong, right: wrong == 1 and right == 10,
}
QUICK = {"no_set_epoch", "additive_mask"}
FOLDER = ROOT / "tutorial" / "mistakes"
PAGE = ROOT / "tutorial" / "README.md"


def test_every_program_of_the_folder_is_checked() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"ranks"} == set(EFFECTS)


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(EFFECTS)]
)
def test_a_mistake_has_an_effect_and_the_right_way_has_not(
    name: str, run: Callable[[str, Path], str], tmp_path: Path
) -> None:
    output = run(command_of(FOLDER / f"{name}.py"), tmp_path)
    numbers = []
    for word, line in zip(("wrong", "right"), output.splitlines()[-2:], strict=True):
        number = re.fullmatch(rf"{word}: (\d+(?:\.\d+)?) \S.*", line)
        assert number, line
        numbers.append(float(number[1]))
    assert EFFECTS[name](*numbers), output
    assert not EFFECTS[name](*reversed(numbers)), "the condition does not tell the two apart"
    shown = re.search(rf"^\| \[{name}\]\([^|]*\| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    assert shown, "the page's table has no such row"
    assert numbers == pytest.approx([float(shown[1]), float(shown[2])], rel=0.1, abs=1e-3)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"mingpt", "tutorial", "data"}
