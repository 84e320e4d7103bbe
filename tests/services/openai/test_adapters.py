"""Adapters over HTTP: named by `model` on every endpoint, listed with their parent, and the operator's to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.messages import Finish, SubmitText
from penstock.services.openai.app_state import AppState
from penstock.services.openai.routes import ADAPTER_ROUTES, operator_application
from tests.services.client.adapter_folders import names_of, write_folder
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, client, words
from tests.services.openai.shapes import check_error

KEY = {"authorization": "Bearer operator"}
VECTOR = {"prompt_tokens": 1, "cached_tokens": 0, "vector": b"\0\0\x80?" * 4}
CHAT = [{"role": "user", "content": "hi"}]


def server(folder: Path, link: FakeLink | None = None, **options: Any) -> AppState:
    loras = folder / "loras"
    if not loras.exists():
        write_folder(loras / "a")
    (folder / "keys").write_text("operator\n")
    operator = {"admin_address": "127.0.0.1:0", "operator_key_file": str(folder / "keys")}
    options = {"lora_dir": str(loras), **operator, **options}
    return app_state(link or FakeLink(answering(words("x"))), adapters=names_of(folder, directory=loras), **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": ["one", "two"]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
    ],
)
async def test_every_way_to_generate_takes_an_adapter(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    link = FakeLink(answering(words("x")))
    async with client(server(tmp_path, link)) as http:
        answer = await http.post(path, json={"model": "a", **body})
        base = await http.post(path, json={"model": "demo", **body})
        wrong = await http.post(path, json={"model": "b", **body})
    assert (answer.status_code, answer.json()["model"]) == (200, "a")
    assert (base.status_code, base.json()["model"]) == (200, "demo")
    assert wrong.status_code == 404
    asked = [submit.adapter and submit.adapter.name for submit in link.of(SubmitText)]
    count = len(asked) // 2
    assert asked == ["a"] * count + [None] * count


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": ["one", "two"]}), ("/v1/score", {"text_1": "a", "text_2": "b"})],
)
async def test_vectors_take_an_adapter(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    link = FakeLink(answering(lambda _: [[Row(finish=Finish.STOP, extra=VECTOR)]]))
    async with client(server(tmp_path, link)) as http:
        answer = await http.post(path, json={"model": "a", **body})
    assert answer.json()["model"] == "a"
    assert [submit.adapter.name for submit in link.of(SubmitText)] == ["a", "a"]


async def test_models_have_their_adapters_behind_them(tmp_path: Path) -> None:
    async with client(server(tmp_path)) as http:
        before = (await http.get("/v1/models")).json()["data"]
        one = (await http.get("/v1/models/a")).json()
        after = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in before] == ["demo", "demo-alias"]
    assert [model["id"] for model in after] == ["demo", "demo-alias", "a"]
    assert (one["parent"], "parent" in after[0]) == ("demo", False)


async def test_the_operator_loads_and_unloads(tmp_path: Path) -> None:
    link = FakeLink(answering(words("x")))
    app = server(tmp_path, link)
    async with client(app) as http, client(app, served=operator_application, headers=KEY) as operator:
        loaded = await operator.post("/v1/load_lora_adapter", json={"lora_name": "n", "lora_path": "a"})
        answer = await http.post("/v1/completions", json={"model": "n", "prompt": "x"})
        gone = await operator.post("/v1/unload_lora_adapter", json={"lora_name": "n"})
        unknown = await http.post("/v1/completions", json={"model": "n", "prompt": "x"})
        again = await operator.post("/v1/unload_lora_adapter", json={"lora_name": "n"})
        wrong = await operator.post("/v1/load_lora_adapter", json={"lora_path": "a"})
        described = (await operator.get("/openapi.json")).json()["paths"]
        public = (await http.get("/openapi.json")).json()["paths"]
    assert (loaded.status_code, loaded.json()["id"], loaded.json()["parent"]) == (200, "n", "demo")
    assert answer.json()["model"] == "n"
    assert gone.json() == {"id": "n", "object": "model", "deleted": True}
    assert (unknown.status_code, again.status_code, wrong.status_code) == (404, 404, 400)
    check_error(again.json(), "not_found_error", "lora_name")
    paths = {route.path for route in ADAPTER_ROUTES}
    assert paths <= described.keys()
    assert not paths & public.keys()


@pytest.mark.parametrize("route", ADAPTER_ROUTES, ids=lambda route: route.path)
async def test_they_need_a_directory(tmp_path: Path, route: Any) -> None:
    body = {"lora_name": "a", "lora_path": "a"}
    async with client(server(tmp_path, lora_dir=""), served=operator_application, headers=KEY) as operator:
        assert (await operator.post(route.path, json=body)).status_code == 404


@pytest.mark.parametrize("path", ["/etc", "..", "../keys", "a/../../loras2", "%2e%2e"])
async def test_no_path_leaves_the_directory(tmp_path: Path, path: str) -> None:
    write_folder(tmp_path / "loras2")
    app = server(tmp_path)
    async with client(app) as http, client(app, served=operator_application, headers=KEY) as operator:
        answer = await operator.post("/v1/load_lora_adapter", json={"lora_name": "n", "lora_path": path})
        listed = (await http.get("/v1/models")).json()["data"]
    assert answer.status_code == 400
    assert len(listed) == 2
