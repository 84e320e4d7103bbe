"""GET /metrics: what happened, in text that Prometheus reads."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine_core.histogram import Histogram
from penstock.protocol.links import Role
from penstock.services.metrics.requests import FIRST_TOKEN, INTER_TOKEN, WHOLE_REQUEST, Traffic
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words
from tests.services.metrics.snapshots import every, message, server

ROLES = ("api", "tokenizer", "scheduler", "executor")
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


async def test_metrics_are_what_happened() -> None:
    port = FakeLink(answering(words("a", "b", "c")))
    async with client(app_state(port)) as http:
        port.arrive(message(*server(engine_blocks=100, engine_output_tokens=22)))
        await http.post("/v1/chat/completions", json=HELLO | {"stream": True})
        await http.post("/v1/chat/completions", json={})
        answer = await http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    found = {(s.name, *sorted(s.labels.values())): s.value for family in families.values() for s in family.samples}
    assert found["penstock_requests_total", "/v1/chat/completions", "0", "200"] == 1
    assert found["penstock_requests_total", "/v1/chat/completions", "0", "400"] == 1
    assert found["penstock_prompt_tokens_total", "0"] == 5
    assert found["penstock_submitted_requests_total", "0"] == 1
    assert found["penstock_refused_requests_total", "0"] == 0
    assert found["penstock_unfinished_requests", "0"] == 0
    assert found["penstock_connected_tokenizers", "0"] == 1
    assert found["penstock_completion_tokens_total", "0"] == 3
    assert found["penstock_time_to_first_token_seconds_count", "0"] == 1
    assert found["penstock_inter_token_latency_seconds_count", "0"] == 2
    assert found["penstock_request_duration_seconds_count", "0"] == 2
    assert found["penstock_inter_token_latency_seconds_bucket", "+Inf", "0"] == 2
    assert ("penstock_inter_token_latency_seconds_bucket", "0", "0.0005") in found
    assert found["penstock_e2e_seconds_count", "0"] == 1
    assert found["penstock_rejected_requests_total", "0", "missing_required_parameter"] == 1
    assert found["penstock_engine_blocks", "0"] == 100
    assert found["penstock_engine_output_tokens_total", "0"] == 22
    assert found["penstock_api_ready", "0", "api"] == 1
    assert {role: found["penstock_processes", role] for role in ROLES} == dict.fromkeys(ROLES, 1)
    assert {role: found["penstock_configured_processes", role] for role in ROLES} == dict.fromkeys(ROLES, 1)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert all(family.documentation for family in families.values())


async def test_metrics_tell_what_became_of_drafts() -> None:
    port = FakeLink(answering(words("a")))
    async with client(app_state(port)) as http:
        engine = every(Role.SCHEDULER, 0, 1e12, engine_drafts=3, engine_draft_tokens=12, engine_accepted_tokens=7)
        port.arrive(message(engine))
        text = (await http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
    assert found["penstock_engine_drafts"] == 3
    assert found["penstock_engine_draft_tokens"] == 12
    assert found["penstock_engine_accepted_tokens"] == 7
    places = families["penstock_engine_accepted_tokens_by_position"].samples
    assert [sample.labels for sample in places] == [{"replica": "0", "position": place} for place in ("0", "1")]


async def test_a_process_that_is_gone_has_no_series() -> None:
    port = FakeLink(answering(words("a")))
    async with client(app_state(port)) as http:
        port.arrive(message(*server()))
        assert 'role="executor"' in (await http.get("/metrics")).text
        port.arrive(message(every(Role.TOKENIZER), every(Role.SCHEDULER)))
        without = (await http.get("/metrics")).text
        assert 'penstock_processes{role="executor"} 0.0' in without
        assert 'penstock_process_cpu_seconds_total{index="0",role="executor"}' not in without
        assert "penstock_engine_running" in without
        port.lose()
        alone = (await http.get("/metrics")).text
    assert 'role="tokenizer"} 0.0' in alone
    assert "penstock_engine_" not in alone
    assert 'penstock_process_cpu_seconds_total{index="0",role="api"}' in alone


async def test_two_engines_are_told_apart() -> None:
    port = FakeLink(answering(words("a")))
    async with client(app_state(port)) as http:
        told = [every(Role.SCHEDULER, index, 1e12, engine_running=3 + index) for index in (0, 1)]  # after any heartbeat
        port.arrive(message(*told))
        lines = (await http.get("/metrics")).text.splitlines()
    assert 'penstock_engine_running{replica="0"} 3.0' in lines
    assert 'penstock_engine_running{replica="1"} 4.0' in lines
    assert lines.count("# TYPE penstock_engine_running gauge") == 1


def test_what_is_refused_is_no_answer() -> None:
    traffic = Traffic()
    traffic.answered("/v1/completions", 200, 3, 4, 0.5)
    traffic.answered("/v1/completions", 200, 3, 4, 0.5, "deadline_exceeded")
    traffic.answered("/v1/completions", 429, 0, 0, 0.5, "overloaded")
    traffic.answered("/health", 200, 0, 0, 0.5)
    assert traffic.rejections == {"deadline_exceeded": 1, "overloaded": 1}
    assert sum(traffic.timings.request.statistics().counts) == 4
    assert sum(traffic.timings.e2e.statistics().counts) == 1


@pytest.mark.parametrize("bounds", [FIRST_TOKEN, INTER_TOKEN, WHOLE_REQUEST])
def test_buckets_ascend_and_hold_their_upper_bound(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    histogram = Histogram(bounds)
    for bound in bounds:
        histogram.observe(bound)
    histogram.observe(1e9)
    assert histogram.statistics().counts == (1,) * (len(bounds) + 1)
