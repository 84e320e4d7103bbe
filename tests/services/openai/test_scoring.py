"""POST /v1/score and /v1/rerank: pairs, orders, both ways to score, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine_core.models.pooler import Pooler
from penstock.protocol import limits
from penstock.protocol.messages import Finish, SubmitText
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai.scoring import CLOSING, chance
from tests.services.client.fake_engine import MODEL, FakeLink, Row, answering, app_state, client
from tests.services.openai.shapes import check_error

POOLED = msgspec.structs.replace(MODEL, hidden=2)
ASKING = msgspec.structs.replace(POOLED, pooler=Pooler(scorer="yes_no"))
ANGLES = {"east": 0.0, "northeast": 0.25, "north": 0.5, "west": 1.0, "nearly": 0.05}


def pooled(request: SubmitText) -> list[list[Row]]:
    """Directions as vectors; a question's yes is as likely as the first word of its document is long."""
    assert request.pooling is not None
    assert request.prompt is not None
    if request.pooling.kind == "logits":
        document = request.prompt.rsplit("<Document>: ", 1)[1]
        values = [0.0, float(len(document)) - 5.0]
    else:
        angle = math.pi * ANGLES[request.prompt.removeprefix("find: ")]
        values = [3.0 * math.cos(angle), 3.0 * math.sin(angle)]
    extra = {"prompt_tokens": 2, "cached_tokens": 0, "vector": np.array(values, np.float32).tobytes()}
    return [[Row(tokens=0, finish=Finish.STOP, extra=extra)]]


async def post(
    path: str, body: dict[str, Any], port: FakeLink | None = None, model: ModelInfo = POOLED
) -> tuple[int, Any]:
    port = port or FakeLink(answering(pooled))
    async with client(replace(app_state(port), model=model)) as http:
        answer = await http.post(path, json=body)
        return answer.status_code, answer.json()


def scores(answer: dict[str, Any]) -> list[float]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["score"] for item in answer["data"]]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("east", "west", [-1.0]),
        ("east", ["east", "north", "northeast"], [1.0, 0.0, math.sqrt(0.5)]),
        (["east", "north"], ["west", "north"], [-1.0, 1.0]),
        (["east"], "north", [0.0]),
    ],
)
async def test_pairs_are_scored_by_the_cosine_of_their_vectors(first: Any, second: Any, expected: list[float]) -> None:
    code, answer = await post("/v1/score", {"text_1": first, "text_2": second, "model": "demo"})
    assert code == 200, answer
    assert scores(answer) == pytest.approx(expected, abs=1e-6)
    assert (answer["object"], answer["model"]) == ("list", "demo")


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
async def test_pairs_by_their_other_names(names: tuple[str, str]) -> None:
    first, second = names
    code, answer = await post("/score", {first: "east", second: ["east", "north"]})
    assert code == 200, answer
    assert scores(answer) == pytest.approx([1.0, 0.0], abs=1e-6)
    code, answer = await post("/invocations", {first: "east", second: "north"})
    assert (code, len(scores(answer))) == (200, 1)
    code, answer = await post("/score", {first: ["a", "b"], second: ["c"]})
    assert f"{first} holds 2 texts and {second} 1" in answer["error"]["message"]


async def test_a_text_of_several_pairs_is_asked_for_once() -> None:
    port = FakeLink(answering(pooled))
    _, answer = await post("/v1/score", {"text_1": "east", "text_2": ["north", "east", "north"]}, port)
    assert [sent.prompt for sent in port.of(SubmitText)] == ["east", "north"]
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


async def test_a_model_that_answers_yes_or_no_is_asked_so() -> None:
    port = FakeLink(answering(pooled))
    _, answer = await post("/v1/score", {"text_1": "why {document}?", "text_2": ["abc", "abcdefg"]}, port, ASKING)
    assert scores(answer) == pytest.approx([chance(0.0, -2.0), chance(0.0, 2.0)], abs=1e-6)
    for sent in port.of(SubmitText):
        assert sent.pooling.words == ("no", "yes")
        assert sent.pooling.closing == CLOSING
        assert "<Query>: why {document}?\n<Document>: abc" in sent.prompt
        assert not sent.add_special_tokens


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_come_in_the_order_of_their_relevance(path: str) -> None:
    documents = ["west", {"text": "nearly"}, "north", "east"]
    code, answer = await post(path, {"query": "east", "documents": documents})
    assert code == 200, answer
    results = answer["results"]
    assert [result["index"] for result in results] == [3, 1, 2, 0]
    found = [result["relevance_score"] for result in results]
    assert found == sorted(found, reverse=True)
    told = [result.get("document") for result in results]
    expected = [{"text": text} for text in ("east", "nearly", "north", "west")]
    assert told == ([None] * 4 if path == "/v2/rerank" else expected)


async def test_the_best_few_with_or_without_their_texts() -> None:
    body = {"query": "east", "documents": ["west", "north", "east", "east"], "top_n": 2}
    for wanted in (True, False):
        _, answer = await post("/v1/rerank", body | {"return_documents": wanted})
        assert [result["index"] for result in answer["results"]] == [2, 3], "of equal scores the earlier comes first"
        assert all(("document" in result) == wanted for result in answer["results"])
    _, answer = await post("/v1/rerank", body | {"top_n": 99})
    assert len(answer["results"]) == 4


async def test_the_makers_prompts_stand_before_queries_and_documents() -> None:
    model = msgspec.structs.replace(POOLED, pooler=Pooler(query="find: "))
    port = FakeLink(answering(pooled))
    await post("/v1/rerank", {"query": "east", "documents": ["east"]}, port, model)
    assert [sent.prompt for sent in port.of(SubmitText)] == ["find: east", "east"]
    port = FakeLink(answering(pooled))
    asking = msgspec.structs.replace(model, pooler=Pooler(query="find: ", scorer="yes_no"))
    await post("/v1/rerank", {"query": "east", "documents": ["east"]}, port, asking)
    (sent,) = port.of(SubmitText)
    assert "find: " not in sent.prompt


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
        ("/v1/score", {"queries": "a"}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": 5, "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * (limits.MAX_INPUTS + 1)}, "text_2"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * (limits.MAX_INPUTS + 1)}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["text"]}, "rank_fields"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
async def test_a_wrong_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    port = FakeLink(answering(pooled))
    code, answer = await post(path, body, port)
    assert code == 400
    check_error(answer, "invalid_request_error", param)
    assert not port.sent


async def test_a_model_whose_scores_cannot_be_made_says_why() -> None:
    model = msgspec.structs.replace(POOLED, pooler=Pooler(unscored="its LogitScore ({}) is not supported"))
    code, answer = await post("/v1/score", {"text_1": "a", "text_2": "b"}, model=model)
    assert (code, answer["error"]["code"]) == (400, "unsupported")
    assert "LogitScore" in answer["error"]["message"]


def test_chances_of_extreme_logits() -> None:
    assert chance(0.0, 0.0) == 0.5
    assert chance(1e6, 0.0) < 1e-300
    assert chance(0.0, 1e6) == 1.0
