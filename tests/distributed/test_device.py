import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.commands import refusal
from support.single_process import SingleProcess

from mingpt.base.errors import NodeRefused
from mingpt.distributed import Launch, device
from mingpt.distributed.device import (
    check_gloo,
    common_dtype,
    find_device,
    find_program,
    idle_gpus,
    resolve_dtype,
)
from mingpt.snapshot.manifest import SoftwareFields
from mingpt.training.run import compare_environment

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "gpus", "has_mps", "workers", "found"),
    [
        ("auto", 0, False, 1, "cpu"),
        ("cpu", 0, False, 1, "cpu"),
        ("cuda", 0, False, 1, "trainer.device=cuda asks for GPU 0 and this machine has 0"),
        ("mps", 0, False, 1, "trainer.device=mps is for one process on a machine with Apple's GPU"),
        ("mps", 0, True, 1, "mps"),  # it is asked for by name, for a single process
        ("auto", 0, True, 1, "cpu"),
        ("mps", 0, True, 2, "trainer.device=mps is for one process on a machine with Apple's GPU"),
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


@pytest.mark.parametrize(
    ("wanted", "workers", "is_told"), [("auto", 3, True), ("auto", 2, False), ("cpu", 3, False)]
)
def test_gpus_that_auto_leaves_idle_are_told(
    wanted: str, workers: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = idle_gpus(wanted, Launch(world_size=4, local_world_size=workers, master_addr="localhost"))
    assert ("has GPUs for 2 of its 3 workers: start 2 there" in str(said)) == bool(said) == is_told


@pytest.mark.parametrize(
    ("wanted", "flags", "dtype"),
    [
        ("auto", "avx512_bf16", torch.bfloat16),
        ("auto", "avx512_bf16 avx512_fp16", torch.float32),  # an Intel CPU whose AMX is hidden
        ("auto", "avx512_bf16 avx512_fp16 amx", torch.bfloat16),
        ("auto", "", torch.float32),
        ("bfloat16", "", torch.bfloat16),
        ("float32", "amx", torch.float32),
    ],
)
def test_auto_takes_bfloat16_where_it_is_fast(
    wanted: str, flags: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = flags.split()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "avx512_bf16" in has)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx" in has)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_fp16": "avx512_fp16" in has})
    assert getattr(torch, resolve_dtype(wanted, CPU)) == dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_takes_float16_on_gpus_without_bfloat16(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert getattr(torch, resolve_dtype("auto", torch.device("cuda", 0))) == dtype


def test_an_edited_file_makes_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mingpt/base").mkdir(parents=True)
    monkeypatch.setattr(device, "__file__", str(tmp_path / "mingpt/distributed/device.py"))
    found = {find_program()}
    for name in ("train.py", "mingpt/base/files.py"):
        (tmp_path / name).write_text(name)
        found.add(find_program())
    assert len(found) == 3 and all(one.endswith(f"and torch {torch.__version__}") for one in found)


@pytest.mark.parametrize(
    ("name", "is_named"), [("MKL_CBWR", True), ("CUBLAS_X", False), ("MKL_VERBOSE", False)]
)
def test_a_variable_that_chooses_kernels_is_named_in_a_line_of_a_resume(
    name: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A value that is not UTF-8 can be written to a manifest, and read."""
    caplog.set_level("INFO")
    then = SingleProcess().environment()
    monkeypatch.setenv(name, "\udcff" + "x" * 300)
    now = SingleProcess().environment()
    compare_environment(SoftwareFields(**asdict(now)).model_dump(), now)
    assert not caplog.text
    compare_environment(SoftwareFields(**asdict(then)).model_dump(), now)
    assert (f"kernels: none -> {name}=?xx" in caplog.text) == is_named


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


def test_a_transport_that_gloo_lacks_is_one_sentence_too() -> None:
    program = "from mingpt.distributed.device import check_gloo\ncheck_gloo()"  # gloo reads the variable once
    environment = os.environ | {"GLOO_DEVICE_TRANSPORT": "NOSUCH"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "NodeRefused: gloo" in done.stderr and "GLOO_DEVICE_TRANSPORT=NOSUCH" in done.stderr
