"""The start of a generation, in one process; tests/jobs/ tests whole jobs."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL
from support.ranks import run_ranks
from support.runs import make_run
from support.single_process import SingleProcess
from support.snapshots import file_names, make_manifest, make_store, write

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.config import Config, SnapshotConfig, TrainerConfig, to_dict
from mingpt.config.cli import build
from mingpt.data import TextData
from mingpt.distributed import DistributedContext
from mingpt.report.history import RunHistory
from mingpt.snapshot import MemoryFolder, Store, StoredState, find_latest
from mingpt.snapshot.manifest import is_distrusted
from mingpt.snapshot.search import Found, Offer
from mingpt.training.contents import check_model, tensor_shapes
from mingpt.training.resume import (
    check_nothing_is_lost,
    check_snapshot,
    make_check,
    prepare_store,
    report_skipped,
)
from mingpt.training.run_folder import RunFolder, claim_run_folder, read_known_run
from mingpt.training.start import find_snapshot

RUN_ID = "0123456789abcdef" * 2
CHARACTERS = {"tokenizer": {"kind": "char", "vocab_size": 9}}
NEVER, AUTO = Config(snapshot=SnapshotConfig(resume="never")), Config()
EVAL_ONLY = Config(trainer=TrainerConfig(eval_only=True))


def latest(*offers: Offer) -> Found:
    """A search result without a valid snapshot, with these offers."""
    return Found(None, "out/run/snapshots", offers)


def offer(step: int, fault: str, is_corrupt: bool = True, rank: int = 0) -> Offer:
    """A snapshot on the disk of rank `rank` that has a fault."""
    return Offer(step, True, "out/run/snapshots", rank, 0, fault=fault, is_corrupt=is_corrupt)


AT_THE_START = offer(0, "its checksum does not hold")
CORRUPT = offer(5, "its tensor file is missing")
UNREADABLE = offer(5, "its manifest cannot be read: Input/output error", False)
NO_FOLDER = offer(-1, "the folder out/run/snapshots cannot be read: Stale file handle", False)


@pytest.mark.parametrize("is_restart", [False, True])
@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (CORRUPT, r"no valid snapshot is left in out/run/snapshots \(step 5: its tensor file is missing"),
        (UNREADABLE, "in out/run/snapshots cannot be read .step 5: its manifest cannot be read"),
        (NO_FOLDER, "cannot be read .the folder out/run/snapshots cannot be read: Stale file handle"),
    ],
)
def test_a_job_that_has_completed_a_snapshot_never_starts_again_at_0_by_itself(
    seen: Offer, expected: str, is_restart: bool
) -> None:
    """This holds whichever worker has seen the snapshot."""
    for rank in (0, 1):
        with pytest.raises(UserError, match=expected) as refusal:
            check_nothing_is_lost(
                latest(offer(seen.step, seen.fault, seen.is_corrupt, rank)), AUTO, is_restart
            )
        assert refusal.value.may_pass == (seen is not CORRUPT)
    if seen is not CORRUPT:  # it may be valid
        with pytest.raises(UserError, match=expected):
            check_nothing_is_lost(latest(seen), NEVER, is_restart)


@pytest.mark.parametrize("is_restart", [False, True])
@pytest.mark.parametrize("offers", [[], [AT_THE_START]])
def test_a_job_that_died_before_its_first_snapshot_starts_at_0(offers: list[Offer], is_restart: bool) -> None:
    check_nothing_is_lost(latest(*offers), AUTO, is_restart)


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_snapshot_that_only_run_json_tells_of_is_evidence_too(is_restart: bool) -> None:
    """The snapshot was on the disk of a node that is gone."""
    with pytest.raises(UserError, match=r"run\.json tells of one of step 40, which no node has"):
        check_nothing_is_lost(latest(), AUTO, is_restart, recorded_step=40)


def test_a_restart_without_any_run_json_waits_for_the_disk_of_the_run_folder() -> None:
    with pytest.raises(UserError, match=r"run\.json is gone: the disk of run_dir may be away") as refusal:
        check_nothing_is_lost(latest(), AUTO, is_restart=True, has_records=False)
    assert refusal.value.may_pass
    check_nothing_is_lost(latest(), AUTO, is_restart=False, has_records=False)


@pytest.mark.parametrize(("offers", "recorded_step"), [([], 40), ([CORRUPT], 0)])
def test_a_job_that_is_told_to_begin_anew_does_so(offers: list[Offer], recorded_step: int) -> None:
    check_nothing_is_lost(latest(*offers), NEVER, is_restart=False, recorded_step=recorded_step)
    with pytest.raises(UserError, match="no valid snapshot is left"):
        check_nothing_is_lost(latest(*offers), NEVER, is_restart=True, recorded_step=recorded_step)


def test_each_snapshot_that_is_passed_over_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    report_skipped(latest(UNREADABLE, UNREADABLE, NO_FOLDER, NO_FOLDER), "here", AUTO)
    assert len(caplog.messages) == 2
    caplog.clear()
    report_skipped(latest(CORRUPT), "here", AUTO)
    assert caplog.messages == [], "a run that trains names it when it sets it aside"
    report_skipped(latest(CORRUPT), "here", EVAL_ONLY)
    assert caplog.messages == ["snapshot of step 5 in here skipped: its tensor file is missing"]


def test_a_step_that_any_worker_cannot_read_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker of the job sees the same step as corrupt."""
    store = Store(str(tmp_path / "snapshots"), retries_s=())
    store.prepare()
    for step in (5, 10):
        write(store, make_manifest(step))  # another model's: corrupt
    context = SingleProcess()
    gather, unreadable = context.gather_on_all, offer(5, UNREADABLE.fault, False, rank=1)

    def gather_two(work: Callable[[], Any]) -> list[Any]:
        results = gather(work)
        return [*results, [unreadable]] if isinstance(results[0], list) else results

    monkeypatch.setattr(context, "gather_on_all", gather_two)
    found = find_latest(store, [], context, check_model, is_restart=False)
    assert sorted(found.corrupt(0)) == [10]


