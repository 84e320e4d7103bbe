"""The address that the api listens on: checked, and reserved, before any process starts."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import AddressError

MAX_UDS = 107 - len("..new")  # bytes of a path: those of sockaddr_un less the suffix of its temporary name


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The socket family and address of a host name on this machine. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError("--host", host, f"it must be an address of this machine: {error.strerror}") from error
    family, _, _, _, address = found[0]
    return family, address


def only_here(options: ApiConfig) -> bool:
    """Whether the api listens on a loopback address, which only programs of this machine reach."""
    if options.uds:
        return False
    _, target = resolve(options.host, options.port)
    found = ipaddress.ip_address(str(target[0]).partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def check(host: str, port: int) -> None:
    """Raise AddressError unless a process could listen there now."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise refusal(host, port, error) from error


@contextlib.contextmanager
def named(option: str, value: object) -> Iterator[None]:
    """An AddressError of this block names the option that the address was given by."""
    try:
        yield
    except AddressError as error:
        raise AddressError(option, value, error.allowed) from None


def refusal(host: str, port: int, error: OSError) -> AddressError:
    """A failed bind as an error for the operator."""
    if error.errno == errno.EADDRNOTAVAIL:
        return AddressError("--host", host, "it must be an address of this machine; 0.0.0.0 stands for all of them")
    if error.errno == errno.EADDRINUSE:
        return AddressError("--port", port, f"another process listens there on {host}; end it, or take another port")
    if error.errno == errno.EACCES:
        return AddressError("--port", port, "a port below 1024 needs CAP_NET_BIND_SERVICE; take one from 1024 on")
    return AddressError("--port", port, f"it cannot be bound on {host}: {error.strerror}")


def check_file(path: Path) -> None:
    """Raise AddressError unless a process could listen at this file: it does not exist, or is an unused socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise file_refusal(path, error) from error
    if mode is not None and not stat.S_ISSOCK(mode):
        raise AddressError("--uds", str(path), "there is a file that is no socket")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise AddressError("--uds", str(path), "its folder must be there and writable")
    if len(os.fsencode(path)) > MAX_UDS:
        raise AddressError("--uds", str(path), f"it must be of at most {MAX_UDS} bytes")
    if mode is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise AddressError("--uds", str(path), "another process listens there")


def file_refusal(path: Path, error: OSError) -> AddressError:
    """A failed bind to a file as an error for the operator."""
    return AddressError("--uds", str(path), f"it cannot be made: {error.strerror or error}")


def hold(config: ApiConfig) -> socket.socket | None:
    """With --port 0 and several api processes: a free port, reserved until the api processes share it."""
    if config.uds or config.port or config.api_processes == 1:
        return None
    family, address = resolve(config.host, 0)
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(address)
    return held
