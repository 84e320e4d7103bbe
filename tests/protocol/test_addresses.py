"""Addresses of hosts, and ports that two options want."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import ConfigError
from penstock.protocol.links import PORTS, HostAddress, check_apart, read_address

HOSTS = ("10.0.0.1", "node-1.example", "localhost", "[fd00::1]", "[::1]", "a_b")


@given(host=st.sampled_from(HOSTS), port=st.integers(1, PORTS - 1))
def test_what_is_read_is_what_was_written(host: str, port: int) -> None:
    address = read_address("--rendezvous", f"tcp://{host}:{port}")
    assert address == HostAddress(host, port)
    assert str(address) == f"tcp://{host}:{port}"
    assert f"[{address.bare}]" == host if ":" in address.bare else address.bare == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1:29500",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:0",
        "tcp://h:65536",
        "tcp://h:999999",
        "tcp://fd00::1:80",
        "tcp://[h]:80",
        "tcp://a/b:1",
        "tcp://:80",
        "tcp://*:80",
        "tcp://h:80 ",
        "tcp://h:80\n",
        "tcp://u@h:80",
        "udp://h:80",
        "tcp://h:\u0663",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be like tcp://10\.0\.0\.1:29500") as caught:
        read_address("--scheduler-address", text)
    assert caught.value.option == "--scheduler-address"
    assert caught.value.value == text


def test_the_ports_of_one_address_stand_side_by_side() -> None:
    address = HostAddress("h", 5000)
    assert [str(address.after(count)) for count in range(3)] == ["tcp://h:5000", "tcp://h:5001", "tcp://h:5002"]


@given(ports=st.integers(1, 200), port=st.integers(1, PORTS - 1))
def test_all_ports_that_are_needed_must_be_there(ports: int, port: int) -> None:
    if port + ports <= PORTS:
        assert read_address("--rendezvous", f"tcp://h:{port}", ports).after(ports - 1).port < PORTS
        return
    with pytest.raises(ConfigError, match=f"it needs {ports} ports from this one on, and 65535 is the last"):
        read_address("--rendezvous", f"tcp://h:{port}", ports)


@given(one=st.tuples(st.integers(1, 30), st.integers(1, 8)), other=st.tuples(st.integers(1, 30), st.integers(1, 8)))
def test_two_options_do_not_share_a_port_of_a_host(one: tuple[int, int], other: tuple[int, int]) -> None:
    wanted = {"--a": (HostAddress("h", one[0]), one[1]), "--b": (HostAddress("H", other[0]), other[1])}
    check_apart({**wanted, "--b": (HostAddress("elsewhere", other[0]), other[1])})
    if one[0] + one[1] <= other[0] or other[0] + other[1] <= one[0]:
        check_apart(wanted)
        return
    with pytest.raises(ConfigError, match="--a has") as caught:
        check_apart(wanted)
    assert caught.value.option == "--b"
