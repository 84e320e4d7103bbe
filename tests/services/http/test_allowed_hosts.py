"""Names that the server may be called by: no page can have another name resolve to it and read what it says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import ConfigError, Forbidden
from penstock.protocol.validation import check
from penstock.services.http.security import TrustedHosts
from tests.services.client.fake_engine import FakeLink, app_state, client, request_context, silent
from tests.services.http.test_refused_bodies import listening
from tests.services.openai.shapes import check_error

LOOPBACK = [
    "localhost", "LocalHost:8000", "localhost.", "api.localhost:1", "127.0.0.1", "127.0.0.1:80", "127.9.9.9", "[::1]",
    "[::1]:8000", "[::ffff:127.0.0.1]:1", "127.0.0.1:",
]  # fmt: skip
OTHERS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example",
    "127.0.0.1.nip.io", "10.0.0.1", "8.8.8.8:8000", "[2001:db8::1]", "", ":8000", "local host",
    "localhost@evil.example", "localhost:8000:8000", "localhost/evil", "0.0.0.0", "[::]",
]  # fmt: skip


def allowed(name: str | None, server: tuple[str, int] | None = ("127.0.0.1", 8000), /, **options: Any) -> bool:
    headers = [] if name is None else [(b"host", name.encode())]
    try:
        TrustedHosts(ApiConfig(**options)).check(request_context(*headers, server=server))
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("listening_at", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_on_loopback_goes_by_loopback_names_alone(listening_at: str) -> None:
    assert [host for host in LOOPBACK if not allowed(host, host=listening_at)] == []
    assert [host for host in OTHERS if allowed(host, host=listening_at)] == []
    assert allowed(None, host=listening_at)  # HTTP/1.0


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"host": "::"}, {"uds": "/tmp/s"}, {"allowed_hosts": "*"}])
def test_elsewhere_any_name_will_do(options: dict[str, str]) -> None:
    assert all(allowed(host, **options) for host in (*LOOPBACK, *OTHERS))


def test_names_that_were_given() -> None:
    given = {"host": "0.0.0.0", "allowed_hosts": "Api.example, *.below.example,port.example:81,[2001:db8::1]"}
    for host in ("api.example", "API.example.:9", "a.below.example", "a.b.below.example:1", "port.example:81",
                 "[2001:db8::1]:8", *LOOPBACK):  # fmt: skip
        assert allowed(host, **given), host
    for host in ("x.api.example", "below.example", "evilbelow.example", "port.example", "port.example:80", "10.0.0.7"):
        assert not allowed(host, **given), host


def test_the_address_that_a_connection_came_to_is_a_name_of_ours() -> None:
    """Probes and collectors ask by it, and no name that resolves elsewhere can be one."""
    given = {"host": "0.0.0.0", "allowed_hosts": "api.example"}
    assert allowed("10.0.0.7:8000", ("10.0.0.7", 8000), **given)
    assert allowed("10.0.0.7:8000", ("::ffff:10.0.0.7", 8000), **given)
    assert not allowed("10.0.0.8:8000", ("10.0.0.7", 8000), **given)
    assert not allowed("evil.example", None, **given)


async def test_another_name_is_refused_on_every_route_but_the_probes() -> None:
    async with client(app_state(FakeLink(silent), allowed_hosts="api.example")) as http:
        for path in ("/", "/version", "/metrics", "/health", "/v1/models", "/nowhere", "/openapi.json"):
            answer = await http.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 403
            check_error(answer.json(), "permission_error", None)
            assert answer.json()["error"]["code"] == "host_not_allowed"
            assert "'evil.example'" in answer.json()["error"]["message"]
            assert "--allowed-hosts" in answer.json()["error"]["message"]
            assert (await http.get(path, headers={"host": "api.example"})).status_code in (200, 404)
        for path in ("/health/live", "/health/ready"):
            assert (await http.get(path, headers={"host": "evil.example"})).status_code == 200
        told = await http.post("/v1/messages", headers={"host": "evil.example"}, json={})
        assert told.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost: localhost:7\r\n\r\n", 200),
        (b"GET /version HTTP/1.1\r\nHost: [::1]:7\r\n\r\n", 200),
        (b"GET /version HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET /version HTTP/1.1\r\nHost:\r\n\r\n", 403),
        (b"GET http://localhost/version HTTP/1.1\r\nHost: evil.example\r\n\r\n", 200),
        (b"GET http://[::1]:9/version HTTP/1.1\r\nHost: evil.example\r\n\r\n", 200),
        (b"GET http://evil.example/version HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        (b"GET http://evil.example:80/version HTTP/1.0\r\n\r\n", 403),
        (b"GET /version HTTP/1.0\r\n\r\n", 200),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    ],
)
async def test_the_name_of_a_request_on_a_real_connection(head: bytes, status: int) -> None:
    parts = app_state(FakeLink(silent), allowed_hosts="")
    async with asyncio.timeout(60), listening(parts) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head)
        found = await reader.readuntil(b"\r\n\r\n")
        assert int(found.split()[1]) == status
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("name", ["http://a", "a/b", "*.", "a:b", "[::1", "a..b", "*a", "a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        check(Config(api=ApiConfig(allowed_hosts=name)))
