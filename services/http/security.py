"""Who may call the server: API keys, its own host names, and pages of other origins.

Host names (RFC 9110, sections 7.2 and 7.4): a page may have its own name resolve to an address that only this machine
reaches (DNS rebinding). To the browser the server then is the page's own, whatever CORS says. So a server that listens
on loopback alone answers to loopback names, and any other one to --allowed-hosts where it is given.

Origins (WHATWG Fetch, "HTTP CORS protocol"): browsers withhold the answer from a page of another origin, but send its
request all the same; a form needs no preflight. So a request from an origin that is neither the server's own nor in
--allowed-origins is refused. starlette's CORSMiddleware would let it through.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from pathlib import Path

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import ConfigError, Forbidden
from penstock.protocol.option import words
from penstock.protocol.validation import TOKEN
from penstock.services.http.request_context import RequestContext
from penstock.services.supervisor import address, logs

log = logging.getLogger(__name__)

COMMENT = "#"
MAX_FILE = 1 << 20  # bytes
OPTION, OPERATOR = "--api-key-file", "--operator-key-file"
Version = tuple[int, int, int]  # inode, size and ctime of a file; a change of its mode changes the ctime too

HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::([0-9]*))?")  # RFC 3986, section 3.2
LOCALHOST = "localhost"
MAX_SHOWN = 200  # characters of a name or an origin

Headers = list[tuple[bytes, bytes]]

METHODS = "GET, HEAD, POST, DELETE"
# Headers that a page may read beside the few that it always may.
EXPOSED = b"X-Request-Id, Retry-After, X-Penstock-Weight-Version"
MAX_AGE = b"600"  # seconds that a browser may remember a preflight
MAX_ASKED = 4096  # bytes of header names in a preflight


class Keys:
    """The keys of --api-key and of --api-key-file, which the process's loop reads again when it changes.

    A server that was started with a key file stays locked whatever becomes of the file: if it cannot be read or holds
    no key, the keys so far stay in force.
    """

    def __init__(self, options: ApiConfig, option: str = OPTION) -> None:
        """option: whose keys; OPERATOR's are a file's alone. Raises ConfigError for a file that cannot be read or holds
        no key."""
        given, file = ("", options.operator_key_file) if option == OPERATOR else (options.api_key, options.api_key_file)
        self._own = tuple(digest(key.encode()) for key in words(given))
        self._path = Path(file) if file else None
        self._option = option
        self.locked = bool(self._own) or self._path is not None  # whether a key is needed at all
        self._filed: tuple[bytes, ...] = ()
        self._version: Version | None = None
        if self._path is not None:
            self._version = version(self._path, option)
            self._filed = read(self._path, option)

    def accepts(self, given: bytes) -> bool:
        """Whether `given` is one of the keys, in constant time."""
        shown = digest(given)
        found = False
        for key in (*self._own, *self._filed):
            found |= hmac.compare_digest(key, shown)
        return found

    def refresh(self, *, always: bool = False) -> None:
        """Read the file again if it has changed, or `always`."""
        if self._path is None:
            return
        current: Version | None = None
        try:
            current = version(self._path, self._option)
            if current == self._version and not always:
                return
            self._filed = read(self._path, self._option)
        except ConfigError as error:
            if current != self._version or always:
                logs.error(log, "api_keys_kept", keys=len(self._filed), reason=error.allowed)
            self._version = current
            return
        self._version = current
        logs.info(log, "api_keys_read", keys=len(self._filed))


def digest(key: bytes) -> bytes:
    """Keys are compared as digests, which are equally long and do not tell where the keys differ."""
    return hashlib.sha256(key).digest()


def version(path: Path, option: str = OPTION) -> Version:
    """Raises ConfigError for a file that does not exist."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(option, str(path), f"it cannot be read: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_ctime_ns


