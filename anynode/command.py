"""The options of `python -m anynode`, and the torchrun options that they stand for."""

import argparse
import ctypes
import errno
import ipaddress
import os
import re
import shlex
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from anynode.boards import BoardMemory, Server, parse_endpoints, parse_rdzv

MONITOR_INTERVAL_S = 0.1
DESCRIPTION = "Run torchrun on this node of a job whose nodes may die, join or leave. Start it on every node."
USAGE = (
    "python -m anynode --nnodes MIN:MAX --nproc N --rdzv PATH|HOST:PORT[,HOST:PORT...] --local_addr A"
    " [--rdzv_id ID] [--max_restarts N] -- script.py ..."
)
SIOCGIFCONF = 0x8912
IFREQ_BYTES, MAX_ADDRESSES = 40, 512
WrongOption = argparse.ArgumentTypeError  # argparse puts the option's name before its message
# Errors of a storage that is away for now, and comes back without a change by the user.
STORAGE_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


class Serve(argparse.Action):
    """The option --serve HOST:PORT, which serves a board there until Ctrl-C, and runs nothing else."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, text: Any, option: Any = None
    ) -> None:
        endpoints = parse_endpoints(text)
        if len(endpoints) != 1:
            parser.error(f"--serve is one HOST:PORT, such as 10.0.0.9:29400; got {text!r}")
        try:
            Server(*endpoints[0], {"post": BoardMemory().post}).serve_forever()
        except KeyboardInterrupt:
            parser.exit()
        except OSError as error:
            parser.error(f"cannot listen on {text}: {error.strerror}")


def write_stderr(text: str) -> None:
    """Write text to stderr, if stderr is open, and flush it.

    If the write fails, for example because the process that reads stderr has exited, /dev/null replaces
    stderr, because the error would end this agent, or change its exit code to 120.
    """
    try:
        if sys.stderr:
            sys.stderr.write(text)
            sys.stderr.flush()
    except OSError:  # the reader of stderr is gone, as srun is when the first node is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def nnodes(text: str) -> str:
    """Return MIN:MAX for a text MIN:MAX, or MIN:MIN for MIN. Raises WrongOption unless 1 <= MIN <= MAX."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise WrongOption(f"must be MIN:MAX with 1 <= MIN <= MAX, such as 2:3; got {text!r}")
    return f"{match[1]}:{match[2] or match[1]}"


def nproc(text: str) -> str:
    if text not in ("gpu", "cpu", "auto") and not re.fullmatch(r"[1-9]\d*", text):
        raise WrongOption(f"must be a number of workers from 1, or gpu, cpu or auto; got {text!r}")
    if text == "gpu":
        import torch  # takes a second or two, and torchrun would answer with a traceback

        if not torch.cuda.is_available():
            raise WrongOption("torch sees no GPU on this host; give the number of workers")
    return text


def rdzv(text: str) -> str:
    """Return torchrun's rendezvous endpoint for `text`, which is HOST:PORT[,HOST:PORT...] or a folder.

    A folder is created if it does not exist, and its absolute path is returned. Raises WrongOption if `text`
    is neither, or if the folder cannot be created or written, unless the errno of mkdir is in STORAGE_AWAY.
    """
    try:
        place = parse_rdzv(text)
    except ValueError as error:
        raise WrongOption(str(error)) from None
    if not isinstance(place, Path):
        return text
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)  # only this user may read it
    except OSError as error:
        if error.errno not in STORAGE_AWAY:
            raise WrongOption(f"{place} cannot be created as a folder: {error.strerror}") from None
        # The agent waits for the storage, and logs that.
    else:
        if not os.access(place, os.W_OK):
            raise WrongOption(f"{place} cannot be written")
    return str(place)


def job_name(text: str) -> str:
    if not text.strip(".") or "/" in text:  # it becomes the name of folders; .. would be the one above
        raise WrongOption(f"must be a name for this job, without a slash; got {text!r}")
    return text


def restarts(text: str) -> str:
    if not text.isdecimal():
        raise WrongOption(f"must be a number from 0; got {text!r}")
    return text


