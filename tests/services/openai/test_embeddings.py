"""POST /v1/embeddings: every form of input, both encodings, dimensions, limits, and what is refused."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import openai.types as types
import pytest
from numpy.typing import NDArray

from penstock.engine_core.models.pooler import Pooler
from penstock.protocol import limits
from penstock.protocol.messages import Abort, Finish, SubmitText
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai import embeddings
from tests.services.client.fake_engine import MODEL, FakeLink, Row, answering, app_state, client, silent
from tests.services.openai.shapes import check, check_error

PATH = "/v1/embeddings"
HIDDEN = 6
POOLED = msgspec.structs.replace(MODEL, hidden=HIDDEN)


def text_of(request: SubmitText) -> str:
    if request.prompt is not None:
        return request.prompt
    assert request.prompt_ids is not None
    return "/".join(map(str, struct.unpack(f"<{len(request.prompt_ids) // 4}i", request.prompt_ids)))


def vector_of(text: str) -> NDArray[np.float32]:
    """What the fake engine makes of a text."""
    return np.random.default_rng(list(text.encode())).standard_normal(HIDDEN).astype(np.float32)


def pooled(request: SubmitText) -> list[list[Row]]:
    assert request.pooling is not None
    extra = {"prompt_tokens": 3, "cached_tokens": 0, "vector": vector_of(text_of(request)).tobytes()}
    return [[Row(tokens=0, finish=Finish.STOP, extra=extra)]]


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector / np.linalg.norm(vector)


async def post(body: dict[str, Any], port: FakeLink | None = None, model: ModelInfo = POOLED) -> tuple[int, Any]:
    port = port or FakeLink(answering(pooled))
    async with client(replace(app_state(port), model=model)) as http:
        answer = await http.post(PATH, json=body)
        return answer.status_code, answer.json()


def values(answer: dict[str, Any]) -> list[NDArray[np.float32]]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(item["embedding"], np.float32) for item in answer["data"]]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("one", ["one"]),
        (["one", "two", "one"], ["one", "two", "one"]),
        ([5, 6, 7], ["5/6/7"]),
        ([[5], [6, 7]], ["5", "6/7"]),
    ],
)
async def test_every_form_of_input(given: Any, texts: list[str]) -> None:
    code, answer = await post({"input": given, "model": "demo", "user": "me"})
    assert code == 200, answer
    check(types.CreateEmbeddingResponse, answer)
    assert answer["usage"] == {"prompt_tokens": 3 * len(texts), "total_tokens": 3 * len(texts)}
    for found, text in zip(values(answer), texts, strict=True):
        assert np.allclose(found, unit(vector_of(text)), atol=1e-6)


async def test_both_encodings_hold_the_same_numbers() -> None:
    _, floats = await post({"input": ["a", "b"], "encoding_format": "float"})
    _, encoded = await post({"input": ["a", "b"], "encoding_format": "base64"})
    for one, other in zip(values(floats), encoded["data"], strict=True):
        assert np.array_equal(one, np.frombuffer(base64.b64decode(other["embedding"]), "<f4"))


async def test_dimensions_cut_and_scale_again() -> None:
    _, answer = await post({"input": "a", "dimensions": 2})
    (found,) = values(answer)
    assert np.allclose(found, unit(vector_of("a")[:2]), atol=1e-6)
    _, answer = await post({"input": "a", "dimensions": 2, "normalize": False})
    assert np.array_equal(values(answer)[0], vector_of("a")[:2])


@pytest.mark.parametrize(("folder", "asked", "scaled"), [(True, None, True), (False, None, False), (False, True, True)])
async def test_vectors_are_scaled_as_the_folder_or_the_request_says(folder: bool, asked: Any, scaled: bool) -> None:
    model = msgspec.structs.replace(POOLED, pooler=Pooler(normalize=folder, kind="mean"))
    port = FakeLink(answering(pooled))
    _, answer = await post({"input": "a", "normalize": asked}, port, model)
    assert np.allclose(values(answer)[0], unit(vector_of("a")) if scaled else vector_of("a"), atol=1e-6)
    (sent,) = port.of(SubmitText)
    assert sent.pooling.kind == "mean"


async def test_what_goes_to_the_tokenizer() -> None:
    port = FakeLink(answering(pooled))
    body = {"input": ["a", "b"], "truncate_prompt_tokens": 7, "add_special_tokens": False, "priority": 3}
    code, _ = await post(body | {"cache_salt": "s"}, port)
    assert code == 200
    first, second = port.of(SubmitText)
    for sent, param in ((first, "input[0]"), (second, "input[1]")):
        assert (sent.pooling.param, sent.n) == (param, 1)
        assert (sent.stream, sent.detokenize, sent.speculate) == (False, False, False)
        assert (sent.truncate, sent.add_special_tokens, sent.priority, sent.cache_salt) == (7, False, 3, "s")
    assert first.id != second.id


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [1000]}, "input"),
        ({"input": [[3], [1000]]}, "input[1]"),
        ({"input": [[1] * 513]}, "input[0]"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": ["a"] * (limits.MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "input_type": "query"}, "input_type"),
    ],
)
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    port = FakeLink(answering(pooled))
    code, answer = await post(body, port)
    assert code == 400
    check_error(answer, "invalid_request_error", param)
    assert not port.sent


async def test_an_unknown_model_is_not_found_and_one_without_vectors_says_so() -> None:
    assert (await post({"input": "a", "model": "nobody"}))[0] == 404
    model = msgspec.structs.replace(POOLED, pooler=Pooler(unpooled="modules.json asks for Dense, not supported"))
    code, answer = await post({"input": "a"}, model=model)
    assert (code, answer["error"]["code"]) == (400, "unsupported")
    assert "Dense" in answer["error"]["message"]


async def test_as_many_texts_as_are_taken_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SLICE", 50)
    port = FakeLink(answering(pooled))
    texts = [f"text {number}" for number in range(220)]
    code, answer = await post({"input": texts}, port)
    assert code == 200, answer
    for found, text in zip(values(answer), texts, strict=True):
        assert np.allclose(found, unit(vector_of(text)), atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == 3 * 220


async def test_one_that_fails_ends_the_others() -> None:
    def failing(request: SubmitText) -> list[list[Row]]:
        if request.prompt != "bad":
            return []
        return [[Row(tokens=0, finish=Finish.ERROR, extra={"error": "non-finite"})]]

    port = FakeLink(answering(failing))
    code, answer = await post({"input": ["good", "bad", "fine"]}, port)
    assert code == 500, json.dumps(answer)
    assert len(port.of(Abort)) == 2


async def test_a_server_without_room_says_so() -> None:
    port = FakeLink(silent)
    assert port.peer is not None
    port.peer.credit = 1
    code, answer = await post({"input": ["a", "b"]}, port)
    assert code == 429, answer


async def test_ids_that_no_truncation_keeps_are_not_sent() -> None:
    """Of a text for a vector the first ones are kept."""
    port = FakeLink(answering(pooled))
    inputs: tuple[list[Any], ...] = ([*range(512), 7, 8], [[*range(512), 7], [3, 4]])
    async with client(replace(app_state(port), model=POOLED)) as http:
        for given in inputs:
            answer = await http.post(PATH, json={"input": given, "truncate_prompt_tokens": -1})
            assert answer.status_code == 200, answer.text
    assert [text_of(request) for request in port.of(SubmitText)] == ["/".join(map(str, range(512)))] * 2 + ["3/4"]


@pytest.mark.parametrize(("side", "first", "kept"), [("left", False, 4), ("right", True, 3), (None, True, 3)])
async def test_the_side_of_a_truncation(side: str | None, first: bool, kept: int) -> None:
    port = FakeLink(answering(pooled))
    body = {"input": [3] * 600 + [4] * 600, "truncate_prompt_tokens": 7, "truncation_side": side}
    code, _ = await post(body, port)
    assert code == 200
    (sent,) = port.of(SubmitText)
    assert (sent.truncate, sent.keep_first, set(struct.unpack(f"<{len(sent.prompt_ids) // 4}i", sent.prompt_ids))) == (
        7, first, {kept}
    )  # fmt: skip
