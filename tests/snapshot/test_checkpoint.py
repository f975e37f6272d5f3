"""Checkpoint in a loop of one's own: what is saved comes back, bit for bit, or is refused by its path."""

import contextlib
import errno
import functools
import itertools
import os
import random
import subprocess
import sys
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.faults import FaultyDisk
from support.forks import fork_ranks
from support.golden import Golden
from support.jobs import ROOT, Start
from support.properties import examples
from support.snapshots import file_names, make_manifest, make_store, write
from support.web import object_store
from torch import Tensor, nn, optim
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from mingpt.base.errors import ClaimLost, UserError
from mingpt.config import Config, to_dict
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Checkpoint, Manifest
from mingpt.snapshot.claim import Claim
from mingpt.snapshot.layout import DTYPES


@pytest.fixture(autouse=True)
def no_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise threads would go on after a test, and hasten the clock of test_claim.py."""
    monkeypatch.setattr(Claim, "keep_renewing", Mock())


def saved(folder: Path, step: int, state: dict[str, Any], keep: int = 3) -> Checkpoint:
    """The Checkpoint that has saved this state and released the folder, as at the end of a process."""
    checkpoint = Checkpoint(folder, keep)
    checkpoint.save(step, state)
    checkpoint.wait()
    checkpoint.claim.release()
    return checkpoint


# What is saved and comes back.


def make_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """A tensor of any bits, NaN and -0.0 among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    content = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (content % 2 if dtype == torch.bool else content).view(dtype).view(shape)


TENSORS = st.builds(
    make_tensor,
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    TENSORS | KEYS | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def form(value: Any) -> Any:
    """What is equal only for values of the same types and bits."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return type(value), [(form(key), form(one)) for key, one in value.items()]
    return type(value), list(map(form, value)) if isinstance(value, (list, tuple)) else repr(value)


@examples(100)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_nested_values_come_back_with_their_types_and_bits(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder), 7, {"all": state})
        found: dict[str, Any] = {"all": None}
        assert Checkpoint(folder).load(found) == 7
    assert form(found["all"]) == form(state)


def test_a_million_entries_come_back(tmp_path: Path) -> None:
    entries: dict[str, Any] = {"many": list(range(500_000)), "keys": dict.fromkeys(range(500_000), 0.5)}
    saved(tmp_path, 1, entries)
    found: dict[str, Any] = {"many": None, "keys": None}
    Checkpoint(tmp_path).load(found)
    assert found == entries


def test_tied_tensors_are_stored_once_and_views_are_filled_in_place(tmp_path: Path) -> None:
    weight = torch.arange(40_000.0)
    state = {"tied": [weight, weight.view(200, 200), weight], "part": weight[::2]}
    saved(tmp_path, 1, state)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 2.6 * weight.nbytes
    weight.zero_()
    Checkpoint(tmp_path).load(state)
    assert torch.equal(weight, torch.arange(40_000.0))


def test_a_conjugated_view_of_a_tensor_is_another_tensor(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j])
    saved(tmp_path, 1, {"plain": number, "conjugate": number.conj(), "imaginary": number.conj().imag})
    found = {"plain": number.clone(), "conjugate": number.clone(), "imaginary": torch.zeros(1)}
    Checkpoint(tmp_path).load(found)
    assert [one.item() for one in found.values()] == [1 + 2j, 1 - 2j, -2]


class Scaled(nn.Module):
    """It stores its weight in another unit since its version 2."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Parameter(torch.ones(1))  # the name that DDP adds, and no prefix

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, metadata: dict[str, Any], *more: Any
    ) -> None:
        if metadata.get("version") != 2:
            state_dict[f"{prefix}module"] = state_dict[f"{prefix}module"] * 10
        super()._load_from_state_dict(state_dict, prefix, metadata, *more)


def test_a_module_is_told_the_version_of_its_weights(tmp_path: Path) -> None:
    saved(tmp_path, 1, {"model": Scaled()})
    model = Scaled()
    Checkpoint(tmp_path).load(OrderedDict(model=model))
    assert [weight.item() for weight in model.parameters()] == [1.0]


