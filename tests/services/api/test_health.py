"""GET /health and its kin: what is missing is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from protocol.config import RunConfig
from protocol.links import Role
from services.restarts import LIMIT, Restarts
from tests.services.api.pipe import FakePort, client, service, silent, status
from tests.services.api.shapes import check_error


async def test_health_says_what_is_missing() -> None:
    port = FakePort(silent)
    parts = service(port)
    async with client(parts) as http:
        healthy = await http.get("/health")
        port.arrive(status(ready=False, step_age=9.5))
        loading = await http.get("/health")
        port.lose()
        lost = await http.get("/health")
        assert (await http.get("/health/live")).json() == {"status": "ok"}
        check_error((await http.get("/health/ready")).json(), "service_unavailable", None)
    body = healthy.json()
    assert (healthy.status_code, body["status"], body["ready"]) == (200, "ok", True)
    assert body["last_step_age"] == 0.25
    assert body["heartbeat_age"] < 2
    assert body["capacity"] == {
        "tokens": 1600, "tokens_free": 1440, "unfinished_requests": 0, "max_queued_requests": 4096
    }  # fmt: skip
    assert body["engine"]["running"] == 1
    assert body["parts"] == {"tokenizer": {"connected": 1, "configured": 1}, "scheduler": True, "executor": True}
    assert (loading.status_code, loading.json()["status"]) == (503, "the engine is not ready")
    assert loading.json()["last_step_age"] == 9.5
    assert loading.json()["parts"]["executor"] is False
    assert (lost.status_code, lost.json()["status"]) == (503, "no tokenizer is connected")


async def test_a_process_beyond_hope_makes_it_unready_and_is_named(tmp_path: Path) -> None:
    parts = service(FakePort(silent))
    parts = replace(parts, config=msgspec.structs.replace(parts.config, run=RunConfig(run_dir=str(tmp_path))))
    restarts = Restarts(tmp_path)
    for _ in range(LIMIT):
        restarts.died(Role.TOKENIZER, 1, "signal SIGKILL", 100.0)
    reason = "tokenizer-1 failed 5 times within 60 seconds, the last time with signal SIGKILL"
    async with client(parts) as http:
        health, ready = await http.get("/health"), await http.get("/health/ready")
        assert (health.status_code, health.json()["status"], health.json()["ready"]) == (503, reason, False)
        assert (ready.status_code, ready.json()["error"]["message"]) == (503, reason)
        assert (await http.get("/health/live")).status_code == 200
        restarts.recovered(Role.TOKENIZER, 1)
        assert (await http.get("/health/ready")).status_code == 200
