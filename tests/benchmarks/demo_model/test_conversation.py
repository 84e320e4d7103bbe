"""The generator writes the text that the chat template renders."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from benchmarks.demo_model.conversation import Conversation, Exercise, Message, Thinking, parts, prompt
from benchmarks.demo_model.generator import Split, sample

TEMPLATE = Path(__file__).parents[3] / "benchmarks/demo_model/chat_template.jinja"


def _fail(message: str) -> None:
    raise ValueError(message)


@pytest.fixture(scope="module")
def render() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _fail
    return environment.from_string(TEMPLATE.read_text()).render


def _keywords(conversation: Conversation) -> dict[str, Any]:
    keywords: dict[str, Any] = {"tools": list(conversation.tools) or None}
    if conversation.thinking is not Thinking.UNSAID:
        keywords["enable_thinking"] = conversation.thinking is Thinking.ON
    return keywords


def test_template_renders_every_prompt_of_the_generator(render: Any) -> None:
    rng = Random(11)
    seen = set()
    for _ in range(400):
        conversation = sample(rng, Split.TRAINING).conversation
        if conversation is None:
            continue
        messages = [message.as_openai() for message in conversation.messages[:-1]]
        rendered = render(messages=messages, add_generation_prompt=True, **_keywords(conversation))
        assert rendered == prompt(conversation)
        seen |= {message.role for message in conversation.messages} | {conversation.thinking}
    assert seen == {"system", "user", "assistant", "tool", *Thinking}


def test_template_renders_whole_conversations(render: Any) -> None:
    rng = Random(12)
    for _ in range(100):
        conversation = sample(rng, Split.TRAINING).conversation
        if conversation is None or conversation.thinks or conversation.thinking is not Thinking.UNSAID:
            continue
        messages = [message.as_openai() for message in conversation.messages]
        text = "".join(part.text for part in parts(conversation)) + "\n"
        assert render(messages=messages, **_keywords(conversation)) == text


def test_arguments_as_a_string_render_like_an_object(render: Any) -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Oslo"}}}
    text = {"type": "function", "function": {"name": "clock", "arguments": '{"city": "Oslo"}'}}
    question = {"role": "user", "content": "What time is it in Oslo?"}
    rendered = [
        render(messages=[question, {"role": "assistant", "content": None, "tool_calls": [form]}])
        for form in (call, text)
    ]
    assert rendered[0] == rendered[1]
    assert '<tool_call>\n{"name": "clock", "arguments": {"city": "Oslo"}}\n</tool_call>' in rendered[0]


def test_two_tool_results_share_a_turn(render: Any) -> None:
    results = [{"role": "tool", "content": content} for content in ("1", "2")]
    text = render(messages=results)
    assert text == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_content_parts_are_joined_and_images_refused(render: Any) -> None:
    words = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render(messages=[{"role": "user", "content": words}]) == "<|im_start|>user\nHello<|im_end|>\n"
    with pytest.raises(ValueError, match="text only"):
        render(messages=[{"role": "user", "content": [{"type": "image_url"}]}])


def test_older_thoughts_are_dropped(render: Any) -> None:
    answer = {"role": "assistant", "content": "<think>\n1 + 1 = 2.\n</think>\n\n1 + 1 = 2."}
    assert render(messages=[answer]) == "<|im_start|>assistant\n1 + 1 = 2.<|im_end|>\n"


def test_unknown_roles_are_refused(render: Any) -> None:
    with pytest.raises(ValueError, match="Unknown role: oracle"):
        render(messages=[{"role": "oracle", "content": "x"}])


def test_what_others_said_and_what_a_grammar_writes_is_not_trained() -> None:
    other = Exercise("note", "", (Message("user", "Hi"), Message("assistant", "Yo.", foreign=True)))
    asked = Exercise("bare", "", (Message("user", "Tom is 5."), Message("assistant", '{"name": "Tom"}', given=2)))
    conversation = Conversation((other, asked))
    trained = [part.text for part in parts(conversation) if part.trained]
    assert trained == ['name": "Tom"}<|im_end|>']
    assert prompt(conversation).endswith("<|im_start|>user\nTom is 5.<|im_end|>\n<|im_start|>assistant\n")
