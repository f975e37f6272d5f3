import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.config import UserError
from mingpt.snapshot import Damaged, Folder, Writer, open_anywhere, seal, unseal
from mingpt.stage import pack

TENSORS = {"model.wte": torch.arange(12.0).view(3, 4), "optimizer.wte.step": torch.tensor(3.0), "model.half": torch.ones(5, dtype=torch.bfloat16)}

CONTENT = pack(TENSORS)


def manifest(step: int, loss: float | None = None) -> dict[str, Any]:
    return {
        "step": step,
        "windows": step * 8,
        "config": {},
        "vocabulary": "ab",
        "metrics": {} if loss is None else {"val": {"step": step, "val/loss": loss}},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(str(tmp_path / "snapshots"))
    made.prepare()
    return made


def names(folder: Folder) -> list[str]:
    return sorted(path.name for path in Path(folder.root).iterdir())


def test_what_was_saved_is_read_back(folder: Folder) -> None:
    folder.write(manifest(12), CONTENT)
    assert names(folder) == ["step_00000012.json", "step_00000012.safetensors"]
    snapshot, wrong = folder.newest()
    assert snapshot and not wrong and snapshot.manifest["step"] == 12 and snapshot.manifest["bytes"] == len(snapshot.content)
    assert all(torch.equal(TENSORS[name], tensor) and TENSORS[name].dtype == tensor.dtype for name, tensor in snapshot.tensors().items())
    assert list(snapshot.part("optimizer.")) == ["wte.step"]


def test_the_same_state_gives_the_same_bytes(folder: Folder) -> None:
    for step in (1, 2):
        folder.write(manifest(step), pack(dict(reversed(TENSORS.items())) if step == 2 else TENSORS))
    assert folder.read(1).content == folder.read(2).content


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_every_flipped_bit_is_noticed_and_the_one_before_is_used(folder: Folder, kind: str) -> None:
    """Every bit of both files, one at a time."""
    folder.write(manifest(1), CONTENT)
    folder.write(manifest(2), CONTENT)
    path = Path(folder.path(f"step_00000002.{kind}"))
    whole = path.read_bytes()
    for bit in range(len(whole) * 8):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        with pytest.raises(Damaged):
            folder.read(2)


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_every_truncation_is_noticed(folder: Folder, kind: str) -> None:
    folder.write(manifest(2), CONTENT)
    path = Path(folder.path(f"step_00000002.{kind}"))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            folder.read(2)


@pytest.mark.parametrize("missing", ["json", "safetensors"])
def test_half_a_snapshot_is_set_aside_by_name(folder: Folder, missing: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    folder.write(manifest(1), CONTENT)
    for attempt in (1, 2):  # a second damaged snapshot of the same step does not overwrite the first
        folder.write(manifest(2), CONTENT)
        Path(folder.path(f"step_00000002.{missing}")).unlink()
        snapshot, wrong = folder.newest()
        assert snapshot and snapshot.manifest["step"] == 1 and list(wrong) == [2]
        folder.set_aside(2, wrong[2])
        assert f"snapshot of step 2 set aside as {folder.path(f'damaged-{attempt}-step_00000002.')}" in caplog.text
    assert len([name for name in names(folder) if name.startswith("damaged-")]) == 2 and folder.steps() == [1] == folder.steps("safetensors")


def test_a_manifest_that_is_valid_json_of_another_kind_is_damaged() -> None:
    for content in (b"[]", b"3", b"{}", b"null", b'"text"', seal({"step": 1})[:-1]):
        with pytest.raises(Damaged):
            unseal(content)


def test_a_format_of_the_future_is_named() -> None:
    with pytest.raises(UserError, match="format 99"):
        unseal(seal({"schema": 99, "step": 4}))


def test_the_newest_and_the_best_are_kept(folder: Folder) -> None:
    writer = Writer(folder, keep_last=2, keep_best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None)):
        writer.start(manifest(step, loss), TENSORS)
    writer.finish()
    assert folder.steps() == [5, 4, 2]
    again = Writer(folder, keep_last=1, keep_best=False)
    again.start(manifest(6), TENSORS)
    again.finish()
    assert folder.steps() == [6]


def test_a_write_that_fails_is_told_and_training_goes_on(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer(folder, keep_last=2, keep_best=True)
    shutil.rmtree(folder.root)
    writer.start(manifest(1), TENSORS)
    with pytest.raises(FileNotFoundError):
        writer.finish()
    assert "snapshot of step 1 could not be written" in caplog.text
    folder.prepare()
    writer.start(manifest(2), TENSORS)
    writer.finish()
    assert folder.steps() == [2]


def test_what_an_unfinished_write_left_is_removed(folder: Folder) -> None:
    Path(folder.path("partial-step_00000003.safetensors")).write_bytes(b"half")
    folder.prepare()
    assert names(folder) == []


def test_a_place_that_cannot_be_written_or_has_no_driver_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        Folder(str(tmp_path / "file" / "snapshots")).prepare()
    with pytest.raises(UserError, match="s4"):
        Folder("s4://bucket/snapshots")


def test_snapshots_in_memory_work_like_any_other_url() -> None:
    folder = Folder(f"memory://{random.random()}/snapshots")
    folder.prepare()
    assert folder.private and folder.newest() == (None, {})
    folder.write(manifest(1), CONTENT)
    folder.write(manifest(2), CONTENT)
    folder.files.pipe_file(folder.path("step_00000002.json"), b"torn")
    snapshot, wrong = folder.newest()
    assert snapshot and snapshot.manifest["step"] == 1
    folder.set_aside(2, wrong[2])
    folder.remove(1)
    assert folder.newest() == (None, {}) and len(folder.names()) == 2


def test_a_snapshot_is_found_from_its_run_its_folder_or_itself(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "run" / "snapshots"))
    folder.prepare()
    folder.write(manifest(7), CONTENT)
    for where in (
        tmp_path / "run",
        folder.root,
        folder.path("step_00000007.safetensors"),
        folder.path("step_00000007.json"),
        f"file://{tmp_path}/run/",
    ):
        assert open_anywhere(str(where)).manifest["step"] == 7
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text(json.dumps({"snapshot": {"path": folder.root}}))
    assert open_anywhere(str(tmp_path / "other")).manifest["step"] == 7
    with pytest.raises(UserError, match="there is no snapshot in"):
        open_anywhere(str(tmp_path / "nowhere"))


def test_a_removal_that_was_cut_short_is_finished_later(folder: Folder) -> None:
    for step in (1, 2):
        folder.write(manifest(step), CONTENT)
    Path(folder.path("step_00000001.json")).unlink()
    writer = Writer(folder, keep_last=1, keep_best=False)
    writer.start(manifest(3), TENSORS)
    writer.finish()
    assert folder.steps("safetensors") == [3]
