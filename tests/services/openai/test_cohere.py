"""POST /v2/embed (cohere.py): Cohere's words for vectors, and what is refused by name."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine_core.models.pooler import Pooler
from penstock.protocol.messages import Finish, SubmitText
from tests.services.client.fake_engine import MODEL, FakeLink, Row, answering, app_state, client
from tests.services.openai.shapes import check_error

VECTOR = np.array([3.0, -4.0, 0.0, 12.0, -1.0, 1.0, -1.0, -1.0], np.float32)
WORDED = msgspec.structs.replace(MODEL, hidden=8, pooler=Pooler(normalize=False, query="find: ", document="doc: "))
ASKED: dict[str, Any] = {"texts": ["a", "b"], "input_type": "classification"}


def pooled(request: SubmitText) -> list[list[Row]]:
    extra = {"prompt_tokens": 2, "cached_tokens": 0, "vector": VECTOR.tobytes()}
    return [[Row(tokens=0, finish=Finish.STOP, extra=extra)]]


async def post(body: dict[str, Any]) -> tuple[int, Any, list[SubmitText]]:
    port = FakeLink(answering(pooled))
    async with client(replace(app_state(port), model=WORDED)) as http:
        answer = await http.post("/v2/embed", json=body)
    return answer.status_code, answer.json(), port.of(SubmitText)


async def test_vectors_by_type() -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    code, answer, _ = await post({**ASKED, "embedding_types": kinds, "model": "demo"})
    assert code == 200
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == ["a", "b"]
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 4}}
    assert list(answer["embeddings"]) == kinds
    for number in range(2):
        made = {kind: answer["embeddings"][kind][number] for kind in kinds}
        assert made["float"] == VECTOR.tolist()
        assert np.array_equal(np.frombuffer(base64.b64decode(made["base64"]), "<f4"), VECTOR)
        assert (made["ubinary"], made["binary"]) == ([0b10010100], [0b10010100 - 128])
    _, plain, _ = await post({**ASKED, "output_dimension": 2})
    assert plain["embeddings"] == {"float": [[3.0, -4.0]] * 2}


@pytest.mark.parametrize(
    ("kind", "prompt"), [("search_query", "find: a"), ("search_document", "doc: a"), ("clustering", "a")]
)
async def test_what_stands_before_a_text(kind: str, prompt: str) -> None:
    _, _, (first, _) = await post({**ASKED, "input_type": kind})
    assert first.prompt == prompt


@pytest.mark.parametrize(
    ("words", "truncate", "keep_first"),
    [
        ({}, -1, True),
        ({"truncate": "END", "max_tokens": 7}, 7, True),
        ({"truncate": "START"}, -1, False),
        ({"truncate": "NONE"}, 0, True),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, 5, False),
    ],
)
async def test_what_is_cut(words: dict[str, Any], truncate: int, keep_first: bool) -> None:
    _, _, (first, _) = await post({**ASKED, **words})
    assert (first.truncate, first.keep_first) == (truncate, keep_first)


@pytest.mark.parametrize(
    ("words", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": ["a"] * 2049}, "texts"),
        ({"texts": None}, "texts"),
        ({"input_type": "poem"}, "input_type"),
        ({"input_type": "image"}, "input_type"),
        ({"embedding_types": []}, "embedding_types"),
        ({"embedding_types": ["float", "int8"]}, "embedding_types[1]"),
        ({"embedding_types": ["uint8"]}, "embedding_types[0]"),
        ({"embedding_types": ["double"]}, "embedding_types[0]"),
        ({"output_dimension": 9}, "output_dimension"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate": "NONE", "max_tokens": 5}, "max_tokens"),
        ({"images": ["x"]}, "images"),
        ({"inputs": [{"content": []}]}, "inputs"),
    ],
)
async def test_refusals_name_the_field(words: dict[str, Any], param: str) -> None:
    code, answer, sent = await post({**ASKED, **words})
    assert code == 400
    check_error(answer, "invalid_request_error", param)
    assert sent == []


async def test_what_the_api_needs() -> None:
    for name in ("texts", "input_type"):
        code, answer, _ = await post({key: value for key, value in ASKED.items() if key != name})
        assert (code, answer["error"]["param"]) == (400, name)
