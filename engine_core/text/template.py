"""The model's chat template: conversations as the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import msgspec

from penstock.engine_core.models.config_file import read_json
from penstock.engine_core.text.sandbox import TemplateLimit, compile_template, make_sandbox, render, to_json
from penstock.protocol.errors import ConfigError, InvalidRequest, ModelError
from penstock.protocol.validation import RESERVED

DEFAULT = "default"
TOOL_USE = "tool_use"  # the template for requests with tools, where a model has two
# Marks where the final message's content ends while it stays open; its space tells whether the template trims contents.
OPEN_END = "\ue000continue\ue001 "
MAX_COMPLAINT = 500  # characters of a template's error that a client sees
RENDER_ERRORS = (
    jinja2.TemplateError,
    TemplateLimit,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

MISSPELLED = (TypeError, jinja2.UndefinedError)  # what a value of a kind that a template does not expect raises


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a template renders."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    arguments: dict[str, Any] = {}  # further names for the template
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """A model's templates by name; most models have one. Rendering is safe in threads."""

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, Any], *, trusted: bool = True) -> None:
        """`names` are the special tokens, and variables that requests may set otherwise. `trusted`: the operator's, not
        a request's.

        Raises jinja2.TemplateSyntaxError, RecursionError for one nested too deep.
        """
        sandbox = make_sandbox(trusted=trusted)
        self._templates = {name: compile_template(sandbox, source, counted=trusted) for name, source in sources.items()}
        self.names = dict(names)
        self.source = "\n".join(sources.values())
        trees = [sandbox.parse(source) for source in sources.values()]
        self.variables = frozenset().union(*map(jinja2.meta.find_undeclared_variables, trees))  # names that it reads
        self.literals = frozenset().union(*map(literal_texts, trees))
        self._knows_silence = any(map(asks_for_content, trees))

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(self, conversation: Conversation, moment: datetime) -> str:
        """The prompt's text. `moment` is what the template knows as now.

        Raises InvalidRequest: no template, names that the template's own would hide, or the template's complaint.
        """
        template = self._choose(conversation)
        for name in conversation.arguments:
            if name in RESERVED:
                message = f"chat_template_kwargs must not set {name!r}, which is a parameter of the request"
                raise InvalidRequest(message, param="chat_template_kwargs")
        messages = conversation.messages
        if conversation.continue_final_message:
            messages = open_final_message(conversation)
        names = {
            **self.names,
            "tools": conversation.tools or None,
            "documents": None,
            **conversation.arguments,
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
        }
        text = self._print(template, names, messages, moment)
        return cut_final_message(text) if conversation.continue_final_message else text

    def _print(
        self, template: jinja2.Template, names: dict[str, Any], messages: list[dict[str, Any]], moment: datetime
    ) -> str:
        """By the first spelling of the messages that the template can print. Raises InvalidRequest."""
        complaint = ""
        for spelling in spellings(messages, silent=self._knows_silence):
            try:
                return render(template, {**names, "messages": spelling}, moment)
            except MISSPELLED as error:
                complaint = complaint or told(error)
            except RENDER_ERRORS as error:
                complaint = complaint or told(error)
                break
        raise InvalidRequest(f"The chat template refused the messages: {complaint}", param="messages")

    def _choose(self, conversation: Conversation) -> jinja2.Template:
        template = self._templates.get(TOOL_USE) if conversation.tools else None
        template = template or self._templates.get(DEFAULT)
        if template is None:
            raise InvalidRequest(
                "This model has no chat template, so it takes no messages; use /v1/completions, or start the server "
                "with --chat-template",
                param="messages",
                code="unsupported",
            )
        return template


def told(error: Exception) -> str:
    """What a template's error says, or its name where it says nothing."""
    return str(error)[:MAX_COMPLAINT] or type(error).__name__


def literal_texts(tree: jinja2.nodes.Template) -> frozenset[str]:
    """The texts that a template writes, as far as they stand in it."""
    data = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    return frozenset(data | {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)})


