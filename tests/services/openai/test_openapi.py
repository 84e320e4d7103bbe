"""GET /openapi.json: every route, every reference, the types that decode."""

from __future__ import annotations

from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from penstock.protocol import limits
from penstock.protocol.config import ApiConfig
from penstock.services.openai.messages.request import REFUSALS as MESSAGE_REFUSALS
from penstock.services.openai.messages.request import MessageRequest
from penstock.services.openai.openapi import document
from penstock.services.openai.parameters import UNSUPPORTED, WITHOUT_EFFECT
from penstock.services.openai.responses.request import REFUSALS as RESPONSE_REFUSALS
from penstock.services.openai.responses.request import ResponseRequest
from penstock.services.openai.routes import ROUTES
from penstock.services.openai.schema import ChatRequest
from tests.services.client.fake_engine import FakeLink, app_state, client, silent


async def test_the_description_names_every_route_and_every_reference_resolves() -> None:
    parts = app_state(FakeLink(silent), api_key="key")
    async with client(parts, headers={"authorization": "Bearer key"}) as http:
        found = (await http.get("/openapi.json")).json()
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                assert operation["responses"]["200"]
                answer = await http.request(method, path.replace("{name}", "demo"), content=b"?")
                assert answer.status_code in ((200, 400) if "{id}" not in path else (404,))
                assert str(answer.status_code) in operation["responses"]
    assert found == document(ROUTES, ApiConfig(), locked=True)
    assert found["openapi"] == "3.1.0"
    assert sum(bool(route.summary) for route in ROUTES) == sum(len(methods) for methods in found["paths"].values())
    names = [operation["operationId"] for methods in found["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
    for reference in references(found):
        _, _, kind, name = reference.split("/")
        assert name in found["components"][kind]


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for part in value.values() for found in references(part)]
    return [found for part in value for found in references(part)] if isinstance(value, list) else []


def test_the_description_is_made_of_the_types_that_decode() -> None:
    schemas = document(ROUTES, ApiConfig(), locked=False)["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert not any("." in name for name in schemas)  # two types of one name
    for kind, refused in ((ResponseRequest, RESPONSE_REFUSALS), (MessageRequest, MESSAGE_REFUSALS)):
        schema = schemas[kind.__name__]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        assert all(name in schema["description"] for name in refused)
    assert set(chat["properties"]) == set(ChatRequest.__struct_fields__)
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert all(name in chat["description"] for name in (*UNSUPPORTED, *WITHOUT_EFFECT))


@pytest.mark.parametrize("locked", [False, True])
def test_a_checker_finds_nothing_wrong(locked: bool) -> None:
    assert list(OpenAPIV31SpecValidator(document(ROUTES, ApiConfig(), locked=locked)).iter_errors()) == []


def test_the_description_holds_the_limits_of_the_options() -> None:
    few = document(ROUTES, ApiConfig(max_n=3, max_stop_strings=2, max_logit_bias=4, max_logprobs=1), locked=False)
    for kind, options, expected in (("ChatRequest", few, (3, 2, 4, 1)), ("CompletionRequest", few, (3, 2, 4, 1))):
        properties = options["components"]["schemas"][kind]["properties"]
        assert properties["n"]["anyOf"][0]["maximum"] == expected[0]
        (stops,) = [form for form in properties["stop"]["anyOf"] if form.get("type") == "array"]
        assert stops["maxItems"] == expected[1]
        assert properties["logit_bias"]["anyOf"][0]["maxProperties"] == expected[2]
        assert properties["prompt_logprobs"]["anyOf"][0]["maximum"] == expected[3]
    usual = document(ROUTES, ApiConfig(), locked=False)["components"]["schemas"]["ChatRequest"]["properties"]
    assert usual["n"]["anyOf"][0]["maximum"] == limits.MAX_N
    assert usual["logprobs"]["anyOf"][0] == {"type": "boolean"}


def test_answers_name_the_request_and_streams_may_be_asked_for_in_the_query() -> None:
    paths = document(ROUTES, ApiConfig(), locked=False)["paths"]
    for methods in paths.values():
        for operation in methods.values():
            assert all("X-Request-Id" in response["headers"] for response in operation["responses"].values())
    assert paths["/v1/chat/completions"]["post"]["parameters"][0]["name"] == "stream"
