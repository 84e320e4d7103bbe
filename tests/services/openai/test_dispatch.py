"""Several models behind one endpoint: each request reaches the one that it names."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import msgspec
import pytest

from penstock.protocol.config import ApiConfig, RunConfig
from penstock.protocol.control import AskState, Controlled, FlushCache, Pause, SleepEngine
from penstock.protocol.message import Message
from penstock.protocol.messages import SubmitText
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai.app_state import AppState
from penstock.services.openai.dispatch import dispatched, operated
from penstock.services.openai.routes import ROUTES, operator_application, operator_routes
from tests.services.client.fake_engine import MODEL, FakeLink, answering, app_state, client, silent, status, words

CHAT = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}


def answered(link: FakeLink, message: Message) -> None:
    """A scheduler that does what the operator asks."""
    if isinstance(message, SubmitText):
        answering(words("Hello"))(link, message)
    elif isinstance(message, AskState | FlushCache | Pause | SleepEngine):
        asyncio.get_running_loop().call_soon(link.arrive, Controlled(message.id))


def both(*scripts: Any, **options: Any) -> tuple[AppState, list[FakeLink]]:
    """A server of the models a and b."""
    links = [FakeLink(script) for script in scripts or (answered, answered)]
    found = []
    for name, link in zip("ab", links, strict=True):
        app = app_state(link, **options)
        link.arrive(status(loaded=name == "a", sleeping=name == "b", asleep=name == "b"))
        info: ModelInfo = msgspec.structs.replace(MODEL, names=(name, f"{name}-alias"))
        config = msgspec.structs.replace(app.config, run=RunConfig(for_model=name, run_dir=app.config.run.run_dir))
        found.append(dataclasses.replace(app, model=info, config=config))
    return dataclasses.replace(found[0], models=tuple(found)), links


async def test_a_request_reaches_the_model_that_it_names() -> None:
    app, (a, b) = both()
    async with client(app) as http:
        for name, link in (("a", a), ("b", b), ("b-alias", b)):
            before = len(link.of(SubmitText))
            answer = await http.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name[0]
            assert len(link.of(SubmitText)) == before + 1
        assert len(a.of(SubmitText)) == 1


async def test_a_request_without_a_model_is_told_which_there_are() -> None:
    app, _ = both(silent, silent)
    async with client(app) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
        assert "a, b" in answer.json()["error"]["message"]
        assert (await http.post("/v1/embeddings", json={"model": "c", "input": "x"})).status_code == 404
        assert (await http.get("/tokenizer_info")).status_code == 400
        assert (await http.get("/tokenizer_info?model=b")).status_code == 200


async def test_a_wrong_body_is_refused_as_ever() -> None:
    app, _ = both(silent, silent)
    async with client(app) as http:
        for body in (b"{", b"[]", b'{"model": 3, "prompt": "x"}'):
            answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400


async def test_all_are_listed_with_their_states() -> None:
    app, _ = both(silent, silent)
    async with client(app) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["state"]) for each in listed] == [
            ("a", "loaded"), ("a-alias", "loaded"), ("b", "asleep"), ("b-alias", "asleep"),
        ]  # fmt: skip
        assert (await http.get("/v1/models/b")).json()["state"] == "asleep"
        assert (await http.get("/v1/models/c")).status_code == 404
        paged = (await http.get("/v1/models?limit=3", headers={"anthropic-version": "2023-06-01"})).json()
        assert [each["id"] for each in paged["data"]] == ["a", "a-alias", "b"]
        found = (await http.get("/health")).json()
        assert [(each["model"], each["state"], each["ready"]) for each in found["models"]] == [
            ("a", "loaded", True), ("b", "asleep", True),
        ]  # fmt: skip


async def test_one_that_is_served_makes_the_server_ready() -> None:
    app, (a, b) = both(silent, silent)
    async with client(app) as http:
        a.arrive(status(ready=False))
        assert (await http.get("/health/ready")).status_code == 200
        b.arrive(status(ready=False))
        assert (await http.get("/health/ready")).status_code == 503


async def test_metrics_name_the_model() -> None:
    app, _ = both(silent, silent)
    async with client(app) as http:
        text = (await http.get("/metrics")).text
    assert 'penstock_model_state{model_name="b",state="asleep"} 1.0' in text
    assert text.count("penstock_build_info{") == 2


OPERATOR: dict[str, Any] = {"admin_address": "unix:/run/admin"}


async def test_the_operator_names_one_or_means_all() -> None:
    app, (a, b) = both(**OPERATOR)
    async with client(app, served=operator_application) as http:
        assert (await http.post("/flush_cache?model=b")).status_code == 200
        assert (len(a.of(FlushCache)), len(b.of(FlushCache))) == (0, 1)
        assert (await http.post("/pause?mode=keep")).status_code == 200
        assert (len(a.of(Pause)), len(b.of(Pause))) == (1, 1)
        assert (await http.post("/sleep")).status_code == 200
        assert (len(a.of(SleepEngine)), len(b.of(SleepEngine))) == (1, 1)
        await http.get("/is_paused?model=a")
        assert (len(a.of(AskState)), len(b.of(AskState))) == (1, 0)
        assert (await http.post("/pause?model=c")).status_code == 404
        assert (await http.post("/pause?model=a&model=b")).status_code == 400


async def test_the_log_tells_what_the_operator_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app, _ = both(**OPERATOR)
    async with client(app, served=operator_application) as http:
        await http.post("/sleep?model=b&level=2")
    async with client(app) as http:
        await http.get("/v1/models?secret=1")
    found = [vars(record)["fields"] for record in caplog.records if record.message == "request"]
    assert [(one["route"], one.get("query")) for one in found] == [
        ("/sleep", "model=b&level=2"), ("/v1/models", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/wake_up"), ("GET", "/get_weight_version"), ("GET", "/model_info")],
)
async def test_the_operator_must_name_one_where_it_is_about_one(method: str, path: str) -> None:
    app, _ = both(**OPERATOR)
    async with client(app, served=operator_application) as http:
        answer = await http.request(method, path)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"


def test_routes_of_one_model_are_what_they_are() -> None:
    app = app_state(FakeLink(silent))
    assert dispatched(app, ROUTES) == ROUTES
    assert operated(app, operator_routes(ApiConfig())) == operator_routes(ApiConfig())
