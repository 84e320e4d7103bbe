"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import anthropic.types as anthropic
import msgspec
import openai.types as types
import pytest

from penstock.engine_core.models.memory_estimate import QuantizationFacts
from penstock.services.openai.models import model_answer
from tests.services.client.fake_engine import MODEL, FakeLink, app_state, client, silent
from tests.services.openai.shapes import check, check_error, strangers

ANTHROPIC = {"anthropic-version": "2023-06-01"}
OWN = {"object", "created", "owned_by", "max_model_len", "input_modalities", "tasks"}  # what Anthropic's models lack

FACTS = QuantizationFacts("awq", "awq (INT4 in groups of 128)", 4, 1, 2)


async def test_models() -> None:
    async with client(app_state(FakeLink(silent))) as http:
        listed = (await http.get("/v1/models")).json()
        one = (await http.get("/v1/models/demo-alias")).json()
        nobody = await http.get("/v1/models/some/body")
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["demo", "demo-alias"]
    for model in (*listed["data"], one):
        check(types.Model, {name: model[name] for name in OWN | {"id"}})
        assert model["max_model_len"] == 512
        assert model["input_modalities"] == ["text"]  # what a page may let people attach
    assert one == listed["data"][1]
    assert nobody.status_code == 404
    check_error(nobody.json(), "not_found_error", "model")


async def test_a_server_whose_output_is_wrong_says_so_everywhere() -> None:
    reasons = ("random weights (--load-format dummy)", "drafts")
    async with client(app_state(FakeLink(silent), wrong_output=reasons)) as http:
        listed = (await http.get("/v1/models")).json()
        health = (await http.get("/health")).json()
        answers = [await http.get("/version"), await http.get("/nowhere"), await http.get("/health/live")]
    assert all(model["wrong_output"] == list(reasons) for model in listed["data"])
    assert health["wrong_output"] == list(reasons)
    assert {answer.headers["x-penstock-wrong-output"] for answer in answers} == {"; ".join(reasons)}
    async with client(app_state(FakeLink(silent))) as http:
        assert "wrong_output" not in (await http.get("/v1/models")).json()["data"][0]
        answer = await http.get("/health")
        assert answer.json()["wrong_output"] == []
        assert "x-penstock-wrong-output" not in answer.headers


async def test_quantized_weights_are_told() -> None:
    app = app_state(FakeLink(silent))
    async with client(app) as http:
        assert "quantization" not in (await http.get("/v1/models")).json()["data"][0]
    app = dataclasses.replace(app, model=msgspec.structs.replace(MODEL, quantization=FACTS))
    quantized = model_answer(app, "demo")
    told = msgspec.json.decode(msgspec.json.encode(quantized))
    assert told["quantization"] == {"method": "awq", "format": "awq (INT4 in groups of 128)", "bits": 4}


async def test_models_as_anthropics_clients_ask() -> None:
    async with client(app_state(FakeLink(silent)), headers=ANTHROPIC) as http:
        listed = await http.get("/v1/models")
        one = await http.get("/v1/models/demo-alias")
        nobody = await http.get("/v1/models/nobody")
    page = listed.json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "demo", "demo-alias")
    assert "object" not in page
    assert page["data"][1] == one.json()
    for model in page["data"]:
        found = anthropic.ModelInfo.model_validate_json(json.dumps(model), strict=True)
        assert set(strangers(found)) <= OWN
        assert (found.display_name, found.type, found.created_at.year) == (model["id"], "model", 2023)
        assert (found.max_input_tokens, found.max_tokens) == (512, 512)
    for answer in (listed, one, nobody):
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert nobody.status_code == 404
    assert nobody.json()["error"]["type"] == "not_found_error"
    assert nobody.json()["request_id"] == nobody.headers["request-id"]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ("limit=1", ["demo"], True),
        ("after_id=demo", ["demo-alias"], False),
        ("before_id=demo-alias", ["demo"], False),
        ("after_id=demo-alias", [], False),
        ("limit=2", ["demo", "demo-alias"], False),
    ],
)
async def test_pages_of_models(query: str, ids: list[str], more: bool) -> None:
    async with client(app_state(FakeLink(silent)), headers=ANTHROPIC) as http:
        page: Any = (await http.get(f"/v1/models?{query}")).json()
    assert [model["id"] for model in page["data"]] == ids
    assert page["has_more"] is more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=9999", "after_id=no", "after_id=demo&before_id=demo"])
async def test_pages_that_are_none(query: str) -> None:
    async with client(app_state(FakeLink(silent)), headers=ANTHROPIC) as http:
        answer = await http.get(f"/v1/models?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(query.split("=")[0])
