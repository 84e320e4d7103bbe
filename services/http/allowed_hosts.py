"""Names that this server may be called by. Source: RFC 9110, section 7.2, and section 7.4 for names that are not ours.

A page may have its own name resolve to an address that only this machine reaches (DNS rebinding): to the browser the
server is then the page's own, whatever CORS says. The name stands in Host, so a server that listens on loopback alone
answers to loopback names alone, and any other one to those of --allowed-hosts, where it is given.
"""

from __future__ import annotations

import ipaddress
import re

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import Forbidden
from penstock.protocol.option import words
from penstock.services.http.request_context import RequestContext
from penstock.services.supervisor import address

HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::([0-9]*))?")  # RFC 3986, section 3.2
LOCALHOST = "localhost"
SHOWN = 200  # characters of a name


class Hosts:
    """What the options allow. Loopback names, and the address that a connection came to, are never another's."""

    def __init__(self, options: ApiConfig) -> None:
        given = words(options.allowed_hosts)
        self._any = "*" in given or (not given and not address.only_here(options))
        parted = [split(name.encode()) for name in given if name != "*"]
        self._names = frozenset((name, port) for name, port in parted if not name.startswith("*."))
        self._below = tuple((name[1:], port) for name, port in parted if name.startswith("*."))

    def check(self, context: RequestContext) -> None:
        """Raise Forbidden for a request to a name that this server does not go by. HTTP/1.0 may name none."""
        host = context.header(b"host")
        if self._any or host is None or self._known(*split(host), context):
            return
        shown = host.decode("latin-1")[:SHOWN]
        message = f"this server does not go by the host name {shown!r}; --allowed-hosts names those that it goes by"
        raise Forbidden(message, code="host_not_allowed")

    def _known(self, name: str, port: str, context: RequestContext) -> bool:
        if name == LOCALHOST or name.endswith("." + LOCALHOST):  # RFC 6761, section 6.3
            return True
        if self._names & {(name, ""), (name, port)}:
            return True
        if any(name.endswith(end) and wanted in ("", port) for end, wanted in self._below):
            return True
        found = literal(name)
        own = context.scope.get("server")
        return found is not None and (found.is_loopback or (own is not None and found == literal(str(own[0]))))


def split(host: bytes) -> tuple[str, str]:
    """Name and port of a Host header or an authority, the name in lower case; a final dot means the same name."""
    found = HOST.fullmatch(host.strip())
    if found is None:
        return "", ""
    return found[1].decode().lower().removesuffix("."), (found[2] or b"").decode()


def literal(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host name is, an IPv4 address however it is written; None for a name."""
    try:
        found = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
