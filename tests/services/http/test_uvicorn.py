"""uvicorn's names that its documentation does not have and that we use: a release without one fails here first."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import tomllib
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.services.http import connection
from penstock.services.http import server as http_server
from tests.rules.source import ROOT


def used(source: str, owner: str, *names: str) -> set[str]:
    """Attributes that the class `owner` of a module uses of what goes by one of `names`, less those that it makes."""
    (body,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == owner]
    found, made = set(), {node.name for node in body.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names:
            (made if node.attr.startswith("_") and isinstance(node.ctx, ast.Store) else found).add(node.attr)
    return found - made


async def parts() -> tuple[HttpToolsProtocol, RequestResponseCycle]:
    config = uvicorn.Config(app=connection, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.http_protocol_class = HttpToolsProtocol
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    cycle = RequestResponseCycle(
        scope=Any, transport=Any, flow=Any, logger=logging.getLogger(), access_logger=logging.getLogger(),
        access_log=False, default_headers=[], message_event=asyncio.Event(), expect_100_continue=False,
        keep_alive=True, on_response=lambda: None,
    )  # type: ignore[arg-type] # fmt: skip
    return protocol, cycle


async def test_what_a_connection_uses_is_there() -> None:
    source = inspect.getsource(connection)
    protocol, cycle = await parts()
    of_protocol = used(source, "Connection", "self", "super()") - {"url", "headers"}  # made with the first request
    assert {"cycle", "pipeline", "flow", "timeout_keep_alive", "_unset_keepalive_if_required"} <= of_protocol
    assert [name for name in sorted(of_protocol) if not hasattr(protocol, name)] == []
    of_cycle = used(source, "Connection", "cycle", "self.cycle") | used(source, "StreamWriter", "cycle", "self._cycle")
    assert {"response_complete", "disconnected", "message_event", "chunked_encoding"} <= of_cycle
    assert [name for name in sorted(of_cycle | {"body"}) if not hasattr(cycle, name)] == []
    protocol.on_message_begin()
    assert (protocol.url, protocol.headers) == (b"", [])
    assert protocol.scope["headers"] is protocol.headers, "headers are changed in place before the application starts"


async def test_what_the_server_uses_is_there() -> None:
    names = used(inspect.getsource(http_server), "Server", "self", "super()") - {"accepting", "servers"}
    assert {"on_tick", "should_exit", "force_exit", "started"} <= names
    server = uvicorn.Server(uvicorn.Config(app=connection, log_config=None))  # type: ignore[arg-type]
    assert [name for name in sorted(names) if not hasattr(server, name)] == []
    for name in ("startup", "shutdown", "main_loop", "handle_exit"):  # what we have in place of its own
        assert inspect.signature(getattr(uvicorn.Server, name)).parameters.keys() >= (
            {"self", "sockets"} if name in ("startup", "shutdown") else {"self"}
        )
    assert "self.servers" in inspect.getsource(uvicorn.Server.shutdown)


@pytest.mark.parametrize("name", ["uvicorn", "llguidance"])
def test_what_is_used_beyond_its_documentation_has_an_upper_bound(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = [line for line in project["dependencies"] if line.startswith(name)]
    assert ",<" in line
