"""A switch whose links delay and lose packets, in user space, where the kernel has no netem. Needs root."""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

from support.nodes import Switch

TUN_SET_INTERFACE, TAP, NO_HEADER = 0x400454CA, 0x2, 0x1000  # of linux/if_tun.h
ARP, TESTS = b"\x08\x06", Path(__file__).parents[1]


class Wire:
    """The program that joins the cards: it reads commands from stdin, and frames from TAP devices."""

    def __init__(self, delay_s: float, loss: float) -> None:
        self.delay_s, self.loss, self.rng, self.count = delay_s, loss, random.Random(1), itertools.count()
        self.taps: dict[str, int] = {}  # {name: file descriptor}
        self.cards: dict[bytes, str] = {}  # {hardware address: name}
        self.cut: set[str] = set()
        self.due: list[tuple[float, int, str, bytes]] = []
        self.last: dict[tuple[str, str], float] = {}  # when the newest frame between two taps is due

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self.due[0][0] - time.monotonic()) if self.due else 1.0
            ready, _, _ = select.select([0, *self.taps.values()], [], [], wait_s)
            if 0 in ready:
                words = os.read(0, 1000).decode().split()
                if not words:
                    return
                self.obey(*words)
            # A node that is dead, or not up yet, neither sends nor receives.
            for name in [name for name, tap in self.taps.items() if tap in ready]:
                with contextlib.suppress(OSError):
                    self.pass_on(name, os.read(self.taps[name], 65536))
            while self.due and self.due[0][0] <= time.monotonic():
                _, _, name, frame = heapq.heappop(self.due)
                with contextlib.suppress(OSError, KeyError):
                    os.write(self.taps[name], frame)

    def obey(self, command: str, name: str) -> None:
        if command == "add":
            tap = self.taps[name] = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, TUN_SET_INTERFACE, struct.pack("16sH22x", name.encode(), TAP | NO_HEADER))
        elif command == "remove":
            os.close(self.taps.pop(name))
        elif command == "cut":
            self.cut.add(name)
        else:
            self.cut.discard(name)
        print("done", flush=True)

    def pass_on(self, name: str, frame: bytes) -> None:
        self.cards[frame[6:12]] = name
        target = self.cards.get(frame[:6])
        for other in [target] if target else [other for other in self.taps if other != name]:
            is_cut = not self.cut.isdisjoint((name, other)) and frame[12:14] != ARP
            if not is_cut and self.rng.random() >= self.loss:
                due = time.monotonic() + self.delay_s * self.rng.uniform(1, 1.1)
                due = self.last[name, other] = max(due, self.last.get((name, other), 0.0))
                heapq.heappush(self.due, (due, next(self.count), other, frame))


class SlowSwitch(Switch):
    """A Switch whose links are joined by a Wire."""

    def __init__(self, delay_s: float, loss: float) -> None:
        super().__init__()
        enter = ["nsenter", "-t", str(self.process.pid), "--net"]
        words = [*enter, sys.executable, "-m", "support.slow_switch", str(delay_s), str(loss)]
        self.wire = subprocess.Popen(words, stdin=-1, stdout=-1, text=True, bufsize=1, cwd=TESTS)

    def tell(self, command: str, link: str) -> None:
        assert self.wire.stdin and self.wire.stdout
        self.wire.stdin.write(f"{command} {link}\n")
        if self.wire.stdout.readline() != "done\n":
            raise RuntimeError(f"the wire could not {command} {link}")

    def plug_in(self, card: str) -> str:
        self.count += 1
        link = f"v{self.name}{self.count:x}"
        self.tell("add", link)
        self.run(f"ip link set {link} {card}")
        return link

    def unplug(self, link: str) -> None:
        self.tell("remove", link)

    def cut(self, link: str) -> None:
        self.tell("cut", link)

    def heal(self, link: str) -> None:
        self.tell("heal", link)

    def close(self) -> None:
        self.wire.communicate()  # closes its stdin, so it ends
        super().close()


if __name__ == "__main__":
    Wire(*map(float, sys.argv[1:])).run()
