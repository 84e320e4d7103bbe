"""Turns of a conversation and the blocks of their contents. Source: Anthropic API reference, "Create a Message"."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.protocol.errors import InvalidRequest, NotBuilt
from penstock.services.openai.validation import decode

Word = Annotated[str, Meta(max_length=64)]
ROLES = ("user", "assistant", "system")
BILLING = "x-anthropic-billing-header:"  # begins a block that Anthropic's own programs put into `system`


class InputBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a content: text, thinking, tool_use, tool_result, search_result and documents of plain text are
    read."""

    type: Word
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | str | None = None
    title: str | None = None
    context: str | None = None


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the conversation."""

    role: Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(ROLES)})]
    content: str | list[InputBlock]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """`source` of a document."""

    type: Word
    media_type: Word | None = None
    data: str | None = None
    content: str | list[InputBlock] | None = None


SOURCE = msgspec.json.Decoder(Source)


def system_text(system: str | list[InputBlock]) -> str:
    """What `system` tells the model. A block for Anthropic's billing is for nobody here, and differs from request to
    request, which would keep the prefix from being reused."""
    if isinstance(system, str):
        return system
    found = [text_of(block, f"system[{number}]") for number, block in enumerate(system)]
    return "\n".join(text for text in found if not text.startswith(BILLING))


def texts(blocks: list[InputBlock], place: str) -> str:
    return "\n".join(text_of(block, f"{place}[{number}]") for number, block in enumerate(blocks))


def text_of(block: InputBlock, path: str) -> str:
    """What a block says. Raises NotBuilt for one that holds no text, InvalidRequest for one that lacks something."""
    match block.type:
        case "text":
            return text_needed(block.text, f"{path}.text")
        case "document":
            return document(block, path)
        case "search_result":
            title, source = text_needed(block.title, f"{path}.title"), text_needed(block.source, f"{path}.source")
            said = said_by(needed(block.content, f"{path}.content"), f"{path}.content")
            return element("search_result", title=title, source=source, content=said)
    raise NotBuilt(f"{path}.type: {block.type!r} is not built; this server reads text only", param=f"{path}.type")


def document(block: InputBlock, path: str) -> str:
    """A document of plain text, or of blocks of text, as the model is shown it."""
    place = f"{path}.source"
    source = decode(msgspec.json.encode(needed(block.source, place)), SOURCE, place)
    if source.type == "text":
        if source.media_type != "text/plain":
            message = f"{place}.media_type must be text/plain"
            raise InvalidRequest(message, param=f"{place}.media_type", code="invalid_value")
        said = text_needed(source.data, f"{place}.data")
    elif source.type == "content":
        said = said_by(needed(source.content, f"{place}.content"), f"{place}.content")
    else:
        message = f"{place}.type: {source.type!r} is not built; documents of type text and content are read"
        raise NotBuilt(message, param=f"{place}.type")
    return element("document", title=block.title, context=block.context, content=said)


def said_by(content: str | list[InputBlock], path: str) -> str:
    return content if isinstance(content, str) else texts(content, path)


def element(name: str, **parts: str | None) -> str:
    """Text with what is known of it, marked as Anthropic's guide to long prompts marks documents."""
    lines = [f"<{part}>\n{text}\n</{part}>" for part, text in parts.items() if text]
    return "\n".join((f"<{name}>", *lines, f"</{name}>"))


def text_needed(value: Any, param: str) -> str:
    found = needed(value, param)
    if not isinstance(found, str):
        raise InvalidRequest(f"{param} must be a text", param=param, code="invalid_type")
    return found


def needed(value: Any, param: str) -> Any:
    """A field that the block's type asks for."""
    if value is None:
        raise InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    return value
