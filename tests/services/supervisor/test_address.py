from __future__ import annotations

import errno
import os
import socket

import pytest

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import AddressError
from penstock.services.supervisor import address


def test_a_free_port_passes():
    address.check("127.0.0.1", 0)
    address.check("localhost", 0)


def test_a_taken_port_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"--port: {port} is not allowed; another process listens there"):
            address.check("127.0.0.1", port)


def test_a_port_that_was_just_given_up_passes():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), taken.accept()[0] as accepted:
            accepted.close()  # ours goes into TIME_WAIT
    address.check("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "999.1.1.1"])
def test_an_address_of_no_interface_is_told(host):
    with pytest.raises(AddressError, match=r"--host: .* it must be an address of this machine"):
        address.check(host, 8000)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EACCES,
         "--port: 80 is not allowed; a port below 1024 needs CAP_NET_BIND_SERVICE; take one from 1024 on"),
        (errno.EADDRINUSE,
         "--port: 80 is not allowed; another process listens there on h; end it, or take another port"),
        (errno.EADDRNOTAVAIL,
         "--host: 'h' is not allowed; it must be an address of this machine; 0.0.0.0 stands for all of them"),
        (errno.EIO, f"--port: 80 is not allowed; it cannot be bound on h: {os.strerror(errno.EIO)}"),
    ],
)  # fmt: skip
def test_a_refused_bind_says_what_to_do(number, expected):
    assert str(address.refusal("h", 80, OSError(number, os.strerror(number)))) == expected


def test_an_address_of_another_option_is_told_by_that_option():
    with (
        pytest.raises(AddressError, match="--metrics-port: 9 is not allowed; taken"),
        address.named("--metrics-port", 9),
    ):
        raise AddressError("--port", 9, "taken")


def test_one_api_process_needs_no_port_kept():
    assert address.hold(ApiConfig(port=0, api_processes=1)) is None
    assert address.hold(ApiConfig(port=8000, api_processes=2)) is None


def test_a_kept_port_can_be_shared_and_takes_no_connection():
    held = address.hold(ApiConfig(port=0, api_processes=2))
    assert held is not None
    port = held.getsockname()[1]
    with held, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        listener.listen()
        for _ in range(20):
            socket.create_connection(("127.0.0.1", port)).close()