def test_torchs_default_device_changes_nothing(tmp_path: Path) -> None:
    with torch.device("meta"):
        saved(tmp_path, 1, {"x": torch.ones(3, device="cpu")})
        state = {"x": torch.zeros(3, device="cpu")}
        assert Checkpoint(tmp_path).load(state) == 1
    assert state["x"].tolist() == [1.0, 1.0, 1.0]


class CountingSGD(optim.SGD):
    """Its state also has a number that belongs to no parameter, as torch allows."""

    def step(self, closure: Any = None) -> Any:
        values: dict[Any, Any] = self.state
        values["calls"] = values.get("calls", 0) + 1
        return super().step(closure)


def test_an_optimizer_may_keep_values_that_belong_to_no_parameter(tmp_path: Path) -> None:
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    optimizer = CountingSGD(weights, lr=0.1, momentum=0.9)
    (weights[0] + weights[1]).sum().backward()
    optimizer.step()
    saved(tmp_path, 1, {"optimizer": optimizer})
    other = CountingSGD(weights, lr=0.1, momentum=0.9)
    Checkpoint(tmp_path).load({"optimizer": other})
    found: dict[Any, Any] = other.state
    assert found["calls"] == 1 and torch.equal(found[weights[1]]["momentum_buffer"], torch.ones(2))
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        Checkpoint(tmp_path).load({"optimizer": CountingSGD(weights[:1], lr=0.1, momentum=0.9)})


Parts = tuple[nn.Module, optim.Optimizer, Any, torch.Generator]
OPTIMIZERS: dict[str, Callable[[list[Tensor]], optim.Optimizer]] = {
    "SGD": functools.partial(optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": optim.AdamW,
    "fused AdamW": functools.partial(optim.AdamW, fused=True),
    "Adafactor": optim.Adafactor,
    "LBFGS": functools.partial(optim.LBFGS, max_iter=3),
    "Muon": lambda weights: optim.Muon([weight for weight in weights if weight.ndim == 2]),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": functools.partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": functools.partial(lr_scheduler.MultiStepLR, milestones=[3, 9, 9]),
    "CosineAnnealingLR": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "OneCycleLR": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=50),
    "LambdaLR": functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "SWALR": functools.partial(SWALR, swa_lr=0.05),
    "CyclicLR": functools.partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1),
}
CASES = [(name, "CosineAnnealingLR") for name in OPTIMIZERS] + [("SGD", name) for name in SCHEDULERS]


def make_parts(optimizer: str, scheduler: str) -> dict[str, Any]:
    """A state that trains: also an average of the weights, and a loss scale that is not the default."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    by = OPTIMIZERS[optimizer](list(model.parameters()))
    return {
        "model": model, "optimizer": by, "scheduler": SCHEDULERS[scheduler](by),
        "average": AveragedModel(model), "scaler": torch.amp.GradScaler("cpu"),
        "random": torch.Generator().manual_seed(3),
    }  # fmt: skip


def train(parts: dict[str, Any], steps: int) -> list[Tensor]:
    """The weights and their average after these steps."""
    model, optimizer = parts["model"], parts["optimizer"]
    for _ in range(steps):
        x = torch.randn(4, 6, generator=parts["random"])

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        parts["average"].update_parameters(model)
        parts["scheduler"].step()
    return [*model.state_dict().values(), *parts["average"].state_dict().values()]


@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
def test_twenty_steps_after_a_load_have_the_bits_of_a_training_without(
    optimizer: str, scheduler: str, tmp_path: Path
) -> None:
    parts = make_parts(optimizer, scheduler)
    train(parts, 7)
    parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    saved(tmp_path, 7, parts)
    expected, fresh = train(parts, 20), make_parts(optimizer, scheduler)
    assert Checkpoint(tmp_path).load(fresh) == 7
    assert all(map(torch.equal, train(fresh, 20), expected))
    assert fresh["scaler"].state_dict() == parts["scaler"].state_dict()


@pytest.mark.parametrize("loads", ["plain", "compiled"])
@pytest.mark.parametrize("saves", ["plain", "compiled"])
def test_what_torch_compile_adds_to_names_is_left_out_and_found(
    saves: str, loads: str, tmp_path: Path
) -> None:
    """DDP's names are tried with two ranks below."""
    kinds: dict[str, Callable[[nn.Module], Any]] = {"plain": lambda model: model, "compiled": torch.compile}
    models = [nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)) for _ in range(2)]
    saved(tmp_path, 1, {"model": kinds[saves](models[0])})
    Checkpoint(tmp_path).load({"model": kinds[loads](models[1])})
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


