import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.single_process import SingleProcess

from mingpt.base.errors import NodeRefused, UserError
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


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto", Launch()) == find_device("cpu", Launch()) == CPU
    with pytest.raises(UserError, match=r"trainer\.device=cuda asks for GPU 0 and this machine has 0"):
        find_device("cuda", Launch())
    with pytest.raises(UserError, match="is for one process on a machine with Apple's GPU"):
        find_device("mps", Launch())


def test_apples_gpu_is_asked_for_by_name_and_for_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    two = Launch(world_size=2, local_world_size=2, master_addr="localhost")
    assert find_device("mps", Launch()).type == "mps"
    assert find_device("auto", Launch()) == CPU
    with pytest.raises(UserError, match="is for one process on a machine with Apple's GPU"):
        find_device("mps", two)


def test_auto_takes_the_cpu_and_says_so_if_there_are_fewer_gpus_than_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    three, two = (Launch(world_size=4, local_world_size=n, master_addr="localhost") for n in (3, 2))
    assert find_device("auto", three) == CPU
    assert "has GPUs for 2 of its 3 workers: start 2 there" in str(idle_gpus("auto", three))
    assert idle_gpus("auto", two) is None and idle_gpus("cpu", three) is None


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
    assert len(found) == 3 and all(program.endswith(f"and torch {torch.__version__}") for program in found)


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


def test_ranks_whose_devices_have_different_dtypes_take_one_that_all_have() -> None:
    assert common_dtype(["bfloat16", "bfloat16"], "cuda") == "bfloat16"
    assert common_dtype(["bfloat16", "float16"], "cuda") == "float16"
    assert common_dtype(["bfloat16", "float32"], "cpu") == "float32"


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
