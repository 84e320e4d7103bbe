"""Chats as text: tools, roles, ids and templates of requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.engine_core.parsers.dialect import THINK, CallFormat, Dialect
from penstock.engine_core.text.rendering import Rendered, Renderer, short_id
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Reasoning, Sampling, SubmitText, Tokenize, ToolUse

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{% if enable_thinking %}<think>\n{% endif %}"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "f"}}]).encode()
USER = {"role": "user", "content": "hi"}


def render(*messages: Any, template: str = TEMPLATE, dialect: Dialect | None = None, **fields: Any) -> Rendered:
    renderer = Renderer(ChatTemplate({"default": template}, {}), dialect or Dialect(calls=CallFormat.HERMES))
    body = json.dumps(messages or [USER]).encode()
    return renderer.render(SubmitText(id=1, messages=body, sampling=Sampling(), **fields), 0.0)


def test_tools_are_shown_and_given_back() -> None:
    found = render(tools=TOOLS, tool_use=ToolUse(names=("f",)))
    assert found.text.startswith('[{"type": "function"')
    assert found.tools == json.loads(TOOLS)


def test_tools_that_cannot_be_served() -> None:
    for template, dialect in (("{{ messages }}", None), (TEMPLATE, Dialect())):
        with pytest.raises(InvalidRequest) as caught:
            render(template=template, dialect=dialect, tools=TOOLS, tool_use=ToolUse(names=("f",)))
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported")


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    message = {"role": "developer", "content": "be kind"}
    assert render(message).text.startswith("system:be kind")
    assert render(message, template=TEMPLATE + "{# developer #}").text.startswith("developer:be kind")


def test_messages_as_templates_want_them() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = ({"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"},
                {"role": "tool", "tool_call_id": "call_1", "content": "7"})  # fmt: skip
    assert render(*messages).text == 'assistant:(why)[call_1 {"a": 1}]\ntool:7<call_1>\nassistant:'
    text = render(*messages, dialect=Dialect(calls=CallFormat.MISTRAL)).text
    assert text.count(short_id("call_1")) == 2
    assert short_id("abcdefghi") == "abcdefghi"
    assert len(short_id("call_1")) == 9
    assert short_id("call_1").isalnum()


# A template that takes arguments for text and tells an assistant without words from one that says nothing.
TEXTUAL = (
    "{% for m in messages %}{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}"
    "{{ c['type'] + ' ' + c['function']['name'] + '\\n' + c['function']['arguments'] + ';' }}{% endfor %}{% endif %}"
    "{% if m['content'] is not none %}{{ m['role'] + ':' + m['content'] + '.' }}{% endif %}{% endfor %}"
)


def test_arguments_are_text_for_templates_that_put_texts_together() -> None:
    function = {"name": "f", "arguments": '{"a": "größe", "b": [1, null]}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    messages = [USER, called, {"role": "tool", "tool_call_id": "c", "content": "7"}]
    theirs, _ = render_jinja_template([messages], chat_template=TEXTUAL)
    assert render(*messages, template=TEXTUAL).text == theirs[0]
    assert theirs[0] == 'user:hi.function f\n{"a": "größe", "b": [1, null]};tool:7.'


def test_silence_is_none_for_templates_that_ask_for_it() -> None:
    silent = {"role": "assistant", "content": None, "reasoning_content": "so"}
    assert render(silent, template=TEXTUAL).text == ""
    assert render(silent, template="[{{ messages[0].content }}]").text == "[]"
    asking = "{% if messages[0].content is none %}-{% endif %}"
    assert render(silent, template=asking).text == "-"
    # One that asks and cannot bear the answer all the same.
    for use in ("{{ 'x' in messages[0].content }}", "{{ messages[0].content.split('x') | length == 2 }}"):
        assert render(silent, template=asking + use).text == "False"
    with pytest.raises(InvalidRequest, match="can only concatenate"):
        render(silent, template="{{ 'a' + 1 }}" + asking)


@pytest.mark.parametrize("silent", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_an_assistant_that_said_nothing(silent: dict[str, Any]) -> None:
    assert render(USER, silent, USER, template=TEXTUAL).text == "user:hi.user:hi."


def test_a_final_message_without_words_is_continued_from_its_beginning() -> None:
    silent = {"role": "assistant", "content": None, "reasoning_content": "so"}
    words: Any = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(USER, silent, **words).text == "user:hi\nassistant:"


def test_where_the_answer_begins() -> None:
    dialect = Dialect(reasoning=THINK)
    found = render(dialect=dialect, reasoning=Reasoning(effort="high"))
    assert (found.inside, found.closed, found.thinks) == (True, False, True)
    assert not render(dialect=dialect).inside
    assert render(dialect=dialect, template=TEMPLATE + "<think>\n\n</think>\n\n").closed
    assert not render({"role": "user", "content": "<think>"}, dialect=dialect).inside
    always = msgspec.structs.replace(dialect, begins_inside=True)
    assert render(dialect=always).inside
    assert not render(dialect=always, template=TEMPLATE + "</think>").inside
    continued = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>ha"})
    words: Any = {"dialect": dialect, "add_generation_prompt": False, "continue_final_message": True}
    assert render(*continued, **words).inside


def test_what_is_no_list_or_object() -> None:
    for fields in ({"tools": b"{}"}, {"template_arguments": b"[]"}):
        with pytest.raises(InvalidRequest):
            render(**fields)


def test_tokenize_renders_the_same() -> None:
    renderer = Renderer(ChatTemplate({"default": TEMPLATE}, {}), Dialect())
    question = Tokenize(id=1, messages=json.dumps([USER]).encode(), tools=TOOLS)
    assert renderer.render(question, 0.0).text.endswith("user:hi\nassistant:")


def test_tokenize_reasons_as_the_request_would() -> None:
    template = TEMPLATE.replace("<think>\n", "on")
    renderer = Renderer(ChatTemplate({"default": template}, {}), Dialect(reasoning=THINK))
    for effort, ending in (("high", "on"), ("none", "assistant:"), ("", "assistant:")):
        question = Tokenize(id=1, messages=json.dumps([USER]).encode(), reasoning=Reasoning(effort=effort))
        assert renderer.render(question, 0.0).text.endswith(ending)