def read(path: Path, option: str = OPTION) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one per line; blank lines and lines that begin with # are ignored.

    Raises ConfigError for a file that cannot be read, is not text, is larger than MAX_FILE bytes or holds no key.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        lines = [line.strip() for line in text.decode().splitlines()]
    except OSError as error:
        raise ConfigError(option, str(path), f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(option, str(path), "it must be UTF-8 text with a key per line") from error
    if len(text) > MAX_FILE:
        raise ConfigError(option, str(path), f"it is larger than {MAX_FILE} bytes")
    keys = tuple(digest(line.encode()) for line in lines if line and not line.startswith(COMMENT))
    if not keys:
        raise ConfigError(option, str(path), "it holds no key")
    return keys


class TrustedHosts:
    """--allowed-hosts. Loopback names and the address that a connection was made to are always allowed."""

    def __init__(self, options: ApiConfig) -> None:
        given = words(options.allowed_hosts)
        self.any = "*" in given or (not given and not address.only_here(options))  # there is nothing to check
        parted = [split(name.encode()) for name in given if name != "*"]
        self._names = frozenset((name, port) for name, port in parted if not name.startswith("*."))
        self._below = tuple((name[1:], port) for name, port in parted if name.startswith("*."))

    def check(self, context: RequestContext) -> None:
        """Raise Forbidden for another host name. HTTP/1.0 may name none."""
        host = context.header(b"host")
        if self.any or host is None or self._known(*split(host), context):
            return
        shown = host.decode("latin-1")[:MAX_SHOWN]
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
    """Name and port of a Host header or an authority, the name in lower case and without a final dot."""
    found = HOST.fullmatch(host.strip())
    if found is None:
        return "", ""
    return found[1].decode().lower().removesuffix("."), (found[2] or b"").decode()


def literal(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host name is, an IPv4 one also from IPv6 notation; None for a name."""
    try:
        found = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


class Cors:
    """--allowed-origins and its companions."""

    def __init__(self, options: ApiConfig) -> None:
        self._origins = frozenset(origin.encode() for origin in words(options.allowed_origins))
        self.enabled = bool(self._origins)  # whether pages of any other origin may call
        self._any = b"*" in self._origins
        methods = words(options.allowed_methods)
        self._methods = METHODS if "*" in methods else ", ".join(methods)
        headers = words(options.allowed_headers)
        self._headers = None if "*" in headers else ", ".join(headers).encode()  # None: those that are asked for
        self._credentials = options.allow_credentials

    def check(self, context: RequestContext) -> None:
        """Raise Forbidden for a page that may not call this server. Only browsers send an origin."""
        for value in context.headers.get(b"origin", ()):
            if not (self._any or value in self._origins or same_origin(value, context)):
                shown = value.decode("latin-1")[:MAX_SHOWN]
                message = f"pages of {shown!r} may not call this server; --allowed-origins names those that may"
                raise Forbidden(message, code="origin_not_allowed")

    def headers(self, context: RequestContext) -> Headers:
        """Headers of every response to the page."""
        if not self._origins:
            return []
        origin = value_of(context, b"origin")
        vary: Headers = [] if self._any else [(b"vary", b"Origin")]
        return [*self._allowance(origin), (b"access-control-expose-headers", EXPOSED), *vary] if origin else vary

    def preflight(self, context: RequestContext) -> Headers | None:
        """Headers of the response to a preflight of an allowed origin, beside `headers`; None for another OPTIONS."""
        asked = value_of(context, b"access-control-request-method")
        if not self._origins or not asked:
            return None
        if not self._allowance(value_of(context, b"origin")):
            return None
        names = self._headers
        if names is None:
            names = value_of(context, b"access-control-request-headers")
            if len(names) > MAX_ASKED or not all(map(TOKEN.fullmatch, words(names.decode("latin-1")))):
                return None
        return [
            (b"access-control-allow-methods", self._methods.encode()),
            *([(b"access-control-allow-headers", names)] if names else []),
            (b"access-control-max-age", MAX_AGE),
        ]

    def _allowance(self, origin: bytes) -> Headers:
        if not origin or not (self._any or origin in self._origins):
            return []
        allowed: Headers = [(b"access-control-allow-origin", b"*" if self._any else origin)]
        return [*allowed, (b"access-control-allow-credentials", b"true")] if self._credentials else allowed


def same_origin(origin: bytes, context: RequestContext) -> bool:
    """Whether the origin is the server's own, by http or https, since a proxy may terminate TLS. Behind a proxy that
    rewrites Host, the browser's Sec-Fetch-Site decides, which no page can set (W3C Fetch Metadata)."""
    authority = origin.partition(b"://")[2]
    host, site = value_of(context, b"host"), value_of(context, b"sec-fetch-site")
    return bool(authority) and (authority.lower() == host.lower() or site == b"same-origin")


def value_of(context: RequestContext, header: bytes) -> bytes:
    """The header's value; empty where it is absent."""
    return context.header(header) or b""
