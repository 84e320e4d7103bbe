"""What a field may hold is told by its type, wherever it stands."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from penstock.protocol.errors import InvalidRequest
from penstock.services.openai.embeddings import EmbeddingRequest
from penstock.services.openai.messages.request import MessageRequest
from penstock.services.openai.responses.request import ResponseRequest
from penstock.services.openai.schema import ChatRequest
from penstock.services.openai.validation import decode, enum_values

Colour = Literal["red", "blue"]


class Inner(msgspec.Struct):
    """A struct in a struct."""

    colour: Colour | None = None
    renamed: Literal["a"] = msgspec.field(default="a", name="other")


class Outer(msgspec.Struct):
    """A struct with every kind of nesting."""

    one: Inner | None = None
    many: list[Inner] | None = None
    named: dict[str, Inner] = {}
    either: Colour | Inner | int = 0


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (".one.colour", {"red", "blue"}), (".many[3].colour", {"red", "blue"}), (".many[...].colour", {"red", "blue"}),
        (".named[...].colour", {"red", "blue"}), (".either", {"red", "blue"}), (".either.colour", {"red", "blue"}),
        (".one.other", {"a"}), (".one.renamed", set()), (".one", set()), (".nobody", set()), ("", set()),
        (".one[2]", set()),
    ],
)  # fmt: skip
def test_words_of_a_place(place: str, expected: set[str]) -> None:
    assert set(enum_values(Outer, place)) == expected


@pytest.mark.parametrize(
    ("kind", "body", "param", "words"),
    [
        (ChatRequest, {"messages": [], "reasoning_effort": "max"}, "reasoning_effort", ("none", "high")),
        (EmbeddingRequest, {"input": "a", "encoding_format": "hex"}, "encoding_format", ("float", "base64")),
        (ResponseRequest, {"input": "a", "include": ["x"]}, "include[0]", ("reasoning.encrypted_content",)),
        (ResponseRequest, {"input": "a", "text": {"verbosity": "x"}}, "text.verbosity", ("low", "medium")),
        (MessageRequest, {"tool_choice": {"type": "x"}}, "tool_choice.type", ("any", "tool")),
    ],
)  # fmt: skip
def test_an_error_lists_them(kind: type, body: dict[str, object], param: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(msgspec.json.encode(body), msgspec.json.Decoder(kind))
    assert caught.value.param == param
    assert "it may be" in caught.value.message
    assert all(word in caught.value.message for word in words)
