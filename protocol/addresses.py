"""Addresses of hosts as options give them: tcp://HOST:PORT. HOST is a name, an IPv4 address, or an IPv6 address in
brackets. Several ports from PORT on belong to whoever listens there in several ways or numbers."""

from __future__ import annotations

import re

import msgspec

from penstock.protocol.errors import ConfigError

PATTERN = re.compile(r"tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
PORTS = 1 << 16


class HostAddress(msgspec.Struct, frozen=True):
    """A host, as it was spelled, brackets included, and the first of its ports."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def bare(self) -> str:
        """The host as resolvers and sockets take it: an IPv6 address without its brackets."""
        return self.host.strip("[]")

    def after(self, count: int) -> HostAddress:
        """The same host, so many ports further on."""
        return HostAddress(self.host, self.port + count)


def read_address(option: str, text: str, ports: int = 1) -> HostAddress:
    """Raises ConfigError for what is no address of a host and of so many ports."""
    found = PATTERN.fullmatch(text)
    if not found or not 0 < int(found[2]) < PORTS:
        raise ConfigError(option, text, "it must be like tcp://10.0.0.1:29500")
    if int(found[2]) + ports > PORTS:
        raise ConfigError(option, text, f"it needs {ports} ports from this one on, and {PORTS - 1} is the last")
    return HostAddress(found[1], int(found[2]))


def check_apart(addresses: dict[str, tuple[HostAddress, int]]) -> None:
    """Raise ConfigError where two options want the same port of one host, as far as its spelling tells. By option: its
    address and how many ports it needs."""
    seen: dict[tuple[str, int], str] = {}
    for option, (address, ports) in addresses.items():
        for port in range(address.port, address.port + ports):
            other = seen.setdefault((address.host.lower(), port), option)
            if other != option:
                why = f"it needs {ports} ports from this one on, and {other} has {port}"
                raise ConfigError(option, str(address), why)
