"""Every parameter (requests.py, sampling.py, refusals.py): how it reaches the engine, or that its refusal names it."""

from __future__ import annotations

import json
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest

from penstock.protocol import limits
from penstock.protocol.messages import SubmitText
from penstock.services.openai.parameters import UNSUPPORTED, WITHOUT_EFFECT
from penstock.services.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import DESCRIPTION, check_error

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/completions", {"prompt": "Hello"}),
)

# Parameter, value, where it arrives, as what.
TAKEN: tuple[tuple[str, Any, str, Any], ...] = (
    ("temperature", 0, "sampling.temperature", 0.0),
    ("temperature", 2, "sampling.temperature", 2.0),
    ("temperature", None, "sampling.temperature", 1.0),
    ("top_p", 0.25, "sampling.top_p", 0.25),
    ("top_p", 1, "sampling.top_p", 1.0),
    ("top_p", 0, "sampling.top_k", 1),
    ("top_k", -1, "sampling.top_k", 0),
    ("top_k", 0, "sampling.top_k", 0),
    ("top_k", 40, "sampling.top_k", 40),
    ("min_p", 0.05, "sampling.min_p", 0.05),
    ("repetition_penalty", 1.1, "sampling.repetition_penalty", 1.1),
    ("presence_penalty", -2, "sampling.presence_penalty", -2.0),
    ("frequency_penalty", 2, "sampling.frequency_penalty", 2.0),
    ("logit_bias", {"5": -100, "999": 1.5}, "sampling.logit_bias", ((5, -100.0), (999, 1.5))),
    ("logit_bias", {}, "sampling.logit_bias", ()),
    ("bad_words", ["no", "never"], "bad_words", ("no", "never")),
    ("allowed_token_ids", [3, 1, 3], "sampling.allowed_token_ids", (3, 1)),
    ("min_tokens", 4, "sampling.min_tokens", 4),
    ("max_tokens", 512, "sampling.max_tokens", 512),
    ("stop", "END", "stop", ("END",)),
    ("stop", ["a", "b"], "stop", ("a", "b")),
    ("stop", [], "stop", ()),
    ("stop", None, "stop", ()),
    ("stop_token_ids", [7, 8], "sampling.stop_token_ids", (7, 8)),
    ("include_stop_str_in_output", True, "include_stop", True),
    ("ignore_eos", True, "sampling.ignore_eos", True),
    ("seed", limits.SEED_MIN, "sampling.seed", limits.SEED_MIN),
    ("seed", limits.SEED_MAX, "sampling.seed", limits.SEED_MAX),
    ("skip_special_tokens", False, "skip_special_tokens", False),
    ("skip_special_tokens", None, "skip_special_tokens", True),
    ("add_special_tokens", True, "add_special_tokens", True),
    ("priority", limits.PRIORITY_MAX, "priority", limits.PRIORITY_MAX),
    ("cache_salt", "tenant", "cache_salt", "tenant"),
    ("n", 128, "n", 128),
    ("n", None, "n", 1),
    ("prompt_logprobs", 20, "sampling.prompt_logprobs", 20),
    ("prompt_logprobs", None, "sampling.prompt_logprobs", -1),
    ("logprobs_mode", "raw_logprobs", "sampling.processed_logprobs", False),
    ("logprobs_mode", None, "sampling.processed_logprobs", False),
    ("model", "demo-alias", "n", 1),
    ("model", None, "n", 1),
    ("no_such_field", {"a": [1]}, "n", 1),
    ("logprob_token_ids", [], "n", 1),
    ("guided_decoding_backend", "xgrammar", "n", 1),
)

