"""Chat templates print what transformers prints, and refuse what they should."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.engine_core.text.template import OPEN_END, ChatTemplate, Conversation, read_template
from penstock.protocol.errors import ConfigError, InvalidRequest, ModelError
from tests.engine_core.tokenizer.vocabularies import CHAT_TEMPLATE

NOON = datetime(2026, 11, 21, 12, 0)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <b>brief</b> & "exact".'},
    {"role": "user", "content": "  What's 1 + 1?\n"},
    {"role": "assistant", "content": "2 – é 你好 😀"},
    {"role": "user", "content": "And 2 + 2?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "größe", "b": ["<x>", 1, None, True]}}}]
CALLED = {"function": {"name": "add", "arguments": {"b": 1, "a": 2}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
TEMPLATES = {
    "marks": CHAT_TEMPLATE,
    "bos and trimming": (
        "{{ bos_token }}\n{%- for m in messages %}\n    {{- '[' + m['role'] + '] ' + m['content'] | trim }}\n"
        "    {%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{%- endfor %}\n"
    ),
    "tools as json": (
        "{% if tools is not none %}{{ tools | tojson }}|{{ tools | tojson(indent=4) }}|"
        "{% for t in tools %}{{ t.function | tojson(sort_keys=true) }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
        "{{ c.function.name ~ ':' ~ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
    ),
    "namespace, slices, loop controls": (
        "{% set ns = namespace(system='', n=0) %}{% if messages[0].role == 'system' %}"
        "{% set ns.system = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
        "{% endif %}{% for m in rest %}{% set ns.n = ns.n + 1 %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ loop.index0 }}/{{ loop.length }}{% if loop.last %}!{% endif %}{{ loop.first }}{{ m.content[::-1] }}"
        "{% if ns.n == 3 %}{% break %}{% endif %}{% endfor %}{{ ns.system }}"
    ),
    "generation blocks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "macros and neighbours": (
        "{% macro show(m, mark='#') %}{{ mark * 3 }}{{ m.content | upper | replace('A', 'b') }}{% endmacro %}"
        "{% for m in messages | selectattr('role', 'ne', 'system') | list %}{{ show(m) }}"
        "{{ loop.previtem.role if loop.previtem }}{{ m.content.split(' ')[-1] }}{% endfor %}"
    ),
    "dictionaries": (
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0] | length }}"
        "{{ '%s-%03d' % ('a', 7) }}{{ '%d' | format(3) }}{{ messages[0].missing }}{{ [1, 2] + [3] }}{{ 7 // 2 * 2 }}"
    ),
}


def chat(template: str, **given: Any) -> str:
    given.setdefault("messages", MESSAGES)
    return ChatTemplate({"default": template}, NAMES).render(Conversation(**given), NOON)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompted", [True, False])
def test_it_prints_what_transformers_prints(template: str, tools: list[Any] | None, prompted: bool) -> None:
    messages = [*MESSAGES, CALL] if tools else MESSAGES
    theirs, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=prompted, **NAMES
    )
    assert chat(template, messages=messages, tools=tools, add_generation_prompt=prompted) == theirs[0]


@pytest.mark.parametrize("content", ["It is", "It is ", "2 ", " x\n"])
@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, TEMPLATES["bos and trimming"], TEMPLATES["generation blocks"]], ids=["a", "b", "c"]
)
def test_the_final_message_stays_open(template: str, content: str) -> None:
    """The result ends where the content ends, whatever the template prints after it, as transformers has it."""
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    text = chat(template, messages=messages, add_generation_prompt=False, continue_final_message=True)
    theirs, _ = render_jinja_template([messages], chat_template=template, continue_final_message=True, **NAMES)
    assert text == theirs[0]
    assert OPEN_END.strip() not in text
    closed = chat(template, messages=messages, add_generation_prompt=False)
    assert closed.startswith(text.rstrip())


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),  # with add_generation_prompt
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),  # a user's
        ({"arguments": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(CHAT_TEMPLATE, **given)
    assert caught.value.param == param


def test_a_template_that_leaves_out_the_final_message_cannot_continue_it() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        chat("nothing", messages=messages, add_generation_prompt=False, continue_final_message=True)


def test_names_of_the_request_reach_the_template() -> None:
    template = "{{ enable_thinking }}{{ documents[0].title }}{{ strftime_now('%d %b %Y') }}"
    arguments = {"enable_thinking": False, "documents": [{"title": "t"}]}
    assert chat(template, arguments=arguments) == "Falset21 Nov 2026"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages | fromjson }}", None),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.append.__globals__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_what_goes_wrong_inside_is_the_requests_error(template: str, complaint: str | None) -> None:
    if complaint is None:
        with pytest.raises(Exception, match="No filter named"):
            chat(template)
        return
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        chat(template)
    assert caught.value.param == "messages"
    assert "/" not in caught.value.message.replace("//", "")


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def rendered(folder: Path, tools: list[Any] | None = None, override: str = "") -> str:
    template = read_template(folder, NAMES, override)
    return template.render(Conversation(messages=MESSAGES, tools=tools), NOON)


def test_where_templates_stand(tmp_path: Path) -> None:
    """--chat-template, then chat_template.jinja, then tokenizer_config.json, then chat_template.json."""
    with pytest.raises(InvalidRequest, match="no chat template"):
        rendered(tmp_path)
    assert not read_template(tmp_path, NAMES)
    write(tmp_path, chat_template_json={"chat_template": "json"})
    assert rendered(tmp_path) == "json"
    write(tmp_path, tokenizer_config_json={"chat_template": "config"})
    assert rendered(tmp_path) == "config"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(tmp_path, tokenizer_config_json={"chat_template": named})
    assert (rendered(tmp_path), rendered(tmp_path, TOOLS)) == ("d", "t")
    write(tmp_path, tokenizer_config_json={"chat_template": named[1:]})
    assert rendered(tmp_path) == "t"
    write(tmp_path, chat_template_jinja="jinja", additional_chat_templates__tool_use_jinja="tools")
    assert (rendered(tmp_path), rendered(tmp_path, TOOLS)) == ("jinja", "tools")
    write(tmp_path, mine_jinja="mine")
    assert rendered(tmp_path, override=str(tmp_path / "mine.jinja")) == "mine"


@pytest.mark.parametrize(
    "config", [{"chat_template": "{% if %}"}, {"chat_template": 3}, {"chat_template": [{"name": "default"}]}]
)
def test_a_malformed_template_names_its_file(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, tokenizer_config_json=config)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        read_template(tmp_path, NAMES)


@pytest.mark.parametrize("content", [None, "{% for %}"])
def test_a_wrong_option_names_itself(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        write(tmp_path, mine_jinja=content)
    with pytest.raises(ConfigError, match="--chat-template"):
        read_template(tmp_path, NAMES, str(tmp_path / "mine.jinja"))


def test_a_refused_conversation_is_freed_at_once() -> None:
    """Not when the cycle collector comes by: nobody counts what waits for it."""

    class Content(str):
        """Text whose end can be watched."""

    template = ChatTemplate({"default": "{{ raise_exception('no') }}"}, {})
    gc.collect()
    gc.disable()
    try:
        content = Content("a prompt")
        watched = weakref.ref(content)
        with contextlib.suppress(InvalidRequest):
            template.render(Conversation(messages=[{"role": "user", "content": content}]), NOON)
        del content
        assert watched() is None
    finally:
        gc.enable()
