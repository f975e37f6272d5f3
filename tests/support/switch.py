"""The network of a cluster on one machine: a bridge in a network namespace, and its packet filter."""

import os
import secrets
import subprocess
from collections.abc import Sequence
from typing import IO

TIMEOUT_S = 10.0


Process = subprocess.Popen[bytes]


def start_bound(command: Sequence[str], errors: IO[str] | None = None) -> tuple[Process, bytes]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )
    assert process.stdout
    return process, process.stdout.readline()


def end(process: Process) -> None:
    for pipe in filter(None, (process.stdin, process.stdout)):
        pipe.close()
    process.wait(TIMEOUT_S)


class Switch:
    """A bridge between the links that are plugged in. IP packets to and from cut links are dropped."""

    def __init__(self) -> None:
        # Part of an interface's name, of which the kernel takes 15 characters.
        self.name, self.count = f"{os.getpid():x}{secrets.token_hex(2)}", 0
        self.links_cut: set[str] = set()
        self.process, _ = start_bound(["unshare", "--net", "sh", "-c", "echo up; read -r _"])
        self.run("ip link add br0 type bridge")
        self.run("ip link set br0 up")

    def run(self, command: str, text: str = "", *, check: bool = True) -> None:
        whole = ["nsenter", "-t", str(self.process.pid), "--net", *command.split()]
        done = subprocess.run(whole, input=text, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stderr.strip()}")

    def plug_in(self, card: str) -> str:
        """Make a veth pair; return the name of its end that is in the bridge.

        `card` has the words of `ip link` for the other end. The name is new each time, because the kernel may
        remove the pair of a dead node late.
        """
        self.count += 1
        link = f"v{self.name}{self.count:x}"
        self.run(f"ip link add {link} type veth peer {card}")
        self.run(f"ip link set {link} master br0 up")
        return link

    def unplug(self, link: str) -> None:
        self.heal(link)
        self.run(f"ip link delete {link}", check=False)  # the kernel may have deleted it by now

    def cut(self, link: str) -> None:
        self.links_cut.add(link)
        self.load_rules()

    def heal(self, link: str) -> None:
        self.links_cut.discard(link)
        self.load_rules()

    def load_rules(self) -> None:
        """Make the packet filter drop IP packets of `links_cut`. ARP passes, so connections time out."""
        ends = [end for link in self.links_cut for end in (f"iifname {link}", f"oifname {link}")]
        rules = [f"{end} ether type {kind} drop" for end in ends for kind in ("ip", "ip6")]
        chain = "\n".join(["type filter hook forward priority 0;", *rules])
        self.run("nft -f -", f"flush ruleset\ntable bridge cuts {{\nchain forward {{\n{chain}\n}}\n}}\n")

    def close(self) -> None:
        end(self.process)
