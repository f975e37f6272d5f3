"""A worker's device, the dtype of its matrix products, and what else the weights' bits depend on."""

import hashlib
import os
import platform
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mingpt.base.errors import NodeRefused, UserError
from mingpt.distributed.exit import first_line
from mingpt.distributed.launch import Launch

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]  # the folder of mingpt/
DRIVER = Path("/proc/driver/nvidia/version")
DEVICES_DIFFER = (
    "the workers have different kinds of devices (by rank: {devices}): start the job where all have the "
    "same, or set trainer.device=cpu"
)
# Beginnings of the names of environment variables that choose kernels, and so change bits.
CPU_KERNELS = ("ATEN_CPU_", "MKL_", "ONEDNN_", "DNNL_", "TORCH_MKLDNN_", "OPENBLAS_", "BLIS_")
GPU_KERNELS = ("CUBLAS", "CUDNN_", "TORCH_CUDNN_", "TORCH_BLAS_", "TORCH_ALLOW_TF32_", "NVIDIA_TF32_")


def find_device(wanted: str, launch: Launch) -> "torch.device":
    """Return the device for `wanted`, the setting trainer.device.

    auto means the GPU with the number `launch.local_rank` if the node has a GPU for each of its workers, else
    the CPU. A CUDA GPU becomes torch's current device. Raises UserError if this machine has no such device,
    or if one of several workers asks for mps.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # NCCL refuses two workers on one GPU.
    if wanted == "cuda" or (wanted == "auto" and gpus >= launch.local_world_size):
        if launch.local_rank >= gpus:
            raise UserError(
                f"trainer.device=cuda asks for GPU {launch.local_rank} and this machine has {gpus}: "
                f"{'start fewer workers or ' if gpus else ''}set trainer.device=cpu"
            )
        torch.cuda.set_device(launch.local_rank)
        return torch.device("cuda", launch.local_rank)
    if wanted == "mps" and not (torch.backends.mps.is_available() and launch.world_size == 1):
        raise UserError(
            "trainer.device=mps is for one process on a machine with Apple's GPU: set trainer.device=cpu"
        )
    return torch.device("mps" if wanted == "mps" else "cpu")


def idle_gpus(wanted: str, launch: Launch) -> str | None:
    """Return a warning if trainer.device=auto takes the CPU because there are fewer GPUs than workers.

    `wanted` is the setting trainer.device. Only this machine's GPUs and workers count. Returns None if there
    is nothing to warn about, or if this machine has no GPU.
    """
    import torch

    gpus, workers = torch.cuda.device_count(), launch.local_world_size
    if wanted != "auto" or not torch.cuda.is_available() or gpus >= workers:
        return None
    return (
        f"trainer.device=auto takes the CPU, because {platform.node()} has GPUs for {gpus} of its {workers} "
        f"workers: start {gpus} there, or set trainer.device=cpu"
    )


def check_gloo() -> None:
    """Raise NodeRefused if gloo cannot use the network that environment variables ask for.

    The variables are GLOO_SOCKET_IFNAME (network interfaces) and GLOO_DEVICE_TRANSPORT.
    """
    from torch.distributed import ProcessGroupGloo

    names = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
    given = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    try:
        for interface in filter(None, os.environ.get(names[0], "").split(",")):
            ProcessGroupGloo.create_device(interface=interface)
        if len(given) == 1 and os.environ.get(names[1]):
            ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        said = first_line(error).rpartition("] ")[2]  # without the place in gloo's source
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise NodeRefused(
            f"gloo, which connects the workers, cannot work on {platform.node()} with {' and '.join(given)} "
            f"({said}): unset this, or name one of the network interfaces {known}"
        ) from None


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32, judged by its instruction sets.

    Returns True for a CPU with AMX. Also returns True for a CPU with AVX512_BF16 but without AVX512_FP16,
    such as AMD's Zen 4. Intel's Sapphire Rapids has AVX512_FP16. If a virtual machine hides the AMX of
    Sapphire Rapids, bfloat16 is slower than float32.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu.get_capabilities()["avx512_fp16"]


def resolve_dtype(wanted: str, device: "torch.device") -> str:
    """Return the name of the dtype of matrix products for `wanted`, the setting trainer.dtype.

    auto means bfloat16 on CPUs and CUDA GPUs that compute bfloat16 fast. Otherwise auto means float16 on CUDA
    GPUs, and float32 on all other devices.
    """
    import torch

    if wanted == "auto" and device.type == "cuda":
        wanted = "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    elif wanted == "auto":
        wanted = "bfloat16" if device.type == "cpu" and has_fast_bfloat16() else "float32"
    return wanted


def common_dtype(dtypes: Iterable[str], device_type: str) -> str:
    """Return the name of the dtype that all ranks use for matrix products.

    `dtypes` has what `resolve_dtype` returned on each rank; all devices are of the type `device_type`. If the
    dtypes differ, the result is "float16" for "cuda", else "float32".
    """
    found = {*dtypes}
    return found.pop() if len(found) == 1 else ("float16" if device_type == "cuda" else "float32")


def autocast(device: "torch.device", dtype: "torch.dtype") -> "torch.autocast":
    """Return a context manager that autocasts to `dtype`, or that disables autocasting for float32."""
    import torch

    # A forward pass uses each weight once, so a cache of cast weights would save nothing.
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False)


# A change of this program after which the same configuration gives different bits raises this number by 1;
# docs/LOG.md lists these changes.
NUMERICS = 4


@dataclass(frozen=True)
class Environment:
    """Software and hardware on which the weights' bits may depend; saved in snapshots as `software`."""

    torch: str
    device: str  # what `device_name` returns
    device_type: str  # such as "cuda"
    threads: int  # CPU threads per worker
    numerics: int  # NUMERICS of the program that trained
    code: str  # what `hash_code` returns for the program that trained
    dtype: str  # of matrix products, such as "bfloat16"
    kernels: str  # what `kernel_variables` returns
    compiled: bool | str  # True: the model as a whole; "blocks": each block by itself; False: not compiled


