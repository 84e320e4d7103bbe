"""GET /health and its kin: what is missing is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from penstock.protocol.config import RunConfig
from penstock.protocol.links import Role
from penstock.services.client.model_switcher import ModelSwitcher
from penstock.services.client.replicas import ReplicaSet
from penstock.services.supervisor.restart_policy import LIMIT, RestartPolicy
from tests.services.client.fake_engine import FakeLink, app_state, client, silent, status
from tests.services.openai.shapes import check_error


async def test_health_says_what_is_missing() -> None:
    port = FakeLink(silent)
    parts = app_state(port)
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
    assert body["adapters"] is None
    assert body["parts"] == {"tokenizer": {"connected": 1, "configured": 1}, "scheduler": True, "executor": True}
    assert (loading.status_code, loading.json()["status"]) == (503, "the engine is not ready")
    assert loading.json()["last_step_age"] == 9.5
    assert loading.json()["parts"]["executor"] is False
    assert (lost.status_code, lost.json()["status"]) == (503, "no tokenizer is connected")


async def test_it_is_not_ready_before_the_first_models_are_loaded() -> None:
    """Their schedulers wait for requests, though the server may not come up at all."""
    clients = {"a": app_state(FakeLink(silent)).engine_client}
    switcher = ModelSwitcher(clients, [{0: 0.9}], 30.0, lambda _: False)
    parts = replace(app_state(FakeLink(silent)), switcher=switcher)
    async with client(parts) as http:
        answer = await http.get("/health/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        switcher.settled = True
        assert (await http.get("/health/ready")).status_code == 200


async def test_a_process_beyond_hope_makes_it_unready_and_is_named(tmp_path: Path) -> None:
    parts = app_state(FakeLink(silent))
    parts = replace(parts, config=msgspec.structs.replace(parts.config, run=RunConfig(run_dir=str(tmp_path))))
    restarts = RestartPolicy(tmp_path)
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
    restarts.close()


async def test_a_replica_that_is_missing_degrades_the_server(tmp_path: Path) -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    model = msgspec.structs.replace(parts.config.model, data_parallel_size=2, tensor_parallel_size=2)
    config = msgspec.structs.replace(parts.config, model=model, run=RunConfig(run_dir=str(tmp_path)))
    parts = replace(parts, config=config)
    parts.engine_client.replicas = ReplicaSet(2, 2.0)
    port.arrive(msgspec.structs.replace(status(), replica=1))
    restarts = RestartPolicy(tmp_path)
    async with client(parts) as http:
        for reason in ("the engine has not reported yet", "executor-1 failed 5 times within 60 seconds"):
            body = (answer := await http.get("/health")).json()
            assert (answer.status_code, body["ready"], body["status"]) == (200, True, "ok")
            assert body["degraded"].startswith(f"replica 0: {reason}")
            lost, serving = body["replicas"]
            assert (lost["replica"], lost["ready"], serving["replica"], serving["ready"]) == (0, False, 1, True)
            assert lost["status"].startswith(reason)
            assert serving["status"] == "ok"
            assert (await http.get("/health/ready")).status_code == 200
            for _ in range(LIMIT):
                restarts.died(Role.EXECUTOR, 1, "signal SIGKILL", 100.0)  # of the first replica
        for _ in range(LIMIT):
            restarts.died(Role.SCHEDULER, 1, "signal SIGKILL", 100.0)
        body = (answer := await http.get("/health")).json()
    restarts.close()
    assert (answer.status_code, body["degraded"]) == (503, "")
    assert "executor-1 failed" in body["status"]
    assert "scheduler-1 failed" in body["status"]
