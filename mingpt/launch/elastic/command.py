"""The program of `launch/elastic.sh`: run torchrun on this node of a cluster whose nodes may come and go."""

import ipaddress
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mingpt.base.command import CommandParser, run_command
from mingpt.base.errors import UserError, meaning_of
from mingpt.base.system import ipv4_addresses
from mingpt.base.urls import redact
from mingpt.launch.elastic.boards import parse_rdzv

MAX_RESTARTS = 1_000  # how often one node's workers may be restarted; each loss of another node counts, too
MONITOR_INTERVAL_S = 0.1
USAGE = (
    "launch/elastic.sh --nnodes MIN:MAX --nproc N --rdzv PATH|HOST:PORT[,HOST:PORT...] --local_addr A"
    " [--rdzv_id ID] -- train.py ..."
)


def check_nproc(text: str) -> str:
    if text not in ("gpu", "cpu", "auto") and not re.fullmatch(r"[1-9]\d*", text):
        raise UserError(f"--nproc is a number of workers from 1, or gpu, cpu or auto; got {text!r}")
    if text == "gpu":
        import torch  # takes a second or two, and torchrun would answer with a traceback

        if not torch.cuda.is_available():
            raise UserError("--nproc gpu, but torch sees no GPU on this host; give the number of workers")
    return text


def check_local_addr(text: str) -> tuple[str, str]:
    """Return (the IP address of `text`, the name of the network interface that has this address).

    `text` is a host name or an address. Raises UserError if `text` does not resolve, or if no interface of
    this host has the address.
    """
    interfaces = {str(address.ip): name for name, address in ipv4_addresses()}  # only interfaces that are up
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        fields = line.split()
        interfaces[str(ipaddress.ip_address(bytes.fromhex(fields[0])))] = fields[5]
    known = ", ".join(f"{address} ({name})" for address, name in interfaces.items())
    try:
        address = str(socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise UserError(f"--local_addr {text} does not resolve; this host has {known}") from None
    # All of 127.0.0.0/8 belongs to the loopback interface.
    is_loopback = ipaddress.ip_address(address).is_loopback
    interface = interfaces.get("127.0.0.1" if is_loopback else address)
    if interface is None:
        raise UserError(f"--local_addr {text} is on no interface of this host, which has {known}")
    return address, interface


def torchrun_command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (environment variables to add, the torchrun command) for the options in `words`.

    If --rdzv is a folder, the folder is created if possible. Raises UserError for a mistake in the options.
    """
    parser = CommandParser("launch/elastic.sh", __doc__, usage=USAGE)
    parser.add_argument(
        "--nnodes", required=True, metavar="MIN:MAX", help="a majority, or 1 to survive anything"
    )
    parser.add_argument("--nproc", required=True, metavar="N", help="workers on this node: a number, or gpu")
    parser.add_argument(
        "--rdzv", required=True, metavar="PLACE", help="a shared folder, or nodes that can host"
    )
    parser.add_argument("--local_addr", required=True, metavar="A", help="this node's address for its peers")
    parser.add_argument("--rdzv_id", default="mingpt", metavar="ID", help="one for each job; default: mingpt")
    parser.add_argument("program", nargs="+", help="after --: a program, such as train.py, and its arguments")
    options = parser.parse_args(words)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", options.nnodes)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise UserError(f"--nnodes is MIN:MAX with 1 <= MIN <= MAX, such as 2:3; got {options.nnodes!r}")
    nproc, rdzv = check_nproc(options.nproc), parse_rdzv(options.rdzv)
    if not options.rdzv_id:
        raise UserError("--rdzv_id is a name for this job; got an empty one")
    if isinstance(rdzv, Path):
        try:
            rdzv.mkdir(mode=0o700, parents=True, exist_ok=True)  # only this user may read it
        except OSError as error:
            if meaning_of(error) != "may pass":
                raise UserError(f"--rdzv {rdzv} cannot be created as a folder: {error.strerror}") from None
            # The agent waits for the storage, and logs that.
    address, interface = check_local_addr(options.local_addr)
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    variables = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup; torchrun would not
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        f"--nnodes={match[1]}:{match[2] or match[1]}",
        f"--nproc_per_node={nproc}",
        f"--max-restarts={MAX_RESTARTS}",
        f"--monitor_interval={MONITOR_INTERVAL_S}",
        "--rdzv_backend=mingpt",
        f"--rdzv_endpoint={options.rdzv if isinstance(rdzv, list) else rdzv}",
        f"--rdzv_id={options.rdzv_id}",
        f"--rdzv_conf=nproc={nproc}",
        f"--local_addr={address}",
        *(["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT"] if ignores_hangup else []),
        *options.program,
    ]
    return variables, command


def main(words: Sequence[str]) -> NoReturn:
    variables, command = torchrun_command(words)
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    assignments = [f"{name}={shlex.quote(value)}" for name, value in (path | variables).items()]
    sys.stderr.write(redact(f"{' '.join([*assignments, shlex.join(command)])}\n"))
    os.execve(sys.executable, command, dict(os.environ) | variables)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
