"""`python -m mingpt compare` says which run is best, where runs begin to differ, and why."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden import Golden
from support.runs import make_run as make_start
from support.snapshots import TENSORS, make_manifest, make_store, write

from mingpt.config import to_yaml
from mingpt.config.cli import build
from mingpt.report.history import RunHistory
from mingpt.tools.compare import judge, main, read_run

Compare = Callable[..., tuple[int, list[str]]]
RECORDED = "on record as different: "


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """A function that compares runs, from an empty folder; returns the exit code and the lines."""
    monkeypatch.chdir(tmp_path)

    def compare(*words: str) -> tuple[int, list[str]]:
        return main(words), capsys.readouterr().out.splitlines()

    return compare


def make_run(
    folder: Path,
    records: Sequence[Mapping[str, float]] = (),
    settings: Mapping[str, Any] | None = None,
    changes: Sequence[tuple[int, str]] = (),
    **inputs: Any,
) -> None:
    """Make a run folder without snapshots; `settings` and `inputs` are those that have no default value."""
    folder.mkdir()
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "tra']))
    if settings is not None:
        (folder / "config.yaml").write_text(to_yaml(build(dict(settings))))
        history = RunHistory(folder, "id", {})
        history.content["inputs"] = {"data": "a", "tokenizer": "b", "software": {"threads": 1}, **inputs}
        history.content["changes"] = [{"step": step, "settings": [text]} for step, text in changes]
        history.start_generation(make_start(folder))


def make_records(first: int = 31) -> list[dict[str, float]]:
    """Records of 31 steps; from step `first` on, the gradient's norm is higher."""
    return [
        {"step": step, "train/loss": 2.5, "grad_norm": 2.5 if step < first else 3.0} for step in range(31)
    ]


@pytest.mark.parametrize(
    ("settings", "facts", "finding"),
    [
        ({}, {}, "cannot tell: nothing on record differs"),
        ({"trainer.micro_batch_size": 4}, {}, f"{RECORDED}trainer.micro_batch_size"),
        ({}, {"software": {"threads": 2}}, f"{RECORDED}software.threads"),
        ({"snapshot.every": 5}, {}, f"{RECORDED}snapshot.every"),
        ({"snapshot.every": 5, "seed": 2}, {"tokenizer": "c"}, f"{RECORDED}seed, tokenizer"),
        ({"seed": 2, "trainer.batch_size": 8}, {"changes": [(12, "trainer.batch_size: 16 -> 8")]},
         f"{RECORDED}seed, trainer.batch_size, changes"),
    ],
)  # fmt: skip
def test_what_is_on_record_as_different_is_named(
    settings: dict[str, Any], facts: dict[str, Any], finding: str, tmp_path: Path, compare: Compare
) -> None:
    """Settings that cannot change the result are named only if no other differs."""
    make_run(tmp_path / "a", make_records(), {})
    make_run(tmp_path / "b", make_records(9), settings, **facts)
    code, lines = compare("a", "b")
    assert (code, lines[-1]) == (1, finding), lines
    assert "grad_norm differs from step 9 on: 2.5 and 3" in lines


@pytest.mark.parametrize(
    ("changed", "damage", "finding"),
    [
        ({}, bytes, "the same bits: 0 values, tensors of step 8"),
        ({"model.wte": TENSORS["model.wte"] * (1 + 2**-23)}, bytes, "step_00000008.safetensors differs"),
        ({"optimizer.wte.step": torch.tensor(0.5)}, bytes, "step_00000008.optimizer.safetensors differs"),
        ({"new": torch.ones(1)}, bytes, "step_00000008.safetensors differs"),
        ({}, lambda content: content[:-1] + bytes(1), "the snapshot of step 8 of b is damaged: its file"),
        ({}, lambda content: content[:9], "the snapshot of step 8 of b is damaged: its file"),
    ],
)  # fmt: skip
def test_tensors_of_the_same_step_are_compared_unless_a_snapshot_is_damaged(
    changed: dict[str, torch.Tensor], damage: Callable[[bytes], bytes], finding: str,
    tmp_path: Path, compare: Compare,
) -> None:  # fmt: skip
    for name, tensors in (("a", TENSORS), ("b", TENSORS | changed)):
        make_run(tmp_path / name)
        write(make_store(tmp_path / name), make_manifest(8), tensors)
    path = tmp_path / "b" / "snapshots" / "step_00000008.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    code, lines = compare("a", "b")
    assert (code, finding in "\n".join(lines)) == ("same" not in finding, True)
    assert lines[3] == "compare.png is not drawn: no loss is on record"
    assert not (tmp_path / "compare.png").exists()


def test_a_picture_is_drawn_and_a_file_of_the_users_stays(tmp_path: Path, compare: Compare) -> None:
    make_run(tmp_path / "a", make_records())
    (tmp_path / "my.png").write_text("mine")
    compare("a", "a", "--plot", "my.png")
    compare("a", "a")
    assert (tmp_path / "my.png").read_text() == "mine"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


A = (2.5, 2.6, 2.4)
FASTER = {"optimizer.learning_rate": 0.014}


def make_groups(
    folder: Path, losses: Sequence[float], settings: Mapping[str, Any], **inputs: Any
) -> list[str]:
    """Make the runs of A, and those of B with `settings`, `inputs` and `losses`; return their names.

    The losses are those of step 9. Seeds are 0, 1, 2 and so on. A was also evaluated later.
    """
    names = list[str]()
    for seed, loss in enumerate(A):
        names.append(f"a-{seed}")
        records = [{"step": 9, "val/loss": loss}, {"step": 340, "val/loss": 1.0}]
        make_run(folder / names[-1], records, {"seed": seed}, code="8a")
    for seed, loss in enumerate(losses):
        names.append(f"b-{seed}")
        records = [{"step": 9, "val/loss": loss}]
        make_run(folder / names[-1], records, {"seed": seed, **settings}, **{"code": "8a", **inputs})
    return names


