import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import refusal

from mingpt.base.errors import NodeRefused
from mingpt.distributed import Launch
from mingpt.distributed.device import check_gloo, common_dtype, find_device, hash_code, resolve_dtype


@pytest.mark.parametrize(
    ("wanted", "gpus", "has_mps", "workers", "found"),
    [
        ("auto", 0, False, 1, "cpu"),
        ("cuda", 0, False, 1, "trainer.device=cuda asks for GPU 0 and this machine has 0"),
        ("mps", 0, True, 1, "mps"),  # it is asked for by name, for a single process
        ("auto", 2, False, 3, "cpu"),
    ],
)
def test_a_device_is_taken_if_it_is_there_for_all_workers_and_refused_in_one_sentence(
    wanted: str, gpus: int, has_mps: bool, workers: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    launch = Launch(world_size=workers, local_world_size=workers, master_addr="localhost")
    is_refused = found.startswith("trainer")
    told = refusal(find_device, wanted, launch) if is_refused else str(find_device(wanted, launch))
    assert told.startswith(found)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_auto_takes_float16_on_gpus_without_bfloat16(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert getattr(torch, resolve_dtype("auto", torch.device("cuda", 0))) == dtype


@pytest.mark.parametrize(
    ("other", "device", "dtype"),
    [("bfloat16", "cuda", "bfloat16"), ("float16", "cuda", "float16"), ("float32", "cpu", "float32")],
)
def test_ranks_whose_devices_have_different_dtypes_take_one_that_all_have(
    other: str, device: str, dtype: str
) -> None:
    assert common_dtype(["bfloat16", other], device) == dtype


@pytest.mark.parametrize("interface", ["nosuch0", "^lo,docker", "lo,nosuch0"])  # ^ is NCCL's notation
def test_an_interface_that_gloo_cannot_use_is_one_sentence_before_workers_meet(
    interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_gloo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    with pytest.raises(NodeRefused, match=rf"GLOO_SOCKET_IFNAME={re.escape(interface)} .*interfaces lo"):
        check_gloo()


@pytest.mark.parametrize(
    ("change", "is_other_code"),
    [
        (lambda root: (root / "mingpt/gpt.py").write_text("edited"), True),
        (lambda root: (root / "mingpt/gpt.py").rename(root / "mingpt/renamed.py"), True),
        (lambda root: (root / "mingpt/model/added.py").touch(), True),
        (lambda root: (root / "train.py").write_text("edited"), True),
        (lambda root: (root / "mingpt/__pycache__/gpt.cpython-312.pyc").touch(), False),
        (lambda root: (root / "mingpt/model/notes.txt").touch(), False),
        (lambda root: (root / "sample.py").touch(), False),
        (lambda root: (root / "mingpt/.#gpt.py").symlink_to("nowhere"), False),  # left by Emacs
    ],
)
def test_the_hash_of_the_code_changes_with_each_source_and_with_no_other_file(
    change: Callable[[Path], object], is_other_code: bool, tmp_path: Path
) -> None:
    for folder in ("__pycache__", "model"):
        (tmp_path / "mingpt" / folder).mkdir(parents=True)
    for name in ("train.py", "mingpt/gpt.py"):
        (tmp_path / name).write_text("content")
    before = hash_code(tmp_path)
    change(tmp_path)
    assert (hash_code(tmp_path) != before) == is_other_code
