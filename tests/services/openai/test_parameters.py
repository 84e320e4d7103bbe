"""The message that carries a request's parameters: what every endpoint fills alike, and whose randomness is whose."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import SubmitText, TraceContext
from penstock.services.openai.chat import REQUEST as CHAT
from penstock.services.openai.chat import chat_submission
from penstock.services.openai.completions import REQUEST, lengths, prompt_submission
from penstock.services.openai.parameters import submission, with_own_seed
from tests.services.client.fake_engine import MODEL

TRACE = TraceContext("00-" + "1" * 32 + "-" + "2" * 16 + "-01")


def asked(n: int = 1, **fields: Any) -> SubmitText:
    request = REQUEST.decode(json.dumps({"prompt": "x", **fields}))
    return submission(request, lengths(request), MODEL, n, TRACE)


def test_what_is_not_asked_for_is_left_as_it_is() -> None:
    found = asked()
    assert found == SubmitText(id=0, sampling=found.sampling, trace=TRACE, arrival=found.arrival)
    assert found.arrival > 0


def test_every_parameter_arrives() -> None:
    found = asked(
        2, stop=["a", "b"], include_stop_str_in_output=True, bad_words=["c"], skip_special_tokens=False, stream=True,
        priority=3, cache_salt="s", speculative=False, prediction={"type": "content", "content": "p"}, guided_regex="x",
        seed=5,
    )  # fmt: skip
    assert (found.n, found.stop, found.include_stop, found.bad_words) == (2, ("a", "b"), True, ("c",))
    assert (found.skip_special_tokens, found.stream, found.priority, found.cache_salt) == (False, True, 3, "s")
    assert (found.speculate, found.prediction, found.sampling.seed, found.trace) == (False, "p", 5, TRACE)
    assert found.grammar is not None
    assert found.grammar.source == "x"


def test_a_wrong_one_is_named() -> None:
    with pytest.raises(InvalidRequest) as raised:
        asked(max_tokens=MODEL.max_model_len + 1)
    assert raised.value.param == "max_tokens"


def test_equal_prompts_have_randomness_of_their_own() -> None:
    request = REQUEST.decode(b'{"prompt": ["x", "x"]}')
    common = submission(request, lengths(request), MODEL, 1, TRACE)
    first, second = (prompt_submission(common, request, "x") for _ in range(2))
    assert first.prompt == "x"
    assert first.sampling.seed != second.sampling.seed
    assert with_own_seed(first).sampling.seed != first.sampling.seed


def test_unless_they_were_given_a_seed() -> None:
    request = REQUEST.decode(b'{"prompt": ["x", "x"], "seed": 7}')
    common = submission(request, lengths(request), MODEL, 1, TRACE)
    assert {prompt_submission(common, request, [1]).sampling.seed for _ in range(2)} == {7}


def test_a_chat_is_the_same_with_messages() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "seed": 1, "stop": "a"}
    found, _ = chat_submission(CHAT.decode(json.dumps(body)), MODEL, 1, TRACE)
    assert (found.stop, found.add_special_tokens, found.prompt) == (("a",), False, None)
    assert json.loads(found.messages or b"") == body["messages"]
