"""Sampling parameters become the request that the HTTP server reads, and are refused with its words."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest
from penstock.services.llm.params import (
    SAME_FIELDS,
    SamplingParams,
    StructuredOutputsParams,
    as_chat,
    as_completion,
)
from penstock.services.openai.schema import CompletionRequest

MESSAGES = [{"role": "user", "content": "x"}]


def test_defaults_are_said_outright_so_that_the_models_own_do_not_hold() -> None:
    found = as_completion(SamplingParams())
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.max_tokens) == (1.0, 1.0, 0, 0.0, 16)
    assert (found.repetition_penalty, found.seed, found.stop, found.logprobs) == (1.0, None, None, None)


def test_without_parameters_nothing_is_said() -> None:
    assert as_completion(None) == CompletionRequest(prompt="")
    assert as_chat(None, MESSAGES).temperature is None


def test_every_name_is_one_of_a_request() -> None:
    assert set(SAME_FIELDS) <= {field.name for field in msgspec.structs.fields(CompletionRequest)}
    known = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert known - set(SAME_FIELDS) == {"max_tokens", "logprobs", "detokenize", "output_kind"}


def test_values_arrive() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, stop=["a"], stop_token_ids=[3], logit_bias={7: -1.5}, bad_words=["b"], seed=9, logprobs=4,
        allowed_token_ids=[1, 2], ignore_eos=True, min_tokens=3, prompt_logprobs=1, max_tokens=None, speculative=False,
    )  # fmt: skip
    found = as_completion(params)
    assert (found.n, found.temperature, found.stop, found.stop_token_ids) == (2, 0.5, ["a"], [3])
    assert (found.logit_bias, found.bad_words, found.seed, found.logprobs) == ({"7": -1.5}, ["b"], 9, 4)
    assert (found.allowed_token_ids, found.ignore_eos, found.min_tokens) == ([1, 2], True, 3)
    assert (found.prompt_logprobs, found.max_tokens, found.speculative) == (1, None, False)


def test_a_chat_has_its_own_names_for_logprobs() -> None:
    found = as_chat(SamplingParams(logprobs=3, max_tokens=5), MESSAGES)
    assert (found.logprobs, found.top_logprobs, found.max_tokens) == (True, 3, 5)
    assert as_chat(SamplingParams(), MESSAGES).logprobs is None
    processed = SamplingParams(logprobs=1, logprobs_mode="processed_logprobs")
    assert as_chat(processed, MESSAGES).logprobs_mode == "processed_logprobs"
    assert as_completion(processed).logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize(
    ("asked", "source"),
    [
        (StructuredOutputsParams(regex="a+"), b'{"regex":"a+"}'),
        (StructuredOutputsParams(json={"type": "integer"}), b'{"json":{"type":"integer"}}'),
        ({"choice": ["a", "b"]}, b'{"choice":["a","b"]}'),
    ],
)
def test_structured_outputs(asked: Any, source: bytes) -> None:
    found = as_completion(SamplingParams(structured_outputs=asked))
    assert bytes(found.structured_outputs) == source  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3.0}, "temperature"), ({"temperature": math.nan}, "temperature"), ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"), ({"n": "two"}, "n"), ({"logprobs": 21}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [5]}, "stop"), ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"detokenize": False, "stop": "a"}, "stop"), ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logprobs": 1, "logprobs_mode": "raw"}, "logprobs_mode"), ({"n": limits.MAX_CHOICES + 1}, "n"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode"), ({"min_tokens": 17}, "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"detokenize": "no"}, "detokenize"),
        ({"output_kind": 1}, "output_kind"), ({"structured_outputs": StructuredOutputsParams()}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_when_it_is_given(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**fields)
    assert str(raised.value.param).startswith(param)
    assert param in raised.value.message


def test_a_value_that_was_changed_is_checked_when_it_is_used() -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(InvalidRequest, match="temperature"):
        as_completion(params)


def test_what_the_model_decides_is_no_mistake_yet() -> None:
    """Its vocabulary and its context are known to the engine alone."""
    SamplingParams(max_tokens=10_000_000, stop_token_ids=[300_000], logit_bias={300_000: 1.0}, min_tokens=9_000_000)


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], structured_outputs={"choice": ["b"]}, seed=3)
    clone = params.clone()
    assert clone == params
    assert isinstance(clone.stop, list)
    clone.stop.append("c")
    clone.seed = 4
    assert (params.stop, params.seed) == (["a"], 3)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_off=2)  # type: ignore[call-arg]


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(structured_outputs={"json": object()})