# What is refused.


REFUSED: dict[str, Any] = {
    "an object": {"a": {"b": [1, object()]}},
    "a function": {"hook": print},
    "a number of numpy": {"loss": np.float64(1.0)},
    "a sparse tensor": {"x": (torch.zeros(2).to_sparse(),)},
    "a tensor without memory": {"x": torch.empty(2, device="meta")},
    "a type of no file": {"x": torch.zeros(2, dtype=torch.complex128)},
    "a key": {"counts": {(1, b"x"): 2}},
    "an optimizer's own": {
        "optimizer": optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "hook": print}])
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_is_refused_by_its_path_before_anything_is_written(
    case: str, tmp_path: Path, golden: Golden
) -> None:
    with pytest.raises(UserError) as error:
        Checkpoint(tmp_path / "new").save(1, REFUSED[case])
    golden(str(error.value))
    assert not (tmp_path / "new").exists()


MODEL = nn.Linear(2, 2)
OTHERS: dict[str, dict[str, Any]] = {
    "less": {"model": MODEL},
    "more": {"model": MODEL, "seen": [torch.zeros(2)], "more": 1},
    "another shape": {"model": nn.Linear(3, 2), "seen": [torch.zeros(2)]},
    "another weight": {"model": nn.Linear(2, 2, bias=False), "seen": [torch.zeros(2)]},
    "another type": {"model": MODEL, "seen": [torch.zeros(2, dtype=torch.int64)]},
    "another kind": {"model": torch.zeros(2), "seen": [torch.zeros(2)]},
    "another length": {"model": MODEL, "seen": [torch.zeros(2), torch.zeros(2)]},
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_state_of_another_form_is_refused_by_the_path_and_nothing_is_changed(
    case: str, tmp_path: Path, golden: Golden
) -> None:
    saved(tmp_path, 1, {"model": nn.Linear(2, 2), "seen": [torch.ones(2)]})
    before = form(MODEL.state_dict())
    with pytest.raises(UserError) as error:
        Checkpoint(tmp_path).load(OTHERS[case])
    golden(str(error.value))
    assert form(MODEL.state_dict()) == before and not any(map(torch.any, OTHERS[case].get("seen", [])))


# Snapshots: which one is loaded, and which ones stay.


def test_nothing_is_found_in_a_new_place_and_the_newest_snapshots_stay(tmp_path: Path) -> None:
    checkpoint, state = Checkpoint(tmp_path / "new", keep=2), {"x": torch.zeros(1)}
    assert checkpoint.load(state) is None
    for step in range(5):
        state["x"] += 1
        checkpoint.save(step, state)
    checkpoint.wait()
    assert sorted(path.name for path in tmp_path.glob("new/*.json"))[1:] == [
        f"step_0000000{n}.json" for n in (3, 4)
    ]


def test_a_damaged_snapshot_is_left_out_and_then_set_aside_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Checkpoint(tmp_path)
    for step in (1, 2):
        first.save(step, {"x": torch.full((3,), float(step))})
    first.wait()
    first.claim.release()
    path = tmp_path / "step_00000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    state, again = {"x": torch.zeros(3)}, Checkpoint(tmp_path, keep=1)
    assert again.load(state) == 1 and state["x"].tolist() == [1.0] * 3
    assert caplog.text.count("the snapshot of step 2 in") == 1
    again.save(2, state)
    again.wait()
    assert (tmp_path / "damaged-1-step_00000002.safetensors").exists()
    assert Checkpoint(tmp_path).load(state) == 2


DAMAGES: list[Callable[[bytes, int], bytes]] = [
    lambda old, at: old[:at] + bytes([old[at] ^ 1 << at % 8]) + old[at + 1 :],
    lambda old, at: old[:at],
    lambda old, at: old[:at] + b"\0" + old[at:],
    lambda old, at: old[:at] + old[at + 1 :],
    lambda old, at: old[:at].ljust(len(old), b"\0"),
    lambda old, at: old[at:].rjust(len(old), b"\0"),
    lambda old, at: old + old[at:],
]


def test_140_damages_of_a_snapshot_are_noticed(tmp_path: Path) -> None:
    """Or change no value, but spaces of the manifest. Each kind is tried ten times on both files."""
    rng, first = random.Random(0), Checkpoint(tmp_path)
    for step in (1, 2):
        first.save(step, {"x": torch.full((300,), float(step)), "seen": step})
    first.wait()
    for name, damage, _ in itertools.product(["json", "safetensors"], DAMAGES, range(10)):
        path = tmp_path / f"step_00000002.{name}"
        old = path.read_bytes()
        new = damage(old, rng.randrange(1, len(old)))
        path.write_bytes(new)
        state: dict[str, Any] = {"x": torch.zeros(300), "seen": 0}
        step = Checkpoint(tmp_path).load(state) or 0
        assert state["seen"] == step and state["x"].tolist() == [step] * 300
        assert step == 1 or new.split() == old.split()
        path.write_bytes(old)


def test_snapshots_of_which_none_is_valid_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1, {"x": 1})
    (tmp_path / "step_00000001.json").write_text("damaged")
    with pytest.raises(UserError, match=r"no snapshot in .* can be used \(step 1: its manifest is damaged"):
        Checkpoint(tmp_path).load({"x": 0})


