"""Which network interface reaches the other executors of a group: the one whose address they were met from.

gloo and NCCL choose one by themselves otherwise, by the host's name or by the order of interfaces, and may take one
that leads nowhere.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, MutableMapping
from pathlib import Path

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFCONF = 0x8912  # netdevice(7)
IFCONF = struct.Struct("@iP")  # bytes of a buffer, its address
IFREQ = struct.Struct("@16s2x2x4s16x")  # an interface's name and a sockaddr_in: family, port, address, padding
MOST_ADDRESSES = 4096
IF_INET6 = Path("/proc/net/if_inet6")  # proc(5)


def choose(address: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Have gloo and NCCL use the interface with this address, unless the operator has named one; its name, or nothing
    where no interface has it."""
    name = interface(address)
    for variable in VARIABLES if name else ():
        environ.setdefault(variable, name)
    return name


def interface(address: str) -> str:
    """Name of the interface with this IPv4 or IPv6 address; empty where none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    wanted = getattr(wanted, "ipv4_mapped", None) or wanted
    return next((name for found, name in (*ipv4_addresses(), *ipv6_addresses()) if found == wanted), "")


def ipv4_addresses() -> Iterator[tuple[ipaddress.IPv4Address, str]]:
    """Every IPv4 address of this host, and the interface that has it. An alias is told by its interface's name."""
    buffer = array.array("B", bytes(IFREQ.size * MOST_ADDRESSES))
    place, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        length, _ = IFCONF.unpack(fcntl.ioctl(asking, SIOCGIFCONF, IFCONF.pack(size, place)))
    for name, packed in IFREQ.iter_unpack(buffer[:length].tobytes()):
        yield ipaddress.IPv4Address(packed), name.rstrip(b"\0").decode().partition(":")[0]


def ipv6_addresses(path: Path = IF_INET6) -> Iterator[tuple[ipaddress.IPv6Address, str]]:
    """The same of IPv6, where the kernel has it."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        digits, _, _, _, _, name = line.split()
        yield ipaddress.IPv6Address(int(digits, 16)), name
