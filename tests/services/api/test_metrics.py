"""GET /metrics (scrape.py): what happened, in text that Prometheus reads."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_core.histogram import Histogram
from services.api.metrics import FIRST_TOKEN, INTER_TOKEN, WHOLE_REQUEST
from tests.services.api.pipe import FakePort, answering, client, service, status, words

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


async def test_metrics_are_what_happened() -> None:
    async with client(service(FakePort(answering(words("a", "b", "c"))))) as http:
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
    assert found[("penstock_engine_blocks",)] == 100
    assert found[("penstock_engine_output_tokens_total",)] == 22
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert all(family.documentation for family in families.values())


async def test_metrics_tell_what_became_of_drafts() -> None:
    port = FakePort(answering(words("a")))
    async with client(service(port)) as http:
        port.arrive(status(drafts=3, draft_tokens=12, accepted_tokens=7, accepted_at=(3, 2, 2, 0)))
        text = (await http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
    assert found["penstock_engine_drafts"] == 3
    assert found["penstock_engine_draft_tokens"] == 12
    assert found["penstock_engine_accepted_tokens"] == 7
    places = families["penstock_engine_accepted_tokens_by_position"].samples
    assert [(sample.labels, sample.value) for sample in places] == [
        ({"position": str(place)}, count) for place, count in enumerate((3, 2, 2, 0))
    ]


@pytest.mark.parametrize("bounds", [FIRST_TOKEN, INTER_TOKEN, WHOLE_REQUEST])
def test_buckets_ascend_and_hold_their_upper_bound(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    histogram = Histogram(bounds)
    for bound in bounds:
        histogram.observe(bound)
    histogram.observe(1e9)
    assert histogram.statistics().counts == (1,) * (len(bounds) + 1)
