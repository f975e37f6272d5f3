"""The network of a cluster on one machine: a bridge in a network namespace, and its packet filter."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.needs import need_proc

TIMEOUT_S = 10.0


class Switch:
    """A bridge between the links that are plugged in. IP packets to and from cut links are dropped."""

    def __init__(self) -> None:
        # Part of an interface's name, of which the kernel takes 15 characters.
        self.name, self.count = f"{os.getpid():x}{secrets.token_hex(2)}", 0
        self.links_cut: set[str] = set()
        self.process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo up; read -r _"],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends: then the switch ends
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout
        self.process.stdout.readline()
        self.run("ip link add br0 type bridge")
        self.run("ip link set br0 up")

    def run(self, command: str, text: str = "", *, check: bool = True) -> None:
        """Run a command, with the stdin `text`, in the bridge's namespace.

        With `check`, raises RuntimeError if the command fails.
        """
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
        """Drop IP packets from this link and to this link."""
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
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        self.process.wait(TIMEOUT_S)


def wait_until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Poll until the condition holds. Raises TimeoutError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {timeout_s} s")
        time.sleep(0.01)


def send_to(number: signal.Signals, pids: Sequence[int]) -> None:
    """Send a signal to the processes that are still alive."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # the process has ended by itself


def state_of(pid: int) -> str:
    """The process's state in /proc, such as R, S, D, T or Z; X if there is no such process."""
    need_proc()
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped; True also if there is no such process."""
    threads = Path(f"/proc/{pid}/task").glob("*")
    return all(state_of(int(thread.name)) in "TX" for thread in threads)
