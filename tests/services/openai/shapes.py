"""Holds what the api sends against the openai client's own types: no field wrong, none unknown, none missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai.types as completions
import openai.types.chat as chat
import pydantic

# Fields of ours that OpenAI's shapes do not have, see services/openai/answers.py and services/openai/models.py.
EXTENSIONS = frozenset(
    ("reasoning_content", "reasoning", "stop_reason", "prompt_logprobs", "max_model_len", "input_modalities", "tasks")
)
# OpenAI sends null for the prompt's first token, which its client's types do not know.
FIRST_TOKEN = ("token_logprobs", "top_logprobs")
DESCRIPTION = Path(__file__).resolve().parents[4] / "shared" / "openai" / "openapi.json"


def check(kind: type[pydantic.BaseModel], value: dict[str, Any]) -> None:
    """Fail unless `value` is an object of the client's type `kind`, strictly, with no field beside its own."""
    found = kind.model_validate(strip_first_token(value), strict=True)
    assert list(strangers(found)) == []


def strip_first_token(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: part[1:] if key in FIRST_TOKEN and isinstance(part, list) and part[:1] == [None] else
            strip_first_token(part)
            for key, part in value.items()
        }  # fmt: skip
    return [strip_first_token(part) for part in value] if isinstance(value, list) else value


def strangers(value: Any) -> Iterator[str]:
    """Fields that the client's types do not name, wherever they stand."""
    if isinstance(value, pydantic.BaseModel):
        yield from (name for name in value.model_extra or () if name not in EXTENSIONS)
        for name in type(value).model_fields:
            yield from strangers(getattr(value, name))
    elif isinstance(value, list):
        for part in value:
            yield from strangers(part)


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, whose framing is checked on the way; the end mark is left out."""
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def check_chat_chunks(chunks: list[dict[str, Any]], *, usage: bool = False) -> None:
    for chunk in chunks:
        check(chat.ChatCompletionChunk, chunk)
    check_stream(chunks, usage=usage)
    opened: set[int] = set()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        first = choice["index"] not in opened
        opened.add(choice["index"])
        assert (choice["delta"].get("role") == "assistant") == first
        assert choice["finish_reason"] is None or not any(choice["delta"].values())


def check_completion_chunks(chunks: list[dict[str, Any]], *, usage: bool = False) -> None:
    """OpenAI's type of a completion chunk is that of the whole, but a chunk's finish_reason may be null."""
    for chunk in chunks:
        whole = {**chunk, "choices": [{**choice, "finish_reason": choice["finish_reason"] or "stop"}
                                      for choice in chunk["choices"]]}  # fmt: skip
        check(completions.Completion, whole)
    check_stream(chunks, usage=usage)


def check_stream(chunks: list[dict[str, Any]], *, usage: bool) -> None:
    """One identity, one finish per choice and nothing after it, usage in its place."""
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    finished: set[int] = set()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert choice["index"] not in finished
        if choice["finish_reason"] is not None:
            finished.add(choice["index"])
    body = chunks[:-1] if usage else chunks
    assert all(len(chunk["choices"]) == 1 for chunk in body)
    assert all(("usage" in chunk) == usage for chunk in chunks)
    if usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in body)


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The whole text of each choice."""
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


def check_error(body: dict[str, Any], kind: str, param: str | None) -> None:
    """OpenAI's error object: exactly its four fields."""
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == kind
    assert error["param"] == param
    assert isinstance(error["code"], str)