def test_of_the_nodes_that_share_a_folder_one_sets_a_corrupt_snapshot_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path)
    write(store, make_manifest(5))

    def prepare(context: DistributedContext) -> None:
        memory = MemoryFolder(str(tmp_path), "id", tmp_path)
        folder = RunFolder(tmp_path, True, keeps_snapshots=context.rank == 0, is_shared=True)
        prepare_store(store, memory, context, latest(CORRUPT), folder)

    assert run_ranks(2, prepare) == [None, None]
    (line,) = caplog.messages
    assert (tmp_path / "snapshots" / "damaged-1-step_00000005.json").exists() and "damaged-1-" in line


def test_a_folder_that_cannot_be_listed_is_what_a_worker_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "snapshots"), retries_s=())

    def fail(path: str, detail: bool = True) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(store.files, "ls", fail)
    found = find_latest(store, [], SingleProcess(), check_model, is_restart=True)
    expected = f"the folder {store.url} cannot be read: Stale file handle"
    assert found.offers == [Offer(-1, True, store.url, 0, 0, fault=expected)]


@pytest.mark.parametrize(
    ("changed", "step", "is_refused"),
    [
        ("", 500, False),
        ("seed", 500, True),
        ("seed", 100, False),
        ("data", 500, True),
        ("log_every", 500, False),
    ],
)
def test_a_restart_does_not_go_on_from_a_newer_snapshot_of_another_run(
    changed: str, step: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that joins may have one. Step 100, from which the job began, may have other settings."""
    monkeypatch.setattr("mingpt.training.resume.check_model", lambda *_: None)
    config = build(SMALL | {"trainer.max_steps": 500})
    tokenizer = {"kind": "char", "vocab_size": 20}
    data = TextData(b"To be, or not to be, that is the question.\n" * 40, config.data)
    settings = to_dict(config)
    settings["seed"] += changed == "seed"
    settings["trainer"]["log_every"] += changed == "log_every"
    sha256 = "0" * 64 if changed == "data" else data.fingerprint
    about = {"path": "x", "sha256": sha256}
    manifest = make_manifest(step, config=settings, data=about, tokenizer=tokenizer)
    check = make_check(config, data, job_start=100, distrusted=[])
    if is_refused:
        with pytest.raises(UnreadableSnapshot, match="it is not of this job"):
            check(manifest, {}, None)
    else:
        check(manifest, {}, None)
    make_check(config, data, job_start=None, distrusted=[])(manifest, {}, None)
    with pytest.raises(CorruptSnapshot, match="computed differently"):
        make_check(config, data, job_start=None, distrusted=[(step - 1, 2)])(manifest, {}, None)


@pytest.mark.parametrize(
    ("step", "change", "expected"),
    [
        (30, {}, "lacks the tokenizer of the text"),
        (30, CHARACTERS | {"windows": 2**63 - 1}, "no run reads 92"),
        (31, CHARACTERS, r"past its own trainer\.max_steps"),
        (2**63 - 1, CHARACTERS | {"windows": 2**63 - 1}, r"past its own trainer\.max_steps"),
    ],
)
def test_what_no_run_has_written_of_this_text_is_damage(
    step: int, change: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these the run could not go on; the snapshot before may be right."""
    monkeypatch.setattr("mingpt.training.resume.check_model", lambda *_: None)
    config = build(SMALL | {"trainer.max_steps": 30})
    data = TextData(b"To be", config.data)
    about = {"path": "x", "sha256": data.fingerprint}
    manifest = make_manifest(step, config=to_dict(config), data=about, **change)
    with pytest.raises(CorruptSnapshot, match=expected):
        make_check(config, data, job_start=None, distrusted=[])(manifest, {}, None)


def check_changed(
    changes: dict[str, Any], arch: str, resume: str, is_restart: bool = False, run: str | None = None
) -> list[str]:
    """Check a snapshot of `run` against a folder of run "abc" and settings with these changes."""
    began = SMALL | {"model.arch": arch}
    data = TextData(b"To be, or not to be, that is the question.\n" * 40, build(began).data)
    about = {"path": "x", "sha256": data.fingerprint}
    manifest = make_manifest(30, config=to_dict(build(began)), data=about, run=run)
    shapes = tensor_shapes(manifest.settings, manifest.tokenizer.vocab_size)
    stored = StoredState(manifest, None, [], shapes, 0, None)
    config = build(began | {"snapshot.resume": resume} | changes)
    return check_snapshot(stored, config, "out/run/snapshots", data, is_restart, run_id="abc")


@pytest.mark.parametrize("resume", ["auto", "changed"])
@pytest.mark.parametrize(
    ("changes", "arch"),
    [
        ({"model.n_layer": 3}, "modern"),
        ({"model.n_embd": 64}, "modern"),
        ({"data.vocab_size": 300}, "modern"),
        ({"data.block_size": 64}, "gpt2"),
    ],
)
def test_another_model_needs_another_run_dir(changes: dict[str, Any], arch: str, resume: str) -> None:
    with pytest.raises(UserError, match=r"another model \(.*\): set that back, or choose another run_dir$"):
        check_changed(changes, arch, resume)


@pytest.mark.parametrize(
    ("changes", "arch"),
    [
        ({"data.block_size": 16}, "gpt2"),
        ({"data.block_size": 64}, "modern"),
        ({"optimizer.name": "adamw"}, "modern"),
        ({"trainer.max_steps": 60}, "modern"),
    ],
)
def test_a_change_that_the_weights_fit_may_be_asked_for(changes: dict[str, Any], arch: str) -> None:
    with pytest.raises(UserError, match=r"go on with the new ones by snapshot\.resume=changed"):
        check_changed(changes, arch, "auto")
    assert len(check_changed(changes, arch, "changed")) == 1


def test_snapshots_of_another_run_are_refused_unless_a_job_has_begun_or_only_evaluates() -> None:
    with pytest.raises(
        UserError, match=r"^out/run/snapshots holds snapshots of run def, and .* of run abc: "
    ):
        check_changed({}, "modern", "changed", run="def")
    check_changed({}, "modern", "auto", run="abc")
    check_changed({}, "modern", "auto", is_restart=True, run="def")
    check_changed({"trainer.eval_only": True}, "modern", "auto", run="def")


def test_a_job_that_has_begun_is_known_by_run_json_if_the_store_is_lost(tmp_path: Path) -> None:
    """All generations have one agent, this process. The first two fail before they pass the checks."""
    context = SingleProcess()
    context.exit.on_job_end = lambda release: None  # type: ignore[method-assign]
    folder = RunFolder(tmp_path, True, True, True)
    for is_restart in (False, False, True):
        claim = claim_run_folder(context, folder)
        if is_restart:
            RunHistory(tmp_path, "abc", {}).start_generation(make_run(tmp_path, job=claim.holder.job))
        assert read_known_run(context, folder, claim.holder.job).is_restart == is_restart


def test_an_evaluation_compares_what_can_change_it() -> None:
    evaluation = {"trainer.eval_only": True, "trainer.max_steps": 7, "seed": 3, "trainer.batch_size": 4}
    assert check_changed(evaluation, "modern", "auto") == []
    for key, value in {"data.block_size": 16, "trainer.dtype": "bfloat16", "data.val_fraction": 0.5}.items():
        with pytest.raises(UserError, match=key):
            check_changed(evaluation | {key: value}, "modern", "auto")


def distrust(run_dir: Path, before_generation: int, generations: int = 1) -> None:
    """Write a run.json in which workers computed wrongly after step 20."""
    history = RunHistory(run_dir, RUN_ID, {})
    for _ in range(generations):
        history.start_generation(make_run(run_dir))
    history.note_distrusted(25, 20, before_generation, ["worker 1 on b (cpu)"])


def test_what_a_node_that_was_away_saved_before_workers_differed_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its snapshots are the newest, on disk and in memory, and its run.json knows of no difference."""
    monkeypatch.setattr("mingpt.training.resume.check_model", lambda *_: None)

    def work(context: DistributedContext) -> tuple[int, list[str], list[str]]:
        context.rendezvous = None
        node = tmp_path / str(context.rank)
        config = build(SMALL | {"run_dir": str(node / "run"), "snapshot.memory_path": str(node)})
        store, folder = make_store(node), RunFolder(node / "run", True, True, False)
        memory = MemoryFolder(str(node), RUN_ID, folder.path)
        folder.path.mkdir()
        if context.rank == 2:
            RunHistory(folder.path, RUN_ID, {}).start_generation(make_run(folder.path))
            write(store, make_manifest(40, generation=1))
            memory.root.mkdir(mode=0o700)
            write(Store(str(memory.root / RUN_ID)), make_manifest(45, generation=1))
        else:
            distrust(folder.path, before_generation=2, generations=2)
            write(store, make_manifest(20, generation=1))
            write(store, make_manifest(30, generation=2))
        known = read_known_run(context, folder, job="another")
        found = find_snapshot(config, context, folder, store, TextData(b"To be", config.data), known)
        assert found.state
        prepare_store(store, memory, context, found, folder)
        in_memory = [name for one in memory.stores() for name in one.names()]
        return found.state.manifest.step, file_names(store), in_memory

    first, second, third = run_ranks(3, work)
    kinds = ("json", "optimizer.safetensors", "safetensors")
    assert first == second == (30, [f"step_{step:08d}.{kind}" for step in (20, 30) for kind in kinds], [])
    assert third == (30, [f"suspect-1-step_00000040.{kind}" for kind in kinds], [])
    assert "snapshot of step 40 set aside as" in caplog.text


def test_a_generation_is_trusted_after_workers_differed_in_a_run_folder_with_fewer_generations(
    tmp_path: Path,
) -> None:
    """The snapshots, at a URL, are of generation 5; the run went on from there in a new run folder."""
    distrust(tmp_path, before_generation=6)
    folder = RunFolder(tmp_path, True, True, True)
    known = read_known_run(SingleProcess(), folder, job="another")
    ((after, before),) = [(entry["after"], entry["before_generation"]) for entry in known.distrusted]
    assert not is_distrusted(make_manifest(30, generation=known.generation), [(after, before)])