# Parameter, value, the parameter that the answer names.
WRONG: tuple[tuple[str, Any, str], ...] = (
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", [1], "temperature"),
    ("top_p", -0.1, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("top_k", 2**31, "top_k"),
    ("min_p", 1.5, "min_p"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", 101, "repetition_penalty"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"5": "1"}, "logit_bias"),
    ("logit_bias", {"1000": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"five": 1}, "logit_bias"),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias"),
    ("logit_bias", {"٣": 1}, "logit_bias"),
    ("logit_bias", {str(k): 1 for k in range(limits.MAX_LOGIT_BIAS + 1)}, "logit_bias"),
    ("logit_bias", [5], "logit_bias"),
    ("bad_words", "no", "bad_words"),
    ("bad_words", [""], "bad_words[0]"),
    ("bad_words", ["x"] * (limits.MAX_BAD_WORDS + 1), "bad_words"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [1000], "allowed_token_ids"),
    ("allowed_token_ids", [-1], "allowed_token_ids[0]"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 513, "min_tokens"),
    ("max_tokens", 0, "max_tokens"),  # with echo: see test_completions
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 513, "max_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("stop", 5, "stop"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", "x" * (limits.MAX_STOP_LENGTH + 1), "stop"),
    ("stop", ["a"] * (limits.MAX_STOP_STRINGS + 1), "stop"),
    ("stop_token_ids", ["a"], "stop_token_ids[0]"),
    ("stop_token_ids", [1000], "stop_token_ids"),
    ("stop_token_ids", [1] * (limits.MAX_STOP_TOKEN_IDS + 1), "stop_token_ids"),
    ("include_stop_str_in_output", "yes", "include_stop_str_in_output"),
    ("ignore_eos", 1, "ignore_eos"),
    ("seed", 2**63, "seed"),
    ("seed", -(2**63) - 1, "seed"),
    ("seed", 1.5, "seed"),
    ("skip_special_tokens", 0, "skip_special_tokens"),
    ("priority", 2**31, "priority"),
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", "x" * (limits.MAX_CACHE_SALT + 1), "cache_salt"),
    ("cache_salt", 5, "cache_salt"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", "2", "n"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("logprobs_mode", "processed_logits", "logprobs_mode"),
    ("logprobs_mode", "processed_logprobs", "logprobs_mode"),  # without logprobs
    ("stream", "true", "stream"),
    ("stream_options", True, "stream_options"),
    ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
    ("model", 5, "model"),
    ("user", 5, "user"),
)


async def post(port: FakeLink, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with client(app_state(port)) as http:
        answer = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        return answer.status_code, answer.text


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(("name", "value", "where", "expected"), TAKEN)
async def test_taken(path: str, body: dict[str, Any], name: str, value: Any, where: str, expected: Any) -> None:
    port = FakeLink(answering(words("ok")))
    code, text = await post(port, path, body | {name: value})
    assert code == 200, text
    (found,) = port.of(SubmitText)
    for attribute in where.split("."):
        found = getattr(found, attribute)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(("name", "value", "param"), WRONG)
async def test_wrong(path: str, body: dict[str, Any], name: str, value: Any, param: str) -> None:
    port = FakeLink(silent)
    code, text = await post(port, path, body | {name: value})
    assert code == 400, text
    check_error(json.loads(text), "invalid_request_error", param)
    assert param.split("[")[0].split(".")[0] in json.loads(text)["error"]["message"]
    assert port.sent == []


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_not_built(path: str, body: dict[str, Any], name: str) -> None:
    port = FakeLink(silent)
    for value in ({"type": "other"}, [{"a": 1}], "x" * 500, 3.5):
        code, text = await post(port, path, body | {name: value})
        assert code == 400, text
        check_error(json.loads(text), "invalid_request_error", name)
        assert json.loads(text)["error"]["code"] == "unsupported"
        assert "not supported" in json.loads(text)["error"]["message"]
    assert port.sent == []


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_refused_parameters_that_ask_for_nothing(path: str, body: dict[str, Any]) -> None:
    neutral = {name: values[0] if values else None for name, values in UNSUPPORTED.items()}
    port = FakeLink(answering(words("ok")))
    code, text = await post(port, path, body | neutral)
    assert code == 200, text
    code, text = await post(port, path, body | dict.fromkeys(UNSUPPORTED))
    assert code == 200, text
    code, text = await post(port, path, body | {"mm_processor_kwargs": {}, "kv_transfer_params": {}, "vllm_xargs": {}})
    assert code == 200, text
    code, text = await post(port, path, body | {"n": 3, "best_of": 3})
    assert code == 200, text


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_accepted_without_effect(path: str, body: dict[str, Any]) -> None:
    plain, told = FakeLink(answering(words("ok"))), FakeLink(answering(words("ok")))
    await post(plain, path, body | {"seed": 1})
    code, text = await post(told, path, body | {"seed": 1} | dict.fromkeys(WITHOUT_EFFECT, "auto"))
    assert code == 200, text
    first, second = plain.of(SubmitText)[0], told.of(SubmitText)[0]
    ignored = ("id", "arrival", "trace")
    for name in first.__struct_fields__:
        assert name in ignored or getattr(first, name) == getattr(second, name)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [(*BODIES[0], "echo"), (*BODIES[0], "prompt"), (*BODIES[0], "suffix"), (*BODIES[1], "top_logprobs")],
)
async def test_parameters_of_the_other_endpoint(path: str, body: dict[str, Any], name: str) -> None:
    code, text = await post(FakeLink(silent), path, body | {name: 3})
    assert code == 400, text
    assert json.loads(text)["error"]["param"] == name


async def test_stream_options_that_are_not_built() -> None:
    path, body = BODIES[0]
    option = "include_obfuscation"
    code, text = await post(FakeLink(silent), path, body | {"stream": True, "stream_options": {option: True}})
    assert code == 400, text
    check_error(json.loads(text), "invalid_request_error", f"stream_options.{option}")
    port = FakeLink(answering(words("ok")))
    code, text = await post(port, path, body | {"stream": True, "stream_options": {option: False}})
    assert code == 200, text


async def test_an_unknown_model() -> None:
    for path, body in BODIES:
        code, text = await post(FakeLink(silent), path, body | {"model": "nobody"})
        assert code == 404
        check_error(json.loads(text), "not_found_error", "model")
        assert json.loads(text)["error"]["code"] == "model_not_found"


async def test_a_seed_is_made_where_none_is_given() -> None:
    port = FakeLink(answering(words("ok")))
    path, body = BODIES[0]
    for _ in range(4):
        await post(port, path, body)
    assert len({request.sampling.seed for request in port.of(SubmitText)}) == 4


def known(kind: type[GenerationRequest]) -> set[str]:
    """Parameters that are served, refused, or said to be without effect."""
    return {*kind.__struct_fields__, *UNSUPPORTED, *WITHOUT_EFFECT}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsNonStreaming),
        (ChatRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsNonStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_parameter_of_the_openai_client_is_known(kind: type[GenerationRequest], params: type) -> None:
    assert set(params.__annotations__) - known(kind) == set()


@pytest.mark.skipif(not DESCRIPTION.exists(), reason="OpenAI's description is not beside this checkout")
def test_every_parameter_of_openais_description_is_known() -> None:
    schemas = json.loads(DESCRIPTION.read_text())["components"]["schemas"]

    def properties(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", ()))
        for part in schema.get("allOf", ()):
            found |= properties(schemas[part["$ref"].rpartition("/")[2]] if "$ref" in part else part)
        return found

    assert properties(schemas["CreateChatCompletionRequest"]) - known(ChatRequest) == set()
    assert properties(schemas["CreateCompletionRequest"]) - known(CompletionRequest) == set()


def test_no_parameter_is_both_served_and_refused() -> None:
    served = {name for kind in (GenerationRequest, ChatRequest, CompletionRequest) for name in kind.__struct_fields__}
    assert served.isdisjoint(UNSUPPORTED)
    assert set(UNSUPPORTED).isdisjoint(WITHOUT_EFFECT)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_every_wrong_key_of_a_bias_is_named(path: str, body: dict[str, Any]) -> None:
    code, text = await post(FakeLink(silent), path, body | {"logit_bias": {"5": 1, "x": 1, "1000": 1, "-1": 1}})
    assert code == 400
    message = json.loads(text)["error"]["message"]
    assert message.endswith("'x', '1000', '-1'")
    many = {f"k{number}": 1 for number in range(20)}
    _, text = await post(FakeLink(silent), path, body | {"logit_bias": many})
    assert json.loads(text)["error"]["message"].endswith("'k15' and 4 more")
