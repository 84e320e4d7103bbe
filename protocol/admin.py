"""--admin-address: where the operator's routes are."""

from __future__ import annotations

import re

import msgspec

from penstock.protocol.errors import ConfigError

OPTION = "--admin-address"
UNIX = "unix:"
ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
PORTS = 1 << 16
FORM = "it must be like 127.0.0.1:8001 or unix:/run/penstock/admin.sock"


class AdminAddress(msgspec.Struct, frozen=True):
    """A host and a port of it, 0 for any free one, or the path of a unix socket."""

    host: str = ""  # an IPv6 address without its brackets
    port: int = 0
    file: str = ""


def read_admin_address(text: str) -> AdminAddress | None:
    """None where it is empty. Raises ConfigError for what is no address."""
    if not text:
        return None
    if text.startswith(UNIX) and len(text) > len(UNIX):
        return AdminAddress(file=text.removeprefix(UNIX))
    found = ADDRESS.fullmatch(text)
    if not found or int(found[2]) >= PORTS:
        raise ConfigError(OPTION, text, FORM)
    return AdminAddress(found[1].strip("[]"), int(found[2]))
