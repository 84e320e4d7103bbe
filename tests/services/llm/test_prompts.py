"""Every form of prompt, and the messages that they become."""

from __future__ import annotations

import array
import base64
import io
import json
import re
from typing import Any

import msgspec
import pytest
from PIL import Image

from penstock.engine_core.models.pooler import ClassifierSpec
from penstock.protocol.columns import unpack
from penstock.protocol.errors import InvalidRequest, Unsupported
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import SubmitText
from penstock.services.llm.params import SamplingParams
from penstock.services.llm.prompts import (
    Prompt,
    chat_request,
    classify_submissions,
    completion_requests,
    conversations,
    parse_prompts,
)
from tests.services.client.fake_engine import MAX_MODEL_LEN, MODEL, VOCABULARY

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("one", [Prompt(prompt="one")]),
        ("", [Prompt(prompt="")]),
        (["one", "two"], [Prompt(prompt="one"), Prompt(prompt="two")]),
        ([1, 2, 3], [Prompt(prompt_token_ids=[1, 2, 3])]),
        ([[1, 2], "x"], [Prompt(prompt_token_ids=[1, 2]), Prompt(prompt="x")]),
        ([(1, 2)], [Prompt(prompt_token_ids=[1, 2])]),
        ([array.array("i", [4, 5])], [Prompt(prompt_token_ids=[4, 5])]),
        ([range(3)], [Prompt(prompt_token_ids=[0, 1, 2])]),
        ({"prompt": "x", "cache_salt": "s"}, [Prompt(prompt="x", cache_salt="s")]),
        ([{"prompt_token_ids": [1], "prediction": "p"}], [Prompt(prompt_token_ids=[1], prediction="p")]),
        ([], []),
    ],
)
def test_every_form(given: Any, found: list[Prompt]) -> None:
    assert parse_prompts(given) == found


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ([None], "prompts[0]"), (["x", 5], "prompts[1]"), ({}, "prompts"), ({"prompt": 5}, "prompts.prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompts"), ([{"text": "x"}], "prompts[0]"),
        ([[1, "x"]], "prompts[0].prompt_token_ids"), ([[-1]], "prompts[0].prompt_token_ids"),
        ([{"prompt": "x", "cache_salt": ""}], "prompts[0].cache_salt"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_named(given: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_prompts(given)
    assert str(raised.value.param).startswith(path)


def test_orders_carry_everything() -> None:
    prompts = parse_prompts(["one", {"prompt_token_ids": [1, 2], "cache_salt": "s", "prediction": "p"}])
    params = SamplingParams(temperature=0.0, stop="x", max_tokens=5, logprobs=2)
    first, second = completion_requests(prompts, params, MODEL, [0, 7])
    assert (first.submit.prompt, first.prompt, first.submit.stop) == ("one", "one", ("x",))
    assert (first.submit.sampling.temperature, first.submit.sampling.max_tokens) == (0.0, 5)
    assert first.submit.with_token_ids
    assert first.submit.detokenize
    assert unpack("i", second.submit.prompt_ids or b"") == [1, 2]
    assert (second.submit.cache_salt, second.submit.prediction, second.submit.priority) == ("s", "p", 7)
    assert second.prompt is None
    assert first.submit.sampling.seed != second.submit.sampling.seed


def test_each_may_have_its_own_parameters() -> None:
    params = [SamplingParams(n=2), SamplingParams(max_tokens=None)]
    made = list(completion_requests(parse_prompts(["a", "b"]), params, MODEL))
    assert [request.submit.n for request in made] == [2, 1]
    assert made[1].submit.sampling.max_tokens is None


def test_without_any_the_models_own_hold_and_sixteen_tokens() -> None:
    (request,) = completion_requests(parse_prompts("a"), None, MODEL)
    assert request.submit.sampling.max_tokens == 16
    assert chat_request(MESSAGES, None, MODEL).submit.sampling.max_tokens is None


@pytest.mark.parametrize(
    ("prompts", "more", "said"),
    [
        (["a"], {"params": [SamplingParams()] * 2}, "2 sampling_params for 1 prompts"),
        (["a"], {"priority": [1, 2]}, "2 priorities for 1 prompts"),
        (["a"], {"priority": [1 << 40]}, "out of range"),
        (["a", [VOCABULARY]], {}, "prompts[1]: token id"),
        ([[]], {}, "prompts[0] is empty"),
        ([[1] * (MAX_MODEL_LEN + 1)], {}, "the model's context holds"),
        (["a"], {"params": SamplingParams(stop_token_ids=[VOCABULARY])}, "stop_token_ids"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(prompts: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        completion_requests(parse_prompts(prompts), more.pop("params", None), MODEL, **more)
    assert said in str(raised.value)


def test_a_chat_carries_its_template_arguments() -> None:
    request = chat_request(
        MESSAGES, SamplingParams(max_tokens=None, seed=4), MODEL,
        chat_template_kwargs={"thinking": False}, tools=[{"a": 1}], split=False,
    )  # fmt: skip
    assert json.loads(request.submit.template_arguments or b"") == {"thinking": False}
    assert json.loads(request.submit.tools or b"") == [{"a": 1}]
    assert (request.submit.sampling.seed, request.submit.sampling.max_tokens, request.prompt) == (4, None, None)
    assert not request.submit.reasoning.split
    assert request.submit.tool_use is None
    tools = [{"type": "function", "function": {"name": "f"}}]
    custom = [{"type": "custom", "custom": {"name": "c"}}]
    (shown,) = json.loads(chat_request(MESSAGES, None, MODEL, tools=custom, split=False).submit.tools or b"")
    assert shown["function"]["parameters"]["required"] == ["input"]
    split = chat_request(MESSAGES, None, MODEL, tools=tools, tool_choice="required").submit
    assert split.reasoning.split
    assert split.tool_use is not None
    assert split.tool_use.required
    with pytest.raises(InvalidRequest):
        chat_request([{"role": "wizard", "content": "x"}], None, MODEL)


def test_conversations_are_told_from_one() -> None:
    assert conversations(MESSAGES) == [MESSAGES]
    assert conversations([MESSAGES, MESSAGES]) == [MESSAGES, MESSAGES]
    assert conversations([]) == []


def test_texts_to_classify_need_a_model_with_a_head() -> None:
    head = ClassifierSpec(kind="cls", layers=(), labels=("a", "b"))
    submits, found = classify_submissions("one", 5, msgspec.structs.replace(MODEL, classifier=head))
    assert found is head
    (submit,) = submits
    assert submit.pooling is not None
    assert (submit.prompt, submit.truncate, submit.pooling.kind, submit.pooling.classify) == ("one", 5, "cls", True)
    with pytest.raises(Unsupported):
        classify_submissions(["one"], None, MODEL)


def seen(messages: Any, images: int = 4) -> SubmitText:
    return chat_request(messages, None, msgspec.structs.replace(MODEL, images=images)).submit


def test_pictures_of_a_conversation() -> None:
    """Data: URLs as OpenAI's parts have them, and pictures of Pillow as vLLM's do."""
    picture = Image.new("RGBA", (3, 2), (255, 0, 0, 128))
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_pil", "image_pil": picture},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    ]
    submit = seen([{"role": "system", "content": "look"}, {"role": "user", "content": content}])
    assert json.loads(submit.messages or b"")[1]["content"] == [{"type": "image"}, content[1], {"type": "image"}]
    assert all(type(image) is ImageFile for image in submit.images)
    assert [image.detail for image in submit.images] == ["auto", "low"]
    for image in submit.images:
        with Image.open(io.BytesIO(image.data)) as found:
            assert (found.size, found.getpixel((0, 0))) == ((3, 2), (255, 0, 0, 128))
    assert content[0]["image_pil"] is picture


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_pil"}, "messages[0].content[0].image_pil must be a PIL.Image"),
        ({"type": "image_pil", "image_pil": "x"}, "messages[0].content[0].image_pil must be a PIL.Image"),
        ({"type": "image_pil", "image_pil": Image.new("CMYK", (1, 1))}, "cannot be written as PNG"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a"}}, "only a server fetches images"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "without any bytes"),
    ],
)
def test_pictures_that_cannot_be_read_are_named(part: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)) as raised:
        seen([{"role": "user", "content": [part]}])
    assert (raised.value.param or "").startswith("messages[0].content[0].image_")


def test_a_model_that_does_not_see_says_so() -> None:
    part = {"type": "image_pil", "image_pil": Image.new("L", (1, 1))}
    with pytest.raises(InvalidRequest, match="this model does not see images"):
        seen([{"role": "user", "content": [part]}], images=0)


def test_a_prompt_has_no_place_for_images() -> None:
    given = {"prompt": "<image> what?", "multi_modal_data": {"image": Image.new("L", (1, 1))}}
    with pytest.raises(InvalidRequest, match=r"prompts\[0\].multi_modal_data: .* LLM.chat takes them in messages"):
        parse_prompts([given])
    assert parse_prompts([{"prompt": "x", "multi_modal_data": None}]) == [Prompt(prompt="x")]
