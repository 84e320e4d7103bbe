"""A chat request's prompt as text: its messages, tools and wishes in the words of the model's template.

Conversations are checked and brought into the form that chat templates expect, and what a request wants of reasoning is
told to the template in the words that it knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import blake2b
from typing import Any

import msgspec

from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.parsers.reasoning import Markers
from penstock.engine_core.text.controls import Controls, Splitter
from penstock.engine_core.text.template import ChatTemplate, Conversation
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.limits import MAX_JSON_DEPTH
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
        self._splitter = None if controls is None else Splitter(controls, dialect, template.source, template.literals)

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
        if self._dialect.channels:
            effort = channels_effort(effort)
        arguments = {**arguments, **thinking_arguments(effort, arguments, template, reasons=reasons)}
        messages = [self._known(message, template) for message in read_messages(request.messages)]
        check_images(messages, len(request.images))
        if self._dialect.channels and "thinking" in template.source:
            messages = on_channels(messages)
        elif self._dialect.calls is CallFormat.KIMI_K2:
            messages = with_counted_ids(messages)
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
        judged = self._judged(
            split.marked if split else text, tools, final, thinks=asks_to_think({**template.names, **arguments})
        )
        if split is None:
            return judged
        return msgspec.structs.replace(judged, text="".join(split.pieces), pieces=split.pieces)

    def _judged(self, text: str, tools: list[Any] | None, final: str | None, *, thinks: bool) -> Rendered:
        markers = self._dialect.reasoning
        if markers is None:
            return Rendered(text=text, tools=tools)
        closed = text.rstrip().endswith(markers.closing)
        inside = left_open(text, markers, final) or (self._dialect.begins_inside and not closed and final is None)
        thinks = thinks or self._dialect.channels  # there is no way to tell such a model not to
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


def with_counted_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of calls as Kimi's templates print them: the function's name, and how many calls came
    before. A result has the id of the last call that it may be of."""
    found, names = [], dict[Any, str]()
    count = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = f"functions.{call['function'].get('name')}:{count}"
            calls.append({**call, "id": names[call.get("id")]})
            count += 1
        known = names.get(message.get("tool_call_id"))
        found.append(
            {**message, **({"tool_calls": calls} if calls else {}), **({"tool_call_id": known} if known else {})}
        )
    return found


