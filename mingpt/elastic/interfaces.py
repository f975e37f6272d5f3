"""The addresses of this host and the interfaces that have them, on Linux, without the program `ip`."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFCONF = 0x8912
IFREQ_BYTES, MAX_ADDRESSES = 40, 512


def list_addresses() -> dict[str, str]:
    """{address: interface}, IPv4 and IPv6, of the interfaces that are up."""
    buffer = bytearray(IFREQ_BYTES * MAX_ADDRESSES)
    address = (ctypes_address(buffer),)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iL", len(buffer), *address))
    used = struct.unpack("iL", answer)[0]
    found = {}
    for start in range(0, used, IFREQ_BYTES):
        name = bytes(buffer[start : start + 16]).split(b"\0", 1)[0].decode().split(":")[0]
        found[socket.inet_ntoa(bytes(buffer[start + 20 : start + 24]))] = name
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        fields = line.split()
        found[str(ipaddress.ip_address(bytes.fromhex(fields[0])))] = fields[5]
    return found


def ctypes_address(buffer: bytearray) -> int:
    """Where the buffer lies in memory, as the kernel wants to know it."""
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def find_interface(address: str, addresses: dict[str, str]) -> str | None:
    """The interface that has `address`, or None; all of 127.0.0.0/8 belongs to the loopback interface."""
    if address in addresses:
        return addresses[address]
    if ipaddress.ip_address(address).is_loopback:
        return addresses.get("127.0.0.1")
    return None
