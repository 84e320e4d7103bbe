"""Every form in which a client may ask for structured output, and every way to get it wrong."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.protocol.errors import InvalidRequest, Unsupported
from penstock.protocol.messages import Finish, Grammar, SubmitText
from penstock.services.openai.schema import ChatRequest, CompletionRequest
from penstock.services.openai.structured_output import FORMS, grammar_of
from penstock.services.openai.validation import decode
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, client
from tests.services.openai.shapes import events

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}


def read(**fields: Any) -> Grammar | None:
    """The grammar of a request, the same for both endpoints."""
    body = {"messages": [], "prompt": "x", **fields}
    found = grammar_of(decode(json.dumps(body).encode(), CHAT))
    assert grammar_of(decode(json.dumps(body).encode(), COMPLETION)) == found
    return found


def error(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
         "json_schema", "response_format.json_schema.schema"),
        ({"response_format": TAG}, "structural_tag", "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag",
         "structured_outputs.structural_tag"),
        ({"guided_json": SCHEMA}, "json_schema", "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", "guided_json"),
        ({"guided_json_object": True}, "json_object", "guided_json_object"), ({"json_schema": SCHEMA}, "json_schema",
         "json_schema"), ({"structural_tag": TAG}, "structural_tag", "structural_tag"),
    ],
)  # fmt: skip
def test_forms_of_json(fields: dict[str, Any], kind: str, param: str) -> None:
    found = read(**fields)
    assert found is not None
    assert (found.kind, found.param, found.whitespace, found.lenient) == (kind, param, "bounded", False)
    expected = {"json_object": None, "json_schema": SCHEMA, "structural_tag": TAG}[kind]
    assert (json.loads(found.source) if found.source else None) == expected


@pytest.mark.parametrize("name", ["guided_regex", "regex"])
def test_forms_of_patterns(name: str) -> None:
    assert read(**{name: 'a"\\d'}) == Grammar(kind="regex", source='a"\\d', param=name)
    assert read(structured_outputs={"regex": "a+"}) == Grammar(
        kind="regex", source="a+", param="structured_outputs.regex"
    )


@pytest.mark.parametrize("name", ["guided_grammar", "ebnf", "grammar"])
def test_forms_of_grammars(name: str) -> None:
    assert read(**{name: 'root ::= "a"'}) == Grammar(kind="grammar", source='root ::= "a"', param=name)


def test_forms_of_choices() -> None:
    for found in (read(guided_choice=["é", 'b"']), read(structured_outputs={"choice": ["é", 'b"']})):
        assert found is not None
        assert found.kind == "choice"
        assert json.loads(found.source) == ["é", 'b"']


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None, "regex": None},
     {"guided_json_object": False}, {"lenient": False}],
)  # fmt: skip
def test_free_output(fields: dict[str, Any]) -> None:
    assert read(**fields) is None


def test_text_as_a_format_goes_with_any_other_form() -> None:
    found = read(response_format={"type": "text"}, regex="a")
    assert found is not None
    assert found.kind == "regex"


def test_options() -> None:
    for fields, whitespace in (
        ({"whitespace": "none"}, "none"), ({"guided_whitespace_pattern": "[ ]?"}, "[ ]?"), ({}, "bounded")
    ):  # fmt: skip
        found = read(guided_json=SCHEMA, **fields)
        assert found is not None
        assert found.whitespace == whitespace
    outputs = read(structured_outputs={"json": SCHEMA, "whitespace_pattern": "\\s?", "disable_fallback": True})
    compact = read(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert outputs is not None
    assert compact is not None
    assert (outputs.whitespace, compact.whitespace) == ("\\s?", "none")
    lenient = read(guided_json=SCHEMA, lenient=True)
    assert lenient is not None
    assert lenient.lenient


@pytest.mark.parametrize(("strict", "lenient"), [(True, False), (None, False), (False, True)])
def test_only_what_is_explicitly_not_strict_is_lenient(strict: bool | None, lenient: bool) -> None:
    found = read(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": strict}})
    assert found is not None
    assert found.lenient == lenient


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_json": {}}, "regex"),
        ({"response_format": {"type": "json_object"}, "ebnf": "x"}, "ebnf"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"response_format": {}}, "response_format.type"), ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}}},
         "response_format.json_schema.name"),
        ({"regex": ""}, "regex"), ({"regex": 3}, "regex"), ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"), ({"guided_choice": "a"}, "guided_choice"),
        ({"ebnf": ["x"]}, "ebnf"), ({"guided_json_object": "yes"}, "guided_json_object"),
        ({"whitespace": "none"}, "whitespace"), ({"lenient": True}, "lenient"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"regex": "a", "whitespace": "none", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"regex": "a", "whitespace": "x" * 300}, "whitespace"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    assert error(**fields).param == param


def test_what_is_not_built_is_refused() -> None:
    refused = error(structured_outputs={"json": {}, "disable_additional_properties": True})
    assert isinstance(refused, Unsupported)
    assert refused.param == "structured_outputs.disable_additional_properties"


def test_every_form_is_a_field_of_both_requests() -> None:
    for name in FORMS:
        assert name in ChatRequest.__struct_fields__
        assert name in CompletionRequest.__struct_fields__


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ],
)
async def test_the_grammar_travels_and_what_it_does_not_hold_is_told(path: str, body: dict[str, Any]) -> None:
    told = {"prompt_tokens": 3, "approximations": ("minimum at /a",)}
    rows = [[Row(text="{", extra=told)], [Row(text="}", finish=Finish.STOP)]]
    port = FakeLink(answering(lambda request: rows))
    async with client(app_state(port)) as http:
        whole = await http.post(path, json=body | {"guided_json": SCHEMA, "lenient": True})
        stream = await http.post(path, json=body | {"guided_json": SCHEMA, "lenient": True, "stream": True})
        exact = await http.post(path, json=body)
    assert whole.json()["penstock"] == {"approximations": ["minimum at /a"]}
    remarks = [chunk["penstock"] for chunk in events(stream.text) if "penstock" in chunk]
    assert remarks
    assert all(remark == {"approximations": ["minimum at /a"]} for remark in remarks)
    assert exact.status_code == 200
    grammars = [request.grammar for request in port.of(SubmitText)]
    assert grammars[0] is not None
    assert (grammars[0].kind, grammars[0].lenient) == ("json_schema", True)
    assert grammars[-1] is None
