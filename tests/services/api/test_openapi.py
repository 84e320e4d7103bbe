"""GET /openapi.json: every route, every reference, the types that decode."""

from __future__ import annotations

from typing import Any

from services.api import refusals
from services.api.openapi import OPERATIONS, document
from services.api.requests import ChatRequest
from tests.services.api.pipe import FakePort, client, service, silent


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
