"""POST /generate: SGLang's shapes, whole and streamed, what of them is asked of the engine, and what is refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from penstock.protocol.messages import Finish, SubmitText
from penstock.services.openai.routes import operator_application
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, client, position

PATH = "/generate"
# As slime asks for a rollout (slime/rollout/sglang_rollout.py).
ROLLOUT = {
    "input_ids": [5, 6, 7],
    "sampling_params": {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 2, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
        "sampling_seed": 7,
    },
    "return_logprob": True,
}  # fmt: skip


def ints(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def rows(request: SubmitText) -> list[list[Row]]:
    """Two tokens of each choice, of two versions of the weights."""
    found = []
    for choice in range(request.n):
        first = {"prompt_tokens": 3, "cached_tokens": 1, "prompt_token_ids": ints(5, 6, 7), "weights": ((0, "3"),),
                 "logprobs": (position(" a", 11, 0, 2),),
                 "prompt_logprobs": (None, position("b", 6, 0, 2), position("c", 7, 1, 2))}  # fmt: skip
        last = {"logprobs": (position("b", 12, 2, 2),), "weights": ((1, "4"),)}
        found.append([Row(text=" a", choice=choice, token_ids=ints(11), extra=first)])
        found.append([Row(text="b", choice=choice, token_ids=ints(12), finish=Finish.STOP, extra=last)])
    return found


async def post(body: Any, *, operator: bool = False, **options: Any) -> tuple[int, Any, FakeLink]:
    port = FakeLink(answering(rows))
    served = {"served": operator_application} if operator else {}
    async with client(app_state(port, **options), **served) as http:
        answer = await http.post(PATH, json=body)
    events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return answer.status_code, events or answer.json(), port


async def test_a_rollout_of_slimes() -> None:
    """Its client reads `output_token_logprobs` for tokens and values, `finish_reason.type`, and the version."""
    code, answer, port = await post(ROLLOUT)
    assert code == 200, answer
    meta = answer["meta_info"]
    first, second = meta["output_token_logprobs"]
    assert (first[1:], second[1:]) == ([11, None], [12, None])
    assert first[0] < 0
    assert answer["text"] == " ab"
    assert answer["output_ids"] == [11, 12]
    assert meta["finish_reason"] == {"type": "stop", "matched": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 1)
    assert meta["input_token_logprobs"] == []
    assert meta["weight_version"] == "4"
    assert [span["start"] for span in meta["weight_versions"]] == [0, 1]
    (asked,) = port.of(SubmitText)
    assert struct.unpack("<3i", asked.prompt_ids) == (5, 6, 7)
    sampling = asked.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.top_k, sampling.logprobs) == (7, 2, 0, 0)
    assert (sampling.processed_logprobs, sampling.prompt_logprobs) == (True, -1)
    assert (asked.include_stop, asked.skip_special_tokens, asked.with_token_ids) == (True, False, True)


async def test_log_probabilities_of_the_prompt_and_of_other_tokens() -> None:
    asked = {**ROLLOUT, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True,
             "logprobs_mode": "raw_logprobs", "rid": "mine"}  # fmt: skip
    code, answer, port = await post(asked)
    assert code == 200, answer
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    assert [each[1:] for each in meta["input_token_logprobs"][1:]] == [[6, "b"], [7, "c"]]
    assert meta["input_top_logprobs"][0] is None
    assert [len(each) for each in meta["output_top_logprobs"]] == [2, 2]
    (sent,) = port.of(SubmitText)
    assert (sent.rid, sent.sampling.logprobs, sent.sampling.prompt_logprobs) == ("mine", 2, 2)
    assert not sent.sampling.processed_logprobs
    _, later, _ = await post({**asked, "logprob_start_len": 2})
    assert [each[1] for each in later["meta_info"]["input_token_logprobs"]] == [7]


async def test_events_hold_all_so_far() -> None:
    code, found, _ = await post({**ROLLOUT, "stream": True})
    assert code == 200
    assert found.pop() == "[DONE]"
    events = [json.loads(each) for each in found]
    assert [event["text"] for event in events] == [" a", " ab"]
    assert [event["output_ids"] for event in events] == [[11], [11, 12]]
    assert events[0]["meta_info"]["finish_reason"] is None
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2]


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"text": ["a", "b"], "rid": ["x", "y"]}, ["x", "y"]),
        ({"input_ids": [[5], [6]], "rid": "x"}, ["x_0", "x_1"]),
        ({"text": "a", "rid": "x", "sampling_params": {"n": 2}}, ["x", "x"]),
        ({"text": ["a"], "rid": "x"}, ["x"]),
    ],
)
async def test_several_are_a_list(body: Any, ids: list[str]) -> None:
    code, answer, port = await post(body)
    assert code == 200, answer
    assert [each["meta_info"]["id"] for each in answer] == ids
    assert {request.rid for request in port.of(SubmitText)} == set(ids)
    assert "output_token_logprobs" not in answer[0]["meta_info"]
    code, events, _ = await post({**body, "stream": True})
    assert {json.loads(each)["index"] for each in events[:-1]} == set(range(len(ids)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"input_ids": [5000]}, "input_ids"),
        ({"input_ids": [[5], "a"]}, "input_ids[1]"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 4096}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"n": 200}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [5000]}}, "sampling_params.stop_token_ids"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 3000}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    ],
)
async def test_what_is_wrong_is_named(body: Any, param: str) -> None:
    code, answer, port = await post(body)
    assert code == 400, answer
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]
    assert not port.sent


async def test_what_the_operator_ends_is_told_whatever_there_is_of_it() -> None:
    port = FakeLink(answering(lambda request: [[Row(tokens=0, finish=Finish.ABORT)]]))
    async with client(app_state(port)) as http:
        answer = (await http.post(PATH, json=ROLLOUT)).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["output_token_logprobs"]) == ("", [], [])


async def test_a_prompt_alone_is_scored() -> None:
    scored = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
              "logprob_start_len": 0}  # fmt: skip
    _, answer, port = await post(scored)
    (asked,) = port.of(SubmitText)
    assert (asked.echo, asked.sampling.max_tokens) == (True, 0)
    assert answer["text"] == ""


async def test_the_operators_address_has_it_too() -> None:
    """A trainer of SGLang's has one address for everything."""
    code, answer, _ = await post(ROLLOUT, operator=True, admin_address="unix:/none")
    assert code == 200, answer


async def test_requests_of_other_apis_are_called_by_their_ids_where_there_is_an_operator() -> None:
    for address, wanted in (("unix:/none", "theirs"), ("", "")):
        port = FakeLink(answering(rows))
        async with client(app_state(port, admin_address=address)) as http:
            await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "theirs"})
        assert [request.rid for request in port.of(SubmitText)] == [wanted]