def device_name(device: "torch.device") -> str:
    """Return a CUDA GPU's name; for any other device, a text such as "cpu AVX512 AMX"."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # AMX computes products with other bits than AVX512.
    amx = " AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}{amx}"


def kernel_variables(device: "torch.device") -> str:
    """Return environment variables that may choose this device's kernels, as "NAME=VALUE NAME=VALUE".

    The names begin as in GPU_KERNELS for a CUDA GPU, else as in CPU_KERNELS; names with VERBOSE are left out.
    Returns "none" if none is set. Only the first 200 characters are returned.
    """
    names = GPU_KERNELS if device.type == "cuda" else CPU_KERNELS
    given = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(names) and "VERBOSE" not in name
    ]
    text = " ".join(given) or "none"
    return text.encode(errors="replace").decode()[:200]  # a manifest takes only Unicode


def gpu_facts(device: "torch.device") -> dict[str, str]:
    """Return what is known of a CUDA GPU and its software, as {name: value}; {} for any other device.

    The names are "card", "memory", "compute capability", "driver" and "nccl". The values of "driver" and
    "nccl" are versions, or "unknown" if they cannot be found.
    """
    import torch

    if device.type != "cuda":
        return {}
    card = torch.cuda.get_device_properties(device)
    try:
        driver = re.search(r"\s(\d+\.[.\d]+)\s", DRIVER.read_text())
    except OSError:
        driver = None  # for example in a container without the driver's folder
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "card": card.name,
        "memory": f"{card.total_memory / 2**30:.1f} GiB",
        "compute capability": f"{card.major}.{card.minor}",
        "driver": driver[1] if driver else "unknown",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "unknown",
    }


def find_program() -> str:
    """Return a text that identifies this program: a digest of its code, and torch's version.

    An example is "code 5b38d4aaf91b and torch 2.13.0". Raises OSError if the code cannot be read.
    """
    import torch

    return f"code {hash_code(ROOT)[:12]} and torch {torch.__version__}"


def hash_code(root: Path) -> str:
    """Return one SHA-256, in hex, for train.py, if there is one, and all *.py files of mingpt/ in `root`.

    This is the SHA-256 of the lines that `sha256sum` prints for these files, with paths relative to `root`,
    in the order of the paths. Raises OSError if a file cannot be read.
    """
    paths = [*root.glob("train.py"), *root.glob("mingpt/**/*.py")]
    # An editor may leave a link that leads nowhere, such as Emacs's .#gpt.py.
    names = sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())
    lines = [f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def enable_determinism() -> None:
    """Make torch use deterministic kernels; an operation that torch knows to have none raises RuntimeError.

    Call this before a GPU is used.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its first product
    # torch.use_deterministic_algorithms would import torch._inductor, which takes as long as torch itself.
    torch.set_deterministic_debug_mode("error")
    # Filling new tensors helps to find bugs in kernels, but every tensor is then written twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
