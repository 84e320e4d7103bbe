"""The operator's listener: nothing on it without its key, none of it on the clients' port."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import AddressError, ConfigError
from penstock.protocol.validation import check
from penstock.services.http.routing import Access
from penstock.services.http.server import listen_for_operator
from penstock.services.openai.app_state import AppState
from penstock.services.openai.routes import ROUTES, operator_application, operator_routes
from penstock.services.supervisor.preflight import check_api
from tests.services.client.fake_engine import FakeLink, app_state, client, silent
from tests.services.http.process import Tokenizer, api
from tests.services.links.network import free_port

KEY, CLIENT = {"authorization": "Bearer operator"}, {"authorization": "Bearer client"}
EVERY = operator_routes(ApiConfig(lora_dir="x", weights_dir="x"))
ELSEWHERE = ("/v1/models", "/metrics", "/health", "/", "/nothing")
PUBLIC = {route.path for route in ROUTES}


def server(folder: Path, **options: Any) -> AppState:
    keys = folder / "keys"
    keys.write_text("operator\n")
    given = {"admin_address": "127.0.0.1:0", "operator_key_file": str(keys), "api_key": "client", "allowed_hosts": ""}
    return app_state(FakeLink(silent), **{**given, **options})


@pytest.mark.parametrize("path", [*(route.path for route in EVERY), *ELSEWHERE])
async def test_nothing_is_told_without_the_operators_key(tmp_path: Path, path: str) -> None:
    app = server(tmp_path)
    async with client(app, served=operator_application) as http:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            for headers in ({}, CLIENT, {"x-api-key": "client"}, {"authorization": "operator"}):
                answer = await http.request(method, f"http://127.0.0.1{path}", headers=headers)
                assert answer.status_code == 401, (method, headers)
        if path in ELSEWHERE:
            found = await http.get(f"http://127.0.0.1{path}", headers=KEY)
            assert found.status_code == 404, "clients have another port"


@pytest.mark.parametrize("route", EVERY, ids=lambda route: route.path)
async def test_nothing_of_it_is_on_the_clients_port(tmp_path: Path, route: Any) -> None:
    async with client(server(tmp_path, lora_dir=str(tmp_path), weights_dir=str(tmp_path))) as http:
        for headers in (KEY, CLIENT):
            answer = await http.request(route.method, f"http://127.0.0.1{route.path}", headers=headers)
            if route.path in PUBLIC:
                probe = any(each.access is Access.PROBE for each in ROUTES if each.path == route.path)
                refused = headers is KEY and not probe
                assert answer.status_code in ((401,) if refused else (200, 400)), "the clients' own, for their keys"
            else:
                assert answer.status_code == (401 if headers is KEY else 404)


async def test_pages_and_other_names_are_refused(tmp_path: Path) -> None:
    """As on the clients' port, and pages that those let in are none of the operator's."""
    app = server(tmp_path, allowed_origins="https://example.org")
    async with client(app, served=operator_application, headers=KEY) as http:
        for headers in ({"origin": "https://example.org"}, {"origin": "null"}, {"host": "evil.example"}):
            answer = await http.get("http://127.0.0.1/openapi.json", headers=headers)
            assert answer.status_code == 403, headers
        assert (await http.get("http://127.0.0.1/openapi.json")).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admin_address": "127.0.0.1:8001"}, "--admin-address: '127.0.0.1:8001' is not allowed; it needs --operator-"),
        ({"operator_key_file": "k"}, "--operator-key-file: 'k' is not allowed; the operator's routes need an address"),
        ({"admin_address": "127.0.0.1:8000", "operator_key_file": "k"}, "another port than --port"),
        ({"admin_address": "127.0.0.1:9", "metrics_port": 9, "operator_key_file": "k"}, "another port than --port"),
        ({"weights_dir": "/w"}, "--weights-dir: '/w' is not allowed; it needs --admin-address"),
        ({"admin_address": "unix:/a", "uds": "/a"}, "another socket than --uds"),
        *(({"admin_address": wrong}, "it must be like") for wrong in ("8001", "unix:", "a:b", "a:65536", "http://a:1")),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Config(api=ApiConfig(**options)))


@pytest.mark.parametrize("take", [check_api, listen_for_operator])
def test_the_key_crosses_no_network_in_clear(tmp_path: Path, take: Any) -> None:
    (tmp_path / "keys").write_text("operator\n")
    options = ApiConfig(port=0, admin_address="0.0.0.0:0", operator_key_file=str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match=r"--admin-address: '0.0.0.0:0' is not allowed; other machines reach it"):
        take(options)


@pytest.mark.parametrize("take", [check_api, listen_for_operator])
def test_a_socket_that_cannot_be_made_is_told_by_the_option(tmp_path: Path, take: Any) -> None:
    where = f"unix:{tmp_path}/none/s"
    with pytest.raises(AddressError, match=f"--admin-address: '{where}' is not allowed; its folder must be there"):
        take(ApiConfig(port=0, admin_address=where))


async def test_it_listens_apart_and_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("operator\n")
    tokenizer, port = Tokenizer(silent, tmp_path), free_port()
    options = ("--admin-address", f"127.0.0.1:{port}", "--operator-key-file", str(tmp_path / "keys"))
    try:
        async with api(tmp_path, *options, "--api-processes", "2") as process, httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/openapi.json"
            assert (await http.get(url)).status_code == 401
            assert (await http.get(url, headers=KEY)).status_code == 200
            async with api(tmp_path, *options, "--api-processes", "2", index=1, ready=False) as other:
                assert (await http.get(f"{other.url}/health/live")).status_code == 200, "the port is not its own"
            process.signal()
            assert await process.ended() == 0
    finally:
        tokenizer.close()


async def test_a_socket_is_its_owners_and_needs_no_key(tmp_path: Path) -> None:
    tokenizer, path = Tokenizer(silent, tmp_path), tmp_path / "admin.sock"
    try:
        async with api(tmp_path, "--admin-address", f"unix:{path}") as process:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport) as http:
                assert (await http.get("http://admin/openapi.json")).status_code == 200
                assert (await http.get("http://admin/v1/models")).status_code == 404
            process.signal()
            assert await process.ended() == 0
        assert not path.exists()
    finally:
        tokenizer.close()
