"""Vectors and scores of a real server, as the openai client and others see them."""

from __future__ import annotations

import base64
import concurrent.futures

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from penstock.engine_core.embedded import demo_folder
from tests.e2e.server import LIMIT, Server

MODEL = "penstock-demo"
TEXTS = ["Tell me a story about a fox.", "What is 12 + 30?", "Hello", "The owl sat in a tree. " * 30]


def reference(texts: list[str]) -> list[NDArray[np.float32]]:
    """The last hidden states of transformers, scaled to length 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    found = []
    for text in texts:
        with torch.inference_mode():
            state = model.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
        found.append((state / state.norm()).numpy())
    return found


def vectors(answer: openai.types.CreateEmbeddingResponse) -> NDArray[np.float32]:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data], np.float32)


def test_vectors_are_those_of_transformers_in_order_and_both_encodings(client: openai.OpenAI) -> None:
    asked = TEXTS * 5
    encoded = client.embeddings.create(model=MODEL, input=asked)  # the client asks for base64 by itself
    floats = client.embeddings.create(model=MODEL, input=asked, encoding_format="float")
    for found, expected in zip(vectors(encoded), reference(TEXTS) * 5, strict=True):
        assert float(found @ expected) > 0.99999
    assert np.allclose(vectors(encoded), vectors(floats), atol=1e-5)
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS[0], encoding_format="base64")
    (item,) = raw.http_response.json()["data"]
    assert np.allclose(np.frombuffer(base64.b64decode(item["embedding"]), "<f4"), vectors(floats)[0], atol=1e-5)
    assert encoded.usage.prompt_tokens == encoded.usage.total_tokens > 0


def test_texts_and_their_token_ids_have_the_same_vectors(server: Server, client: openai.OpenAI) -> None:
    ids = httpx.post(server.url + "/tokenize", json={"prompt": TEXTS[0]}, timeout=LIMIT).json()["tokens"]
    one, other = (vectors(client.embeddings.create(model=MODEL, input=given)) for given in (TEXTS[0], [ids]))
    assert np.allclose(one, other, atol=1e-5)
    assert np.allclose(vectors(client.embeddings.create(model=MODEL, input=ids)), one, atol=1e-5)


def test_dimensions_are_cut_and_scaled_again(client: openai.OpenAI) -> None:
    (whole,) = vectors(client.embeddings.create(model=MODEL, input="Hello"))
    (cut,) = vectors(client.embeddings.create(model=MODEL, input="Hello", dimensions=8))
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["fine", ""]}, "input[1]"),
        ({"input": ["fine", "word " * 5000]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 1 << 20}, "dimensions"),
        ({"input": "a", "extra_body": {"truncate_prompt_tokens": 1 << 20}}, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, body: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, **body)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_long_text_may_be_truncated(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input="word " * 5000, extra_body={"truncate_prompt_tokens": 10})
    assert answer.usage.prompt_tokens == 10


def test_many_requests_beside_chats(client: openai.OpenAI) -> None:
    """Hundreds of texts at once, while a chat goes on; each has its own vector."""
    texts = [f"This is text number {number}." for number in range(300)]

    def chat() -> str:
        said = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is 128 + 457?"}], temperature=0
        )
        return said.choices[0].message.content or ""

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        talk = threads.submit(chat)
        several = list(threads.map(lambda _: client.embeddings.create(model=MODEL, input=texts), range(2)))
        assert "585" in talk.result()
    first, second = map(vectors, several)
    assert len(first) == 300
    assert np.allclose(first, second, atol=1e-4)
    (alone,) = vectors(client.embeddings.create(model=MODEL, input=texts[123]))
    assert float(alone @ first[123]) > 0.99999


def test_scores_are_cosines_and_ranks_follow_them(server: Server, client: openai.OpenAI) -> None:
    query, documents = TEXTS[0], ["What is 7 + 8?", "Tell me a short story about a fox.", TEXTS[0]]
    scored = httpx.post(server.url + "/v1/score", json={"text_1": query, "text_2": documents}, timeout=LIMIT).json()
    found = vectors(client.embeddings.create(model=MODEL, input=[query, *documents]))
    expected = [float(found[0] @ vector) for vector in found[1:]]
    assert [item["score"] for item in scored["data"]] == pytest.approx(expected, abs=1e-4)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        body = {"model": MODEL, "query": query, "documents": documents, "top_n": 2}
        ranked = httpx.post(server.url + path, json=body, timeout=LIMIT).json()
        order = sorted(range(3), key=lambda place: -expected[place])[:2]
        assert [result["index"] for result in ranked["results"]] == order


def test_coheres_words_for_vectors(client: openai.OpenAI, server: Server) -> None:
    texts = ["a small fox", "word " * 6000 + "fox"]
    asked = {"texts": texts, "input_type": "search_document", "embedding_types": ["float", "base64"]}
    plain = client.embeddings.create(model=MODEL, input=texts[0]).data[0].embedding
    found = {}
    for side in ("START", "END"):
        answer = httpx.post(server.url + "/v2/embed", json={**asked, "truncate": side}, timeout=LIMIT)
        assert answer.status_code == 200, answer.text
        found[side] = answer.json()["embeddings"]["float"]
        assert np.allclose(found[side][0], plain, atol=1e-5)
    assert not np.allclose(found["START"][1], found["END"][1], atol=1e-3)
    refused = httpx.post(server.url + "/v2/embed", json={**asked, "truncate": "NONE"}, timeout=LIMIT)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "texts[1]"


def test_sagemakers_paths_and_the_tokenizers_configuration(server: Server) -> None:
    assert httpx.get(server.url + "/ping", timeout=LIMIT).status_code == 200
    body = {"messages": [{"role": "user", "content": "What is 128 + 457?"}], "temperature": 0}
    said = httpx.post(server.url + "/invocations", json=body, timeout=LIMIT).json()
    assert "585" in said["choices"][0]["message"]["content"]
    assert "chat_template" in httpx.get(server.url + "/tokenizer_info", timeout=LIMIT).json()
