"""A chat request's prompt as text: its messages, tools and wishes in the words of the model's template."""

from __future__ import annotations

import re
from datetime import datetime
from hashlib import blake2b
from typing import Any

import msgspec

from penstock.engine_core.parsers.dialect import CallFormat, Dialect
from penstock.engine_core.text.chat import read_json, read_messages
from penstock.engine_core.text.controls import Controls, Splitter
from penstock.engine_core.text.template import ChatTemplate, Conversation
from penstock.engine_core.text.thinking import asks_to_think, left_open, thinking_arguments
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import SubmitText, Tokenize

MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")  # what their templates take as a call's id


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A chat's prompt, and what its answer needs of it."""

    text: str
    pieces: tuple[str, ...] = ()  # plain text and control tokens in turn; empty: all control tokens of `text` are meant
    tools: list[Any] | None = None
    inside: bool = False  # the answer begins within the reasoning
    closed: bool = False  # the prompt has ended the reasoning
    thinks: bool = False  # the template was told to have the model reason


class Renderer:
    """Renders chats of one model by one template. Safe in threads."""

    def __init__(self, template: ChatTemplate, dialect: Dialect, controls: Controls | None = None) -> None:
        """`controls`: those that contents must not spell; None: they may."""
        self._template = template
        self._dialect = dialect
        self._splitter = (
            None if controls is None else Splitter(controls, dialect, template.source, template.literals)
        )

    def render(self, request: SubmitText | Tokenize, now: float) -> Rendered:
        """`now` in unix seconds is what a template knows as the time. Raises InvalidRequest."""
        assert request.messages is not None
        template = self._template
        tools = read_list(request.tools, "tools")
        if isinstance(request, SubmitText) and request.tool_use is not None:
            self._check_tools(template)
        arguments = read_object(request.template_arguments, "chat_template_kwargs")
        reasons = self._dialect.reasoning is not None
        effort = request.reasoning.effort
        arguments = {**arguments, **thinking_arguments(effort, arguments, template, reasons=reasons)}
        messages = [self._known(message, template) for message in read_messages(request.messages)]
        conversation = Conversation(
            messages=messages,
            tools=tools,
            arguments=arguments,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        moment = datetime.fromtimestamp(now)
        text = template.render(conversation, moment)
        split = None
        if self._splitter is not None:
            raw = (request.messages, request.tools, request.template_arguments)
            if not self._splitter.idle(raw):
                split = self._splitter.split(conversation, text, lambda marked: template.render(marked, moment))
        final = messages[-1].get("content") or "" if request.continue_final_message else None
        judged = self._judged(split.marked if split else text, tools, final, thinks=asks_to_think(arguments))
        if split is None:
            return judged
        return msgspec.structs.replace(judged, text="".join(split.pieces), pieces=split.pieces)

    def _judged(self, text: str, tools: list[Any] | None, final: str | None, *, thinks: bool) -> Rendered:
        markers = self._dialect.reasoning
        if markers is None:
            return Rendered(text=text, tools=tools)
        closed = text.rstrip().endswith(markers.closing)
        inside = left_open(text, markers, final) or (self._dialect.begins_inside and not closed and final is None)
        return Rendered(text=text, tools=tools, inside=inside, closed=closed, thinks=thinks)

    def _check_tools(self, template: ChatTemplate) -> None:
        """Raise InvalidRequest where calls could not be asked for or not be read."""
        if self._dialect.calls is None:
            message = "tools: nothing tells how this model writes its calls; see --tool-call-parser"
            raise InvalidRequest(message, param="tools", code="unsupported")
        if "tools" not in template.variables:
            message = "tools: this model's chat template does not show tools to the model"
            raise InvalidRequest(message, param="tools", code="unsupported")

    def _known(self, message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
        """The message in the words of the template."""
        if message["role"] == "developer" and "developer" not in template.source:
            message = {**message, "role": "system"}
        if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
            message = {**message, "reasoning_content": message["reasoning"]}
        if self._dialect.calls is CallFormat.MISTRAL:
            message = with_short_ids(message)
        return message


def with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of calls as Mistral's templates demand them: nine letters and digits."""
    found = dict(message)
    if isinstance(found.get("tool_call_id"), str):
        found["tool_call_id"] = short_id(found["tool_call_id"])
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "id": short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in found["tool_calls"]
        ]
    return found


def short_id(call_id: str) -> str:
    """The same nine characters for the same id."""
    return call_id if MISTRAL_ID.fullmatch(call_id) else blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def read_list(data: bytes | None, param: str) -> list[Any] | None:
    if data is None:
        return None
    value = read_json(data, param)
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be a list", param=param)
    return value


def read_object(data: bytes | None, param: str) -> dict[str, Any]:
    if data is None:
        return {}
    value = read_json(data, param)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return value