def test_snapshots_that_were_not_loaded_those_of_a_run_too_are_left_alone(tmp_path: Path) -> None:
    saved(tmp_path / "loop", 5, {"x": 1})
    store = make_store(tmp_path)
    write(store, make_manifest(3, config=to_dict(Config())))
    (tmp_path / "snapshots" / "partial-step_00000004").touch()  # the run is saving
    before = [*file_names(store), *map(str, tmp_path.glob("loop/step_*"))]
    for folder, step, newest in (("loop", 5, 5), ("loop", 9, 5), ("snapshots", 900, 3)):
        checkpoint = Checkpoint(tmp_path / folder, keep=1)
        with pytest.raises(UserError, match=f"holds a snapshot of step {newest}, from which this loop does"):
            checkpoint.save(step, {"x": 1})
        checkpoint.claim.release()
    with pytest.raises(UserError, match="holds snapshots of a run"):
        Checkpoint(tmp_path / "snapshots").load({"x": 1})
    after = [*file_names(store), *map(str, tmp_path.glob("loop/step_*"))]
    assert [name for name in after if "claim-" not in name] == before


def test_a_loop_whose_claim_was_taken_ends_at_its_next_save(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 1, {"x": 1})
    checkpoint.claim.acquire()
    (path,) = tmp_path.glob("claim-*.json")
    path.unlink()
    with pytest.raises(ClaimLost):
        checkpoint.save(2, {"x": 2})


@pytest.mark.parametrize("tree", [b"no JSON", b"\xff", b'{"a": 1, "b": 2}', b'{"dict": 3}', b'{"dict": [3]}'])
def test_a_tree_that_is_none_is_damage(tree: bytes, tmp_path: Path) -> None:
    content = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    write(make_store(tmp_path), Manifest(step=1, windows=1), {"tree": content})
    with pytest.raises(UserError, match=r"no snapshot in .* can be used .*its tree is damaged"):
        Checkpoint(tmp_path / "snapshots").load({"x": 1})


