"""Chats as text: tools, roles, ids and templates of requests."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.engine_core.parsers.dialect import ANALYSIS, THINK, Dialect
from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.text.rendering import Rendered, Renderer, count_images, read_content, short_id
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


@pytest.mark.parametrize("default", [True, False])
def test_a_servers_default_of_a_variable_holds_until_a_request_says_otherwise(default: bool) -> None:
    renderer = Renderer(ChatTemplate({"default": TEMPLATE}, {"enable_thinking": default}), Dialect(reasoning=THINK))

    def thinks(effort: str = "", arguments: dict[str, Any] | None = None) -> tuple[bool, bool]:
        given = json.dumps(arguments or {}).encode()
        request = SubmitText(id=1, messages=json.dumps([USER]).encode(), sampling=Sampling(),
                             template_arguments=given, reasoning=Reasoning(effort=effort))  # fmt: skip
        found = renderer.render(request, 0.0)
        assert found.text.endswith("<think>\n") == found.thinks
        return found.thinks, found.inside

    assert thinks() == thinks(arguments={"other": 1}) == (default, default)
    assert thinks(arguments={"enable_thinking": not default}) == (not default, not default)
    assert thinks("high") == (True, True)
    assert thinks("none") == (False, False)


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


def called(*ids: str, **fields: Any) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": f"f{each}", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}


def test_ids_of_calls_are_counted_for_kimi() -> None:
    messages = (USER, called("1", "2"), result("2"), result("1"), USER, called("1"), result("1"), result("9"))
    text = render(*messages, dialect=Dialect(calls=CallFormat.KIMI_K2)).text
    found = re.findall(r"[<\[]([\w.:]+)[ >]", text)
    assert found == ["functions.f1:0", "functions.f2:1", "functions.f2:1", "functions.f1:0", "functions.f1:2",
                     "functions.f1:2", "9"]  # fmt: skip


CHANNELS = Dialect(calls=CallFormat.HARMONY, reasoning=ANALYSIS)
# As the published template of gpt-oss: one call of a message, whose result is the next one's; content or thinking.
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}({{ m.content or m.thinking }})[{{ m.tool_calls[0].function.name }}]"
    "{% elif m.role == 'tool' %}<{{ m.content }}>"
    "{% else %}{{ m.role }}:{{ m.content }}{% endif %}{% endfor %}{{ reasoning_effort }}{{ 'x' if tools }}"
)


def test_messages_on_channels_have_one_call_each() -> None:
    first = called("1", "2", reasoning_content="why", content="I look.")
    answer = {"role": "assistant", "content": "so", "reasoning": "hm"}
    second = called("3", reasoning="why")
    messages = (USER, first, result("2"), result("1"), result("9"), answer, USER, second, result("3"))
    found = render(*messages, template=ONE_CALL, dialect=CHANNELS, reasoning=Reasoning(effort="low"))
    assert found.text == (
        "user:hi(why\nI look.)[f1]<of 1>()[f2]<of 2><of 9>assistant:souser:hi(why)[f3]<of 3>low"
    )  # fmt: skip
    assert (found.inside, found.closed, found.thinks) == (False, False, True)


@pytest.mark.parametrize(("effort", "told"), [("minimal", "low"), ("medium", "medium"), ("xhigh", "high"), ("", "")])
def test_efforts_on_channels(effort: str, told: str) -> None:
    found = render(template=ONE_CALL, dialect=CHANNELS, reasoning=Reasoning(effort=effort))
    assert found.text == f"user:hi{told}"
    assert found.thinks


def test_a_model_on_channels_always_reasons() -> None:
    with pytest.raises(InvalidRequest, match="always reasons") as caught:
        render(template=ONE_CALL, dialect=CHANNELS, reasoning=Reasoning(effort="none"))
    assert caught.value.param == "reasoning_effort"


def test_a_message_with_an_image_keeps_its_parts() -> None:
    """In the form of templates; without one it is text, as ever."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "image", "detail": "low"}, {"type": "text", "text": "b"}]
    kept = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert read_content(parts, "x") == kept
    assert read_content([parts[0], parts[2]], "x") == "a\nb"
    assert count_images([{"content": kept}, {"content": "image"}, {"role": "assistant"}, {"content": kept * 2}]) == 3
    with pytest.raises(InvalidRequest, match=r"x\[0\].type is 'video'; parts are of type 'text' or 'image'"):
        read_content([{"type": "video"}], "x")