def local_address(text: str) -> tuple[str, str]:
    """Return (the IP address of `text`, the name of the network interface that has this address).

    `text` is an address, or a host name, of which the first address counts. Raises WrongOption if `text` does
    not resolve, or if no interface of this host has the address.
    """
    interfaces = dict(ipv4_addresses())  # also of interfaces that are down
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        fields = line.split()
        interfaces[str(ipaddress.ip_address(bytes.fromhex(fields[0])))] = fields[5]
    known = ", ".join(f"{address} ({name})" for address, name in interfaces.items())
    try:
        address = str(socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise WrongOption(f"{text} does not resolve; this host has {known}") from None
    # All of 127.0.0.0/8 belongs to the loopback interface.
    is_loopback = ipaddress.ip_address(address).is_loopback
    interface = interfaces.get("127.0.0.1" if is_loopback else address)
    if interface is None:
        raise WrongOption(f"{text} is on no interface of this host, which has {known}")
    return address, interface


def ipv4_addresses() -> list[tuple[str, str]]:
    """Return (address, name of its interface) for this host's IPv4 addresses, at most MAX_ADDRESSES."""
    import fcntl  # not on Windows, where a board can be served

    buffer = bytearray(IFREQ_BYTES * MAX_ADDRESSES)
    place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iL", len(buffer), place))
    used = struct.unpack("iL", answer)[0]
    requests = [bytes(buffer[start : start + IFREQ_BYTES]) for start in range(0, used, IFREQ_BYTES)]
    return [
        (socket.inet_ntoa(request[20:24]), request[:16].split(b"\0", 1)[0].decode().split(":")[0])
        for request in requests
    ]


def torchrun_options(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return (environment variables to add, torchrun's options, the script and its arguments) for `words`.

    `words` are the arguments of `python -m anynode`. A folder that --rdzv names is created: see `rdzv`. Exits
    with code 2 for a mistake, and with 0 after it has printed the text of --help or served a board (--serve).
    """
    parser = Parser("python -m anynode", USAGE, DESCRIPTION, allow_abbrev=False)
    for name, check, text in (
        ("--nnodes", nnodes, "MIN:MAX, where MIN is a majority, or 1 to survive anything"),
        ("--nproc", nproc, "workers on this node: a number, or gpu"),
        ("--rdzv", rdzv, "a shared folder, or nodes that can host"),
        ("--local_addr", local_address, "this node's address for its peers"),
    ):
        parser.add_argument(name, required=True, type=check, help=text)
    parser.add_argument(
        "--rdzv_id", default="anynode", type=job_name, help="one for each job; default: anynode"
    )
    parser.add_argument("--max_restarts", default="1000", type=restarts, help="of this node; default: 1000")
    parser.add_argument("--serve", action=Serve, help="HOST:PORT, to serve a board there instead")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="after --: a script, such as train.py, and its arguments"
    )
    options = parser.parse_args(words)
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    is_there = script and (script[0].startswith("-") or os.path.isfile(script[0]))  # -m names a module
    if not is_there:
        parser.error(f"after -- must be a script, such as train.py, that is there; got {script[:1]}")
    address, interface = options.local_addr
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    variables = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup; torchrun would not
    command = [
        f"--nnodes={options.nnodes}",
        f"--nproc_per_node={options.nproc}",
        f"--max-restarts={options.max_restarts}",
        f"--monitor_interval={MONITOR_INTERVAL_S}",
        "--rdzv_backend=anynode",
        f"--rdzv_endpoint={options.rdzv}",
        f"--rdzv_id={options.rdzv_id}",
        f"--rdzv_conf=nproc={options.nproc}",
        f"--local_addr={address}",
        *(["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT"] if ignores_hangup else []),
    ]
    return variables, command, script


def run_node(words: Sequence[str]) -> None:
    """Do what `python -m anynode` does with arguments `words`: run torchrun, print help, or serve a board.

    torchrun runs in this process. Its options are first printed to stderr, but not the script's arguments,
    because they may have passwords. For exits before that see `torchrun_options`.
    """
    variables, options, script = torchrun_options(words)
    shown = [f"{name}={value}" for name, value in variables.items()]
    if sys.stderr is None:  # closed: torch's C++ code would write to what is opened next
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    write_stderr(f"{shlex.join([*shown, 'torchrun', *options, script[0]])} ...\n")
    os.environ.update(variables)
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main

    from anynode import rendezvous_backend

    # An installed anynode registers itself. In a clone that is not installed, nothing else does.
    rendezvous_handler_registry.register("anynode", rendezvous_backend())
    main([*options, *script])
