"""POST /classify, and scores by a classifier: activations, labels, pairs, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine_core.models.pooler import ClassifierSpec, Pooler
from penstock.protocol.messages import Finish, SubmitText
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai.classification import activated
from tests.services.client.fake_engine import MODEL, FakeLink, Row, answering, app_state, client

LABELS = ("bad", "good", "odd")
HEAD = ClassifierSpec(kind="cls", layers=(), labels=LABELS)
CLASSIFIER = msgspec.structs.replace(MODEL, hidden=2, classifier=HEAD)
RANKER = msgspec.structs.replace(
    MODEL,
    hidden=2,
    classifier=msgspec.structs.replace(HEAD, labels=("LABEL_0",), activation="sigmoid"),
    pooler=Pooler(scorer="classifier"),
)


def logits(request: SubmitText) -> list[list[Row]]:
    """Of three labels by the length of a text; of one by those of both texts of a pair."""
    assert request.pooling is not None
    assert request.pooling.classify
    size = len(request.prompt_ids or b"") // 4 if request.prompt is None else len(request.prompt)
    values = [0.0, 1.0, float(size)] if request.pooling.pair is None else [float(len(request.pooling.pair) - size)]
    extra = {"prompt_tokens": 2, "cached_tokens": 0, "vector": np.array(values, np.float32).tobytes()}
    return [[Row(tokens=0, finish=Finish.STOP, extra=extra)]]


async def post(
    path: str, body: dict[str, Any], model: ModelInfo = CLASSIFIER, port: FakeLink | None = None
) -> tuple[int, Any]:
    async with client(replace(app_state(port or FakeLink(answering(logits))), model=model)) as http:
        answer = await http.post(path, json=body)
        return answer.status_code, answer.json()


async def test_chances_of_labels_and_the_likeliest() -> None:
    port = FakeLink(answering(logits))
    code, answer = await post("/classify", {"input": ["", "fine"], "model": "demo"}, port=port)
    assert code == 200, answer
    assert [item["label"] for item in answer["data"]] == ["good", "odd"]
    assert [(item["index"], item["num_classes"]) for item in answer["data"]] == [(0, 3), (1, 3)]
    whole = 1.0 + math.e + math.exp(4.0)
    assert answer["data"][1]["probs"] == pytest.approx([1 / whole, math.e / whole, math.exp(4.0) / whole])
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    first, second = port.of(SubmitText)
    assert (first.pooling, second.pooling) == (
        msgspec.structs.replace(first.pooling, kind="cls", param="input[0]"),
        msgspec.structs.replace(first.pooling, kind="cls", param="input[1]"),
    )


@pytest.mark.parametrize(
    ("activation", "asked", "expected"),
    [("sigmoid", None, [0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))]), ("", None, [0, 1, 2]),
     ("softmax", False, [0, 1, 2])],
)  # fmt: skip
async def test_other_activations(activation: str, asked: bool | None, expected: list[float]) -> None:
    head = msgspec.structs.replace(HEAD, activation=activation)
    model = msgspec.structs.replace(CLASSIFIER, classifier=head)
    _, answer = await post("/classify", {"input": [5, 6], "use_activation": asked}, model)
    assert answer["data"][0]["probs"] == pytest.approx(expected)
    assert answer["data"][0]["label"] == "odd"


async def test_huge_logits_are_no_trouble() -> None:
    port = FakeLink(answering(logits))
    _, answer = await post("/score", {"text_1": "x" * 3000, "text_2": ["", "y" * 9000]}, RANKER, port)
    assert [item["score"] for item in answer["data"]] == pytest.approx([0.0, 1.0])
    assert activated(np.array([0.0, 5000.0, 4000.0], np.float32), HEAD) == [0.0, 1.0, 0.0]


async def test_a_cross_encoder_reads_both_texts_of_a_pair() -> None:
    port = FakeLink(answering(logits))
    _, answer = await post("/score", {"text_1": "ab", "text_2": ["ab", "abcd"]}, RANKER, port)
    assert [item["score"] for item in answer["data"]] == pytest.approx([0.5, 1 / (1 + math.exp(-2))])
    sent = [(each.prompt, each.pooling.pair, each.pooling.kind, each.add_special_tokens)
            for each in port.of(SubmitText) if each.pooling is not None]  # fmt: skip
    assert sent == [("ab", "ab", "cls", True), ("ab", "abcd", "cls", True)]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_it_ranks_documents(path: str) -> None:
    body = {"query": "ab", "documents": ["a", "abcdef", "abc"], "top_n": 2}
    _, answer = await post(path, body, RANKER)
    assert [result["index"] for result in answer["results"]] == [1, 2]


async def test_what_is_refused() -> None:
    code, answer = await post("/classify", {"input": "a"}, MODEL)
    assert (code, answer["error"]["code"]) == (400, "unsupported")
    assert "no head" in answer["error"]["message"]
    several = msgspec.structs.replace(CLASSIFIER, pooler=Pooler(scorer="classifier", unscored="3 labels"))
    code, answer = await post("/score", {"text_1": "a", "text_2": "b"}, several)
    assert (code, "3 labels" in answer["error"]["message"]) == (400, True)
    code, answer = await post("/classify", {"input": []})
    assert (code, answer["error"]["param"]) == (400, "input")


def test_the_model_says_what_it_can_be_asked_for() -> None:
    assert MODEL.tasks == ("generate", "embed", "score")
    assert msgspec.structs.replace(RANKER, headless=True).tasks == ("embed", "score", "classify")
    none = Pooler(unpooled="no", unscored="no")
    assert msgspec.structs.replace(CLASSIFIER, headless=True, pooler=none).tasks == ("classify",)
