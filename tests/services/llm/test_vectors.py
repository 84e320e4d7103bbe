"""Vectors and scores (prompts.py, outputs.py) of `LLM` with the embedded model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.protocol.errors import InvalidRequest

TEXTS = ["Tell me a story about a fox.", "What is 12 + 30?", "Hello"]


def test_every_form_of_prompt_has_the_same_vector(llm: LLM) -> None:
    ids = llm.tokenize(TEXTS[0])
    forms: list[Any] = [TEXTS[0], ids, {"prompt": TEXTS[0]}, {"prompt_token_ids": ids, "cache_salt": "mine"}]
    outputs = llm.embed(forms, use_tqdm=False)
    first = np.array(outputs[0].outputs.embedding)
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-5)
    assert all(np.allclose(output.outputs.embedding, first, atol=1e-5) for output in outputs)
    assert [int(output.request_id) - int(outputs[0].request_id) for output in outputs] == [0, 1, 2, 3]


def test_pooled_states_are_what_vectors_are_made_of(llm: LLM) -> None:
    states = llm.encode(TEXTS, use_tqdm=False)
    whole = llm.embed(TEXTS, use_tqdm=False)
    cut = llm.embed(TEXTS, dimensions=8, use_tqdm=False)
    plain = llm.embed(TEXTS, normalize=False, use_tqdm=False)
    for state, vector, short, same in zip(states, whole, cut, plain, strict=True):
        data = state.outputs.data
        assert data.dtype == np.float32
        assert np.allclose(same.outputs.embedding, data, atol=1e-4)
        assert np.allclose(vector.outputs.embedding, data / np.linalg.norm(data), atol=1e-4)
        assert np.allclose(short.outputs.embedding, data[:8] / np.linalg.norm(data[:8]), atol=1e-4)


def test_scores_are_cosines(llm: LLM) -> None:
    vectors = [np.array(output.outputs.embedding) for output in llm.embed(TEXTS, use_tqdm=False)]
    found = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert found == pytest.approx([float(vectors[0] @ vector) for vector in vectors], abs=1e-4)
    pairs = llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)
    assert pairs[1].outputs.score == pytest.approx(1.0, abs=1e-5)


def test_many_through_a_small_window(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._engine, "window", 4)
    prompts = [[10 + number, 11, 12] for number in range(60)]
    outputs = llm.encode(prompts, use_tqdm=False)
    (alone,) = llm.encode([prompts[37]], use_tqdm=False)
    assert np.allclose(outputs[37].outputs.data, alone.outputs.data, atol=1e-4)
    assert llm.embed([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "fields", "named"),
    [
        (["fine", ""], {}, "prompts[1]"),
        (["fine", [10**9 - 1]], {}, "prompts[1]"),
        (["fine", {"prompt": "a", "prediction": "b"}], {}, "prompts[1]"),
        (["fine", "word " * 9000], {}, "prompts[1]"),
        ("fine", {"dimensions": 1 << 20}, "dimensions"),
        ("fine", {"dimensions": 0}, "dimensions"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, prompts: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.embed(prompts, use_tqdm=False, **fields)
    assert caught.value.param == named


def test_pairs_must_go_together(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="text_1"):
        llm.score(["a", "b"], ["c"])
