"""--metrics-port: what monitoring asks needs no key there, and nothing else is there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import AddressError, ConfigError
from penstock.protocol.validation import check
from penstock.services.http.server import listen_for_metrics
from penstock.services.supervisor.preflight import check_api
from tests.services.client.fake_engine import silent
from tests.services.http.process import Tokenizer, api
from tests.services.links.network import free_port

KEY = {"authorization": "Bearer secret"}
OPEN = ("/metrics", "/version", "/health", "/health/live", "/health/ready")


async def test_monitoring_needs_no_key_at_its_own_port(tmp_path: Path) -> None:
    tokenizer, port = Tokenizer(silent, tmp_path), free_port()
    try:
        async with api(tmp_path, "--metrics-port", str(port), "--api-key", "secret") as process:
            monitoring = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient() as http:
                for path in OPEN:
                    assert (await http.get(monitoring + path)).status_code == 200, path
                assert b"penstock_api_ready" in (await http.get(monitoring + "/metrics")).content
                for path in ("/metrics", "/version", "/health", "/v1/models"):
                    assert (await http.get(process.url + path)).status_code == 401, path
                    assert (await http.get(process.url + path, headers=KEY)).status_code == 200, path
                for path in ("/v1/models", "/openapi.json", "/tokenizer_info", "/", "/other"):
                    for headers in (KEY, {}):
                        assert (await http.get(monitoring + path, headers=headers)).status_code == 404, path
                chat = await http.post(monitoring + "/v1/chat/completions", json={"messages": []}, headers=KEY)
                assert chat.status_code == 404
                rebound = await http.get(monitoring + "/metrics", headers={"host": "evil.example"})
                assert rebound.status_code == 403
            process.signal()
            assert await process.ended() == 0
    finally:
        tokenizer.close()


@pytest.mark.parametrize("take", [check_api, listen_for_metrics])
def test_a_port_that_is_taken_is_told_by_its_option(take: Callable[[ApiConfig], object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"--metrics-port: {port} is not allowed; another process listens there"):
            take(ApiConfig(port=0, metrics_port=port))


def test_without_the_option_nothing_listens() -> None:
    assert listen_for_metrics(ApiConfig()) is None


def test_it_is_another_port_than_the_clients() -> None:
    with pytest.raises(ConfigError, match="--metrics-port: 8000 is not allowed; it must be another port than --port"):
        check(Config(api=ApiConfig(port=8000, metrics_port=8000)))
