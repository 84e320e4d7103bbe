"""The socket that the api listens on: an address of this machine or a file, with TLS or without."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import ConfigError
from penstock.services.supervisor import address

Socket = socket.socket

MODES: Mapping[str, int] = {"owner": 0o600, "group": 0o660, "everybody": 0o666}
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 4))  # a dead host: 140 s


def listen(options: ApiConfig) -> Socket:
    """A bound socket, which further api processes may bind too unless it is a file. Raises AddressError."""
    return listen_at_file(options) if options.uds else listen_at_address(options)


def listen_at_address(options: ApiConfig) -> Socket:
    family, target = address.resolve(options.host, options.port)
    listener = Socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if options.api_processes > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # every connection inherits these
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEP_ALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, name, value)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise address.refusal(options.host, options.port, error) from error
    listener.setblocking(False)
    return listener


def listen_at_file(options: ApiConfig) -> Socket:
    """A file that a dead server left is replaced; one that somebody listens at is not."""
    path = Path(options.uds)
    address.check_file(path)
    listener = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_name(f".{path.name}.new")  # never reachable by others than MODES says, not even for a moment
    try:
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        fresh.chmod(MODES[options.uds_mode])
        fresh.rename(path)
    except OSError as error:
        listener.close()
        raise address.file_refusal(path, error) from error
    listener.setblocking(False)
    return listener


def leave(options: ApiConfig) -> None:
    """Take the file away that `listen` made."""
    if options.uds:
        with contextlib.suppress(OSError):
            Path(options.uds).unlink()


def url_of(listener: Socket, options: ApiConfig) -> str:
    """What clients are told; for a file its path, as nginx and others write it."""
    if options.uds:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls(options: ApiConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the certificate of the options; None where there is none. Raises ConfigError."""
    if not options.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    key = options.ssl_keyfile or options.ssl_certfile
    for flag, path in (("--ssl-certfile", options.ssl_certfile), ("--ssl-keyfile", key)):
        if not Path(path).is_file():
            raise ConfigError(flag, path, "it must be a PEM file")
    try:
        # A password that is not needed is not looked at; without one OpenSSL would ask the terminal.
        context.load_cert_chain(options.ssl_certfile, key, password=options.ssl_keyfile_password)
    except (OSError, ValueError) as error:
        raise ConfigError("--ssl-certfile", options.ssl_certfile, f"it must fit its key: {reason(error)}") from error
    if options.ssl_ca_certs:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", options.ssl_ca_certs, f"it must be PEM: {reason(error)}") from error
        required = options.ssl_cert_reqs == "required"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