def asks_for_content(tree: jinja2.nodes.Template) -> bool:
    """Whether a template asks if a message's content is none: so it tells silence from an empty text."""

    def name(node: jinja2.nodes.Node) -> object:
        match node:
            case jinja2.nodes.Getattr(attr=attribute):
                return attribute
            case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=key)):
                return key
            case _:
                return getattr(node, "name", None)

    return any(test.name == "none" and name(test.node) == "content" for test in tree.find_all(jinja2.nodes.Test))


def spellings(messages: list[dict[str, Any]], *, silent: bool) -> Iterator[list[dict[str, Any]]]:
    """The messages as templates may want them, the likeliest way first. An assistant that has said nothing has a
    content of None if `silent`, else an empty one; arguments of calls are an object or, where a template puts strings
    together, its text."""
    spoken = [spell(message, None if silent else "", text=False) for message in messages]
    yield spoken
    if any("tool_calls" in message for message in messages):
        yield [spell(message, None if silent else "", text=True) for message in messages]
    if silent:
        yield [spell(message, "", text=False) for message in messages]


def spell(message: dict[str, Any], silence: str | None, *, text: bool) -> dict[str, Any]:
    """One message of `spellings`."""
    if message.get("role") != "assistant":
        return message
    found = message if message.get("content") is not None else {**message, "content": silence}
    if not text or "tool_calls" not in message:
        return found
    calls = [
        {**call, "function": {**call["function"], "arguments": to_json(call["function"]["arguments"])}}
        if isinstance(call.get("function", {}).get("arguments"), dict)
        else call
        for call in message["tool_calls"]
    ]
    return {**found, "tool_calls": calls}


def open_final_message(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages, with the end of the last one's content marked."""
    if conversation.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise InvalidRequest(message, param="continue_final_message")
    final = conversation.messages[-1]
    content = final.get("content") or ""
    if final.get("role") != "assistant" or not isinstance(content, str):
        message = "continue_final_message needs a last message of role 'assistant' with text content"
        raise InvalidRequest(message, param="continue_final_message")
    return [*conversation.messages[:-1], {**final, "content": content + OPEN_END}]


def cut_final_message(text: str) -> str:
    """`text` up to the end of the final message's content, trimmed where the template trims contents."""
    end = text.rfind(OPEN_END.rstrip())
    if end < 0:
        message = "the chat template does not print the last message, so it cannot be continued"
        raise InvalidRequest(message, param="continue_final_message")
    return text[:end] if text.startswith(OPEN_END, end) else text[:end].rstrip()


def read_template(folder: Path, names: Mapping[str, Any], override: str = "") -> ChatTemplate:
    """The templates of a model folder; `override` is a file that takes their place. A folder may have none.

    Raises ModelError naming the file that is malformed, ConfigError when `override` cannot be read or is malformed.
    """
    if override:
        path = Path(override).expanduser()
        try:
            return ChatTemplate({DEFAULT: path.read_text(encoding="utf-8")}, names)
        except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
            why = f"line {error.lineno}: {error.message}" if isinstance(error, jinja2.TemplateSyntaxError) else error
            raise ConfigError("--chat-template", override, f"it must be a file with a jinja template: {why}") from None
    sources, path = find_sources(folder)
    try:
        return ChatTemplate(sources, names)
    except jinja2.TemplateSyntaxError as error:
        why = f"the chat template is wrong in its line {error.lineno}: {error.message}"
        raise ModelError(f"{path}: {why}; mend it, or give another with --chat-template") from None


def find_sources(folder: Path) -> tuple[dict[str, str], Path]:
    """Template sources by name, and the file they stand in: chat_template.jinja before the JSON files."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        sources = {file.stem: read_text(file) for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
        return {**sources, DEFAULT: read_text(path)}, path
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        value = read_json(path).values.get("chat_template") if path.is_file() else None
        if value is not None:
            return read_sources(path, value), path
    return {}, folder


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None


def read_sources(path: Path, value: Any) -> dict[str, str]:
    """`chat_template` of a JSON file: a template, an object of templates, or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ModelError(f"{path}: chat_template must be a template or a list of named templates")
    if value and DEFAULT not in value:
        value = {DEFAULT: next(iter(value.values())), **value}
    return dict(value)