def on_channels(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates of harmony take them: reasoning is `thinking`, which holds what was said before a call
    as well, and each call stands in a message of its own, with its result behind it."""
    found: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if message["role"] == "assistant" and isinstance(message.get("reasoning_content"), str):
            message = {"thinking": message["reasoning_content"], **message}
        calls = message.get("tool_calls", ())
        if calls and message.get("thinking") and message.get("content"):
            thought = f"{message['thinking']}\n{message['content']}"
            message = {**message, "thinking": thought, "content": None}
        if len(calls) < 2:
            found.append(message)
            continue
        end = next((at for at in range(place, len(messages)) if messages[at]["role"] != "tool"), len(messages))
        results, place = messages[place:end], end
        for number, call in enumerate(calls):
            found.append({**(message if not number else {"role": "assistant", "content": None}), "tool_calls": [call]})
            found += [each for each in results if each.get("tool_call_id") == call.get("id")]
        found += [each for each in results if each.get("tool_call_id") not in [call.get("id") for call in calls]]
    return found


LOWER, HIGHER = ("minimal",), ("xhigh", "max")  # efforts that harmony has no word for


def channels_effort(effort: str) -> str:
    """An effort in harmony's words. Raises InvalidRequest for none at all."""
    if effort == NO_EFFORT:
        message = f"{EFFORT} must not be {effort!r}: this model always reasons; 'low' is the least of it"
        raise InvalidRequest(message, param=EFFORT, code="unsupported")
    return "low" if effort in LOWER else "high" if effort in HIGHER else effort


def read_list(data: bytes | None, param: str) -> list[Any] | None:
    if data is None:
        return None
    value = read_json(data, param)
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be a list", param=param, code="invalid_type")
    return value


def read_object(data: bytes | None, param: str) -> dict[str, Any]:
    if data is None:
        return {}
    value = read_json(data, param)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object", param=param, code="invalid_type")
    return value


SWITCHES = ("enable_thinking", "thinking")  # names by which templates are told yes or no
EFFORT = "reasoning_effort"
NO_EFFORT = "none"


def thinking_arguments(
    effort: str, given: Mapping[str, Any], template: ChatTemplate, *, reasons: bool
) -> dict[str, Any]:
    """Names for the template that stand for `effort`; those that the request gave itself stay as they are.

    Raises InvalidRequest where the template can be told nothing of the kind; a model that never reasons (not `reasons`)
    need not be told to leave it.
    """
    if not effort:
        return {}
    switches = [name for name in SWITCHES if name in template.variables]
    found: dict[str, Any] = dict.fromkeys(switches, effort != NO_EFFORT)
    if EFFORT in template.variables:
        found[EFFORT] = effort
    if not found and (reasons or effort != NO_EFFORT):
        message = f"{EFFORT} is {effort!r}, but this model's chat template knows no effort of reasoning"
        raise InvalidRequest(message, param=EFFORT, code="unsupported")
    return {name: value for name, value in found.items() if name not in given}


def asks_to_think(arguments: Mapping[str, Any]) -> bool:
    """Whether the template was told to have the model reason."""
    effort = arguments.get(EFFORT)
    return any(arguments.get(name) is True for name in SWITCHES) or (effort is not None and effort != NO_EFFORT)


def check_images(messages: list[dict[str, Any]], came: int) -> None:
    """Raise InvalidRequest unless there is a picture for each part that stands for one."""
    named = count_images(messages)
    if named != came:
        raise InvalidRequest(f"messages hold {named} parts of type 'image', and {came} images came", param="messages")


def left_open(prompt: str, markers: Markers, final: str | None) -> bool:
    """Whether a prompt leaves the reasoning open: at its very end, or in a message `final` that is to be continued."""
    if final is not None and final.rfind(markers.opening) > final.rfind(markers.closing):
        return True
    return prompt.rstrip().endswith(markers.opening)


MAX_MESSAGES = 1 << 14  # of one conversation: templates look back and ahead over all of them
SPOKEN = ("tool_calls", "reasoning_content", "reasoning")  # with one of these an assistant's message needs no content
TEXT_PARTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_json(data: bytes, param: str) -> Any:
    """Raises InvalidRequest for what is not JSON or is nested too deep."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(f"{param} must be valid JSON", param=param, code="invalid_json") from None
    except RecursionError:
        raise too_deep(param) from None
    if deeper(value, MAX_JSON_DEPTH):
        raise too_deep(param)
    return value


def too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must not be nested more than {MAX_JSON_DEPTH} deep", param=param)


def deeper(value: Any, limit: int) -> bool:
    """Whether arrays and objects in `value` are nested more than `limit` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return bool(level)


def read_messages(data: bytes) -> list[dict[str, Any]]:
    """The messages of a chat, in OpenAI's form, with text content as one string and tool arguments as objects.

    Raises InvalidRequest naming the place.
    """
    messages = read_json(data, "messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must be a list of 1 to {MAX_MESSAGES} messages", param="messages")
    return [read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def read_message(message: Any, place: str) -> dict[str, Any]:
    """One message; `place` is how errors name it."""
    if not isinstance(message, dict):
        raise InvalidRequest(f"{place} must be an object", param=place, code="invalid_type")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{place}.role must be a string", param=f"{place}.role", code="invalid_type")
    # Clients send answers back with every key that they know, and templates ask whether a key is there: null says as
    # much as no key, and so do no calls.
    read = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not read.get("tool_calls"):
        read.pop("tool_calls", None)
    if "content" in read:
        read["content"] = read_content(read["content"], f"{place}.content")
    elif read["role"] == "assistant":  # whose turn may have been silent
        read |= {} if any(key in read for key in SPOKEN) else {"content": None}
    else:
        raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content", code="missing_required_parameter")
    if "tool_calls" in read:
        read["tool_calls"] = read_tool_calls(read["tool_calls"], f"{place}.tool_calls")
    return read


IMAGE = "image"  # type of a part that stands for a picture


def read_content(content: Any, place: str) -> str | list[dict[str, str]] | None:
    """Text as it is, a list of text parts as their lines, or a list with images as templates of models that see them
    take it: parts of type text and image."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place} must be a string or a list of parts", param=place, code="invalid_type")
    parts = read_parts(content, place)
    if any(part["type"] == IMAGE for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def read_parts(content: list[Any], place: str) -> list[dict[str, str]]:
    """Parts of a message's content: `{"type": "text", "text": …}` and `{"type": "image"}`."""
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == IMAGE:
            parts.append({"type": IMAGE})
            continue
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            param = f"{place}[{index}].type"
            raise InvalidRequest(f"{param} is {kind!r:.80}; parts are of type 'text' or 'image'", param=param)
        if not isinstance(part.get(field), str):
            param = f"{place}[{index}].{field}"
            raise InvalidRequest(f"{param} must be a string", param=param, code="invalid_type")
        parts.append({"type": "text", "text": part[field]})
    return parts


def count_images(messages: list[dict[str, Any]]) -> int:
    """How many parts of messages stand for pictures."""
    contents = [message.get("content") for message in messages]
    return sum(part["type"] == IMAGE for parts in contents if isinstance(parts, list) for part in parts)


def read_tool_calls(calls: Any, place: str) -> list[Any]:
    """Calls with `function.arguments` as an object: templates print it as JSON. Text that is no object stays text."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{place} must be a list", param=place, code="invalid_type")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            param = f"{place}[{index}].function"
            raise InvalidRequest(f"{param} must be an object", param=param, code="invalid_type")
        known = {**function, "arguments": read_arguments(function.get("arguments"), place)}
        read.append({**call, "type": call.get("type") or "function", "function": known})
    return read


def read_arguments(arguments: Any, place: str) -> Any:
    """A call's arguments, which OpenAI's form has as the text of a JSON object."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if deeper(value, MAX_JSON_DEPTH):
        raise too_deep(place)
    return value if isinstance(value, dict) else arguments