@pytest.mark.parametrize(
    ("losses", "settings", "inputs", "code", "verdict"),
    [
        ((2.4, 2.5, 2.3), FASTER, {}, 4, "B is better"),
        ((2.4, 2.49, 2.33), {}, {"code": "9f"}, 4, "B is better"),
        ((2.75, 2.85, 2.65), FASTER, {}, 3, "A is better"),  # all differences are the same number
        ((2.52, 2.63, 2.42), {"model.dropout": 0.1}, {}, 3, "A is better"),
        ((2.4, 2.51, 2.3), {"trainer.max_steps": 9}, {}, 3, "A is better"),  # A at step 340
        ((2.3, 2.55, 2.38), FASTER, {}, 1, "cannot tell"),
        ((2.52, 2.57, 2.41), {"trainer.micro_batch_size": 4}, {}, 1, "cannot tell"),
        ((2.4, 2.5), FASTER, {}, 1, "cannot tell: needs three seeds"),
        ((2.4, 2.5, 2.3), {"data.block_size": 64}, {}, 1, "cannot tell: val/loss depends on data.block_size"),
        (A, {"trainer.workers": 2}, {}, 0, "the same bits"),
        (A, {"optimizer.grad_clip": 9.0}, {}, 0, "the same bits"),
    ],
)  # fmt: skip
def test_which_of_two_groups_is_better_is_told_by_the_differences_for_each_seed(
    losses: Sequence[float], settings: dict[str, Any], inputs: dict[str, Any], code: int, verdict: str,
    tmp_path: Path, compare: Compare,
) -> None:  # fmt: skip
    found, lines = compare(*make_groups(tmp_path, losses, settings, **inputs), "--json")
    (told,) = json.loads("\n".join(lines))["verdicts"]
    assert (found, told["verdict"]) == (code, verdict)
    assert [*told["facts"]] == [*settings, *inputs]


def test_the_rule_is_a_paired_t_interval() -> None:
    """The mean of four differences is a little over 3.182 standard errors from zero, or a little under it."""
    verdicts = {
        spread: judge([-1 - spread, -1 + spread, -1 - spread, -1 + spread])[2] for spread in (0.544, 0.5445)
    }
    assert verdicts == {0.544: "B is better", 0.5445: "cannot tell"}
    assert judge([0.1 * 1.2 ** (number % 2) for number in range(40)], "C")[2] == "A is better"
    assert judge([-1.0] * 3, "C") == (-1.0, 0.0, "C is better")


def test_a_program_reads_the_groups_and_the_verdict_of_each_as_json(
    tmp_path: Path, compare: Compare, golden: Golden
) -> None:
    """There is a third group, of one run of an older version, which has not recorded its code."""
    names = make_groups(tmp_path, (2.4, 2.49, 2.33), FASTER, code="9f")
    make_run(tmp_path / "c", [{"step": 9, "val/loss": 2.0}], {"seed": 1, "model.n_layer": 1})
    code, lines = compare(*names, "c", "--json")
    found = json.loads("\n".join(lines))
    assert (code, (tmp_path / "compare.png").exists()) == (1, False)
    assert found["groups"] == {
        "A": dict(zip("012", names[:3], strict=True)),
        "B": dict(zip("012", names[3:], strict=True)),
        "C": {"1": "c"},
    }
    assert [pair["other"] for pair in found["comparisons"]] == [*names[3:], "c"]
    first, second = found["verdicts"]
    assert first["pairs"] == {"0": [2.5, 2.4], "1": [2.6, 2.49], "2": [2.4, 2.33]}
    assert (first["other"], first["steps"], first["verdict"]) == ("B", [9, 9], "B is better")
    assert (first["mean"], first["standard_deviation"]) == pytest.approx((-0.0933, 0.0208), abs=1e-4)
    assert second["facts"] == {"model.n_layer": ["3", "1"]} and second["mean"] is None
    golden("\n".join(compare(*names, "c")[1][-14:]))


def test_a_verdict_on_two_runs_says_that_three_seeds_are_needed(tmp_path: Path, compare: Compare) -> None:
    make_groups(tmp_path, (2.4, 2.5), FASTER)
    code, lines = compare("a-0", "b-0")
    assert (code, lines[-1]) == (1, "cannot tell: needs three seeds")
    assert "val/loss at step 9, the last of both runs: 2.5000 and 2.4000, lower in b-0" in lines
    assert f"{RECORDED}optimizer.learning_rate" in lines
    (tmp_path / "b-1" / "config.yaml").unlink()
    code, lines = compare("a-1", "b-1", "b-0")
    assert (code, lines[-1]) == (1, f"{RECORDED}seed, optimizer.learning_rate")


def test_the_snapshots_of_a_run_are_those_that_other_commands_take(tmp_path: Path) -> None:
    """The folder of snapshot.path comes before snapshots/ in the run folder."""
    old, new = make_store(tmp_path / "run"), make_store(tmp_path / "elsewhere")
    for store in (old, new):
        write(store, make_manifest(20))
    (tmp_path / "run" / "config.yaml").write_text(f"snapshot:\n  path: {new.root}\n")
    assert [store.root for store in read_run(str(tmp_path / "run")).stores.values()] == [new.root]
