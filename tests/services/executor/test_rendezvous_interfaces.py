"""Which interface has an address, and what gloo and NCCL are told of it."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from penstock.services.executor.rendezvous import VARIABLES, choose, interface, ipv4_addresses, ipv6_addresses


def test_loopback_is_found_by_its_address() -> None:
    assert interface("127.0.0.1") == "lo"
    assert (ipaddress.IPv4Address("127.0.0.1"), "lo") in list(ipv4_addresses())
    assert interface("::ffff:127.0.0.1") == "lo", "as a socket of both kinds says it"


def test_names_are_those_of_the_kernel() -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert {name for _, name in ipv4_addresses()} <= names
    assert {name for _, name in ipv6_addresses()} <= names


def test_every_address_leads_back_to_its_interface() -> None:
    for address, name in ipv4_addresses():
        assert interface(str(address)) == name


def test_ipv6_addresses_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "if_inet6"
    file.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\nfd000000000000000000000000000002 02 40 00 80     eth0\n"
    )
    found = [(ipaddress.IPv6Address("::1"), "lo"), (ipaddress.IPv6Address("fd00::2"), "eth0")]
    assert list(ipv6_addresses(file)) == found
    assert list(ipv6_addresses(tmp_path / "missing")) == [], "a kernel without IPv6"


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::77", "fe80::77%eth0"])
def test_an_address_of_nobody_changes_nothing(address: str) -> None:
    environ: dict[str, str] = {}
    assert choose(address, environ) == ""
    assert environ == {}


def test_both_are_told_and_the_operator_knows_better() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert choose("127.0.0.1", environ) == "lo"
    assert environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}
    assert set(environ) == set(VARIABLES)
