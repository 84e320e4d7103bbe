"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import openai.types as types

from tests.services.api.pipe import FakePort, client, service, silent
from tests.services.api.shapes import check, check_error


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