def test_a_second_job_is_refused_in_one_sentence(tmp_path: Path, start: Start) -> None:
    saved_here = Checkpoint(tmp_path)
    saved_here.save(1, {"x": 1})
    program = f"from mingpt.snapshot import Checkpoint\nCheckpoint({str(tmp_path)!r}).save(1, {{'x': 2}})"
    other = start([sys.executable, "-c", program])
    assert other.wait(60) == 1
    assert f"UserError: {tmp_path} is in use by job" in other.err().splitlines()[-1]
    saved_here.wait()
    saved_here.claim.release()


@pytest.mark.parametrize("place", ["memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_url_is_a_place_too(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store(monkeypatch) if place == "s3" else contextlib.nullcontext() as bucket:
        if bucket:
            bucket.mkdir("bucket")
        check_place(f"{place}://bucket/{uuid.uuid4().hex}")


@pytest.mark.parametrize("where", ["~/here", "here", "file:///ROOT/here"])
def test_a_folder_is_claimed_where_its_snapshots_are(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint(where.replace("/ROOT", str(tmp_path)))
    monkeypatch.chdir("/")
    checkpoint.save(1, {"x": 1})
    checkpoint.wait()
    assert {path.name[:6] for path in (tmp_path / "here").iterdir()} == {"claim-", "step_0"}
    checkpoint.claim.release()


def test_a_load_waits_for_a_save_and_forgets_what_earlier_loads_left_out(tmp_path: Path) -> None:
    checkpoint, state = saved(tmp_path, 1, {"x": torch.ones(2)}), {"x": torch.zeros(2)}
    checkpoint.save(2, {"x": torch.full((2,), 2.0)})
    path = tmp_path / "step_00000002.safetensors"
    assert checkpoint.load(state) == 2 and state["x"].tolist() == [2.0, 2.0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])  # as if it was still being copied
    other = Checkpoint(tmp_path)
    assert other.load(state) == 1
    path.write_bytes(whole)
    assert other.load(state) == 2
    other.save(3, state)
    other.wait()
    other.claim.release()
    assert not list(tmp_path.glob("damaged-*"))


def test_a_loop_whose_load_was_refused_may_not_save(tmp_path: Path) -> None:
    saved(tmp_path, 5, {"x": torch.ones(2)}, keep=1)
    checkpoint = Checkpoint(tmp_path, keep=1)
    with pytest.raises(UserError, match=r"x is torch\.float32 \[3\] in the state"):
        checkpoint.load({"x": torch.ones(3)})
    with pytest.raises(UserError, match="holds a snapshot of step 5, from which this loop does not go on"):
        checkpoint.save(6, {"x": torch.ones(3)})
    checkpoint.claim.release()


@pytest.mark.parametrize("keep", [0, -1])
def test_at_least_one_snapshot_stays(keep: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"keep={keep}: at least one snapshot must stay"):
        Checkpoint(tmp_path, keep=keep)


def test_a_step_before_the_newest_is_refused_and_the_newest_may_be_saved_again(tmp_path: Path) -> None:
    """A snapshot of an earlier step would be removed at once, because the newest ones stay."""
    saved(tmp_path, 9, {"x": 1})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.load({"x": 0}) == 9
    for step in (9, 10):
        checkpoint.save(step, {"x": 2})
    with pytest.raises(UserError, match="has a snapshot of step 10, and step 9 is before it"):
        checkpoint.save(9, {"x": 3})
    checkpoint.wait()
    checkpoint.claim.release()
    state = {"x": 0}
    assert Checkpoint(tmp_path).load(state) == 10 and state == {"x": 2}


def test_tensors_that_no_header_has_room_for_are_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="30,001 tensors are too many"):
        Checkpoint(tmp_path).save(1, {f"{number:0100}": torch.zeros(1) for number in range(30_000)})


@pytest.mark.parametrize("last", ["", "raise SystemExit(3)"])
def test_a_save_that_is_under_way_when_the_program_ends_is_finished(last: str, tmp_path: Path) -> None:
    program = (
        "import torch\nfrom mingpt.snapshot import Checkpoint\n"
        f"Checkpoint({str(tmp_path)!r}).save(1, {{'x': torch.ones(30_000_000)}})\n{last}"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3 if last else 0, "")
    state = {"x": torch.zeros(30_000_000)}
    assert Checkpoint(tmp_path).load(state) == 1 and state["x"].min() == 1


def check_place(where: str) -> None:
    state = {"x": torch.ones(2)}
    checkpoint = Checkpoint(where)
    checkpoint.save(1, state)
    checkpoint.wait()
    state["x"].zero_()
    assert Checkpoint(where).load(state) == 1 and state["x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_is_told_by_wait_unless_a_later_one_succeeds(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, state = Checkpoint(tmp_path), {"x": torch.ones(2)}
    checkpoint.save(1, state)
    checkpoint.wait()
    disk = FaultyDisk(monkeypatch, "fsync", "partial-step_00000002", code)
    checkpoint.save(2, state)
    with pytest.raises(OSError, match=os.strerror(code)):
        checkpoint.wait()
    assert Checkpoint(tmp_path).load(state) == 1
    disk.broken = False
    checkpoint.save(3, state)
    checkpoint.wait()
    assert Checkpoint(tmp_path).load(state) == 3


def on_two_ranks(context: DistributedContext, folder: Path, is_other: bool) -> tuple[int | None, list[float]]:
    """Save by DDP, load into a plain module; with `is_other`, into one of another shape on rank 1."""
    torch.manual_seed(0)
    model, weights = nn.Linear(2, 1, bias=is_other), {"plain": torch.zeros(2)}
    checkpoint = Checkpoint(folder)
    checkpoint.save(4, {"model": nn.parallel.DistributedDataParallel(model), "weights": weights})
    checkpoint.wait()
    fresh = nn.Linear(3 if is_other and context.rank == 1 else 2, 1, bias=is_other)
    state = {"model": fresh, "weights": weights}
    names = sorted(state, reverse=context.rank == 1)  # the tensors are read in the snapshot's order
    step = Checkpoint(folder).load({name: state[name] for name in names})
    return step, (fresh.weight - model.weight).flatten().tolist()


def test_all_ranks_load_the_same_or_raise_alike(tmp_path: Path) -> None:
    work = functools.partial(on_two_ranks, folder=tmp_path / "same", is_other=False)
    assert fork_ranks(2, work) == [(4, [0.0, 0.0])] * 2
    work = functools.partial(on_two_ranks, folder=tmp_path / "other", is_other=True)
    errors = fork_ranks(2, work)
    assert [type(error) for error in errors] == [UserError] * 2 and len(set(map(str, errors))) == 1


def save_tied_shards(context: DistributedContext, folder: Path) -> list[float]:
    """Save weights that two layers share by FSDP2; the second rank has no row of them."""
    layers = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    nn.init.constant_(layers[0].weight, context.rank + 1.0)  # rank 0 has the row
    layers[1].weight = layers[0].weight
    model = fully_shard(nn.Sequential(*layers), mesh=init_device_mesh("cpu", (context.world_size,)))
    checkpoint = Checkpoint(folder)
    checkpoint.save(1, {"model": model})
    checkpoint.wait()
    plain = nn.Sequential(*(nn.Linear(2, 1, bias=False) for _ in range(2)))
    Checkpoint(folder).load({"model": plain})
    return [value for weight in plain.parameters() for value in weight.flatten().tolist()]


def test_tied_weights_of_which_a_rank_has_no_row_are_saved(tmp_path: Path) -> None:
    work = functools.partial(save_tied_shards, folder=tmp_path)
    assert fork_ranks(2, work) == [[1.0] * 4] * 2
