import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from mingpt.base.errors import NodeRefused, UserError
from mingpt.distributed import Launch, device
from mingpt.distributed.device import (
    allow_open_files,
    cgroup_quota,
    check_device_types,
    check_gloo,
    find_device,
    find_program,
    idle_gpus,
    resolve_dtype,
    usable_cores,
)

CPU = torch.device("cpu")
# Prints the page faults of 8 MB in the first thread, and then in another thread.
FAULTS = """
import resource, threading
from mingpt.distributed.device import keep_freed_memory
from mingpt.launch.worker import Worker

def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(8 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

Worker()
thread = threading.Thread(target=touch)
keep_freed_memory()
touch()
thread.start()
thread.join()
"""


def make_cgroups(tmp_path: Path, membership: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Make a membership file, and a mount whose folders have these cpu.max files."""
    file, mount = tmp_path / "cgroup", tmp_path / "mount"
    file.write_text(membership)
    mount.mkdir()
    for folder, limit in limits.items():
        place = mount / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.max").write_text(limit + "\n")
    return file, mount


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"pod/job": "150000 100000"}, 1.5),
        ({"pod/job": "max 100000", "pod": "200000 100000"}, 2.0),  # a parent's limit counts
        ({"pod/job": "400000 100000", "pod": "200000 100000"}, 2.0),  # the smallest limit counts
        ({"pod/job": "300000 100000", "pod": "max 100000"}, 3.0),
        ({"pod/job": "max 100000", ".": "50000 100000"}, 0.5),
        ({"pod/other": "100000 100000", "pod/job": "800000 100000"}, 8.0),  # a neighbour's limit does not
        ({"pod": "700000 100000"}, 7.0),  # there is no file on the lowest level
        ({"pod/job": "damaged", "pod": "600000 100000"}, 6.0),
        ({"pod/job": "max 100000"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_those_above_it_counts(
    limits: dict[str, str], cores: float, tmp_path: Path
) -> None:
    assert cgroup_quota(*make_cgroups(tmp_path, "0::/pod/job\n", limits)) == pytest.approx(cores)


def test_the_affinity_and_the_quota_both_limit_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for quota, cores in ((3.9, 3), (1e9, 6), (0.5, 1)):
        monkeypatch.setattr("mingpt.distributed.device.cgroup_quota", lambda *_, quota=quota: quota)
        assert usable_cores() == cores


def refuse(*_: object) -> NoReturn:
    raise PermissionError("Operation not permitted")


@pytest.mark.parametrize("affinity", [None, refuse])
def test_without_an_affinity_all_cores_are_usable(affinity: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Linux, such as a Mac; and a sandbox."""
    monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
    if affinity is None:
        monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr("mingpt.distributed.device.cgroup_quota", lambda *_: math.inf)
    assert usable_cores() == 3


def test_a_low_limit_of_open_files_is_raised_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (35, hard))
        allow_open_files(workers=2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (36, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (28, 28))
    with pytest.raises(UserError, match=r"2 workers need 36 open files.* 28 \(ulimit -n\)"):
        allow_open_files(workers=2)


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
    assert resolve_dtype(wanted, CPU) == dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_takes_float16_on_gpus_without_bfloat16(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.device("cuda", 0)) == dtype


def test_an_edited_file_makes_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mingpt/base").mkdir(parents=True)
    monkeypatch.setattr(device, "__file__", str(tmp_path / "mingpt/distributed/device.py"))
    found = {find_program()}
    for name in ("train.py", "mingpt/base/files.py"):
        (tmp_path / name).write_text(name)
        found.add(find_program())
    assert len(found) == 3 and all(program.endswith(f"and torch {torch.__version__}") for program in found)


def test_workers_with_different_kinds_of_devices_are_refused() -> None:
    check_device_types(["cpu", "cpu"])
    with pytest.raises(UserError, match="by rank: cuda, cpu, cuda"):
        check_device_types(["cuda", "cpu", "cuda"])


def test_what_a_worker_has_freed_is_used_again_by_all_of_its_threads() -> None:
    """Otherwise glibc returns the memory to the kernel, or keeps it for one thread."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    first, other = map(int, done.stdout.split())
    assert other < 0.1 * first


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
