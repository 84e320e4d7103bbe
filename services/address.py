"""The address that the api listens on: checked, and kept, before any process starts."""

from __future__ import annotations

import errno
import socket
from typing import Any

from protocol.config import ApiConfig
from protocol.errors import AddressError


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The socket family and address of a host name on this machine. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError("--host", host, f"it must be an address of this machine: {error.strerror}") from error
    family, _, _, _, address = found[0]
    return family, address


def check(host: str, port: int) -> None:
    """Raise AddressError unless somebody could listen there now."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise refusal(host, port, error) from error


def refusal(host: str, port: int, error: OSError) -> AddressError:
    """What a failed bind means to the operator."""
    if error.errno == errno.EADDRNOTAVAIL:
        return AddressError("--host", host, "it must be an address of this machine")
    if error.errno == errno.EADDRINUSE:
        return AddressError("--port", port, f"another process listens there on {host}")
    return AddressError("--port", port, f"it cannot be bound on {host}: {error.strerror}")


def hold(config: ApiConfig) -> socket.socket | None:
    """With --port 0 and several api processes: a free port, kept from others until the api processes share it."""
    if config.port or config.api_processes == 1:
        return None
    family, address = resolve(config.host, 0)
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(address)
    return held
