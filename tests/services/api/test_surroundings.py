"""Models, tokenization, health, metrics, traces and the description."""

from __future__ import annotations

import json
import struct
from typing import Any

import openai.types as types
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.messages import Detokenize, SubmitText, Tokenize, TraceContext
from services.api import refusals
from services.api.metrics import FIRST_TOKEN, INTER_TOKEN, WHOLE_REQUEST, Histogram
from services.api.openapi import OPERATIONS, document
from services.api.requests import ChatRequest
from services.api.trace import trace_context
from tests.services.api.pipe import FakePort, answering, client, service, silent, status, words
from tests.services.api.shapes import check, check_error

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_models() -> None:
    async with client(service(FakePort(silent))) as http:
        listed = (await http.get("/v1/models")).json()
        one = (await http.get("/v1/models/demo-alias")).json()
        nobody = await http.get("/v1/models/some/body")
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["demo", "demo-alias"]
    for model in (*listed["data"], one):
        check(types.Model, model)
        assert model["max_model_len"] == 512
    assert one == listed["data"][1]
    assert nobody.status_code == 404
    check_error(nobody.json(), "not_found_error", "model")


async def test_tokenize_and_back() -> None:
    port = FakePort(answering(words("")))
    async with client(service(port)) as http:
        answer = (await http.post("/tokenize", json={"prompt": "abc"})).json()
        assert answer == {"count": 3, "max_model_len": 512, "tokens": [97, 98, 99], "token_strs": None}
        told = (await http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
        assert told["token_strs"] == ["a", "b"]
        back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": "abc"}
        assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    first, second = port.of(Tokenize)
    assert (first.add_special_tokens, first.with_strings, second.with_strings) == (True, False, True)


async def test_tokenizing_a_chat() -> None:
    port = FakePort(answering(words("")))
    body = HELLO | {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}, "continue_final_message": True}
    async with client(service(port)) as http:
        assert (await http.post("/tokenize", json=body)).status_code == 200
    (question,) = port.of(Tokenize)
    assert json.loads(question.messages) == HELLO["messages"]
    assert json.loads(question.tools) == body["tools"]
    assert json.loads(question.template_arguments) == {"a": 1}
    assert question.continue_final_message
    assert not question.add_generation_prompt
    assert not question.add_special_tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", HELLO | {"prompt": "a"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", HELLO | {"tools": 5}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
    ],
)
async def test_wrong_tokenizations(path: str, body: dict[str, Any], param: str) -> None:
    async with client(service(FakePort(silent))) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400
        check_error(answer.json(), "invalid_request_error", param)
        unknown = await http.post(path, json={"prompt": "a", "tokens": [1], "model": "nobody"})
        assert unknown.status_code == 404


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


async def test_metrics_are_what_happened() -> None:
    async with client(service(FakePort(answering(words("a", "b", "c"))))) as http:
        await http.post("/v1/chat/completions", json=HELLO)
        await http.post("/v1/chat/completions", json={})
        answer = await http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    found = {(s.name, *sorted(s.labels.values())): s.value for family in families.values() for s in family.samples}
    assert found["penstock_requests_total", "/v1/chat/completions", "0", "200"] == 1
    assert found["penstock_requests_total", "/v1/chat/completions", "0", "400"] == 1
    assert found["penstock_prompt_tokens_total", "0"] == 5
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


@pytest.mark.parametrize("bounds", [FIRST_TOKEN, INTER_TOKEN, WHOLE_REQUEST])
def test_buckets_ascend_and_hold_their_upper_bound(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    histogram = Histogram(bounds)
    for bound in bounds:
        histogram.observe(bound)
    histogram.observe(1e9)
    assert histogram.statistics().counts == (1,) * (len(bounds) + 1)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, TraceContext()),
        ({"traceparent": PARENT}, TraceContext(PARENT)),
        ({"traceparent": PARENT, "tracestate": "a=1"}, TraceContext(PARENT, "a=1")),
        ({"traceparent": PARENT, "tracestate": "a=" + "x" * 511}, TraceContext(PARENT)),
        ({"traceparent": "cc" + PARENT[2:] + "-more"}, TraceContext("cc" + PARENT[2:] + "-more")),
        ({"traceparent": PARENT + "-more"}, TraceContext()),
        ({"traceparent": "ff" + PARENT[2:]}, TraceContext()),
        ({"traceparent": PARENT.upper()}, TraceContext()),
        ({"traceparent": PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)}, TraceContext()),
        ({"traceparent": PARENT.replace("b7ad6b7169203331", "0" * 16)}, TraceContext()),
        ({"traceparent": "x" * 9000}, TraceContext()),
        ({"tracestate": "a=1"}, TraceContext()),
    ],
)
def test_trace_context(headers: dict[str, str], expected: TraceContext) -> None:
    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    assert trace_context(scope) == expected


async def test_the_trace_travels_with_the_request() -> None:
    port = FakePort(answering(words("ok")))
    async with client(service(port)) as http:
        for path, body in (("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "a"})):
            await http.post(path, json=body, headers={"traceparent": PARENT})
    assert [request.trace.traceparent for request in port.of(SubmitText)] == [PARENT, PARENT]


async def test_token_ids_travel_as_int32() -> None:
    port = FakePort(answering(words("")))
    async with client(service(port)) as http:
        await http.post("/detokenize", json={"tokens": [1, 999]})
    assert port.of(Detokenize)[0].token_ids == struct.pack("<2i", 1, 999)


async def test_the_description_names_every_route_and_every_reference_resolves() -> None:
    parts = service(FakePort(silent), api_key="key")
    async with client(parts, headers={"authorization": "Bearer key"}) as http:
        found = (await http.get("/openapi.json")).json()
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                assert operation["responses"]["200"]
                answer = await http.request(method, path.replace("{name}", "demo"), content=b"?")
                assert answer.status_code in (200, 400)
                assert str(answer.status_code) in operation["responses"]
    assert found == document(locked=True)
    assert found["openapi"] == "3.1.0"
    assert len(OPERATIONS) == sum(len(methods) for methods in found["paths"].values())
    names = [operation["operationId"] for methods in found["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
    schemas = found["components"]["schemas"]
    for reference in references(found):
        assert reference.removeprefix("#/components/schemas/") in schemas


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for part in value.values() for found in references(part)]
    return [found for part in value for found in references(part)] if isinstance(value, list) else []


def test_the_description_is_made_of_the_types_that_decode() -> None:
    chat = document(locked=False)["components"]["schemas"]["ChatRequest"]
    assert set(chat["properties"]) == set(ChatRequest.__struct_fields__)
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert all(name in chat["description"] for name in (*refusals.REFUSED, *refusals.WITHOUT_EFFECT))
