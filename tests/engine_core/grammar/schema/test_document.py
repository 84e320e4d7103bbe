"""References: pointers, anchors, identifiers as bases, drafts, and what is never fetched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.schema_instances import judge
from benchmarks.schema_judge import accepts_value
from penstock.engine_core.grammar.schema.cells import ANY, NEVER, Place
from penstock.engine_core.grammar.schema.document import Document, pointer, subschemas
from penstock.protocol.errors import UnsupportedSchema
from tests.engine_core.grammar.schema.judging import made, refusal, same

INT = {"type": "integer"}
TEXT = {"type": "string"}


def test_pointers_are_escaped() -> None:
    assert pointer("a/b", "c~d") == "/a~1b/c~0d"
    assert pointer() == ""


def test_subschemas_are_found_by_keyword_alone() -> None:
    schema: dict[str, object] = {
        "properties": {"a": INT},
        "items": [INT, TEXT],
        "not": TEXT,
        "const": {"not": {}},
        "x": {"items": {}},
    }
    assert [path for path, _ in subschemas(schema)] == ["/properties/a", "/items/0", "/items/1", "/not"]


def test_trivial_schemas_are_terms_of_their_own() -> None:
    document = Document({"type": "object"})
    assert document.term(True, "", "") == document.term({}, "", "") == ANY
    assert document.term(False, "", "") == NEVER
    assert document.term(document.nodes[0], "", "") == Place(0)


@pytest.mark.parametrize("draft", ["http://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema"])
def test_old_drafts_are_known(draft: str) -> None:
    assert Document({"$schema": draft}).old


@pytest.mark.parametrize("draft", ["https://json-schema.org/draft/2019-09/schema", None, 7])
def test_newer_drafts_are_known(draft: object) -> None:
    assert not Document({"$schema": draft}).old


LOCAL: dict[str, Any] = {
    "a pointer": {"$ref": "#/$defs/n", "$defs": {"n": INT}},
    "escapes": {"$ref": "#/$defs/a~1b~0c%25", "$defs": {"a/b~c%": INT}},
    "a pointer into a list": {"$ref": "#/$defs/n/anyOf/1", "$defs": {"n": {"anyOf": [TEXT, INT]}}},
    "a pointer into an unknown keyword": {"$ref": "#/components/schemas/n", "components": {"schemas": {"n": INT}}},
    "an anchor": {"$ref": "#n", "$defs": {"x": {"$anchor": "n", **INT}}},
    "an identifier": {"$id": "http://e.org/a/b.json", "$ref": "c.json", "$defs": {"x": {"$id": "c.json", **INT}}},
    "an identifier's anchor": {
        "$id": "http://e.org/a/b.json",
        "$ref": "c.json#n",
        "$defs": {"x": {"$id": "c.json", "$defs": {"y": {"$anchor": "n", **INT}}}},
    },
    "the whole identifier": {
        "$id": "http://e.org/a/b.json",
        "$ref": "http://e.org/a/b.json#/$defs/n",
        "$defs": {"n": INT},
    },
    "a pointer inside another resource": {
        "$id": "http://e.org/b.json",
        "$ref": "#/$defs/x",
        "$defs": {"n": TEXT, "x": {"$id": "x.json", "$ref": "#/$defs/n", "$defs": {"n": INT}}},
    },
    "a pointer inside a urn": {
        "$id": "urn:example:root",
        "$ref": "#/$defs/x",
        "$defs": {"n": TEXT, "x": {"$id": "urn:example:x", "$ref": "#/$defs/n", "$defs": {"n": INT}}},
    },
    "one dynamic anchor": {"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", **INT}}},
    "a reference to a reference": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": INT}},
    "siblings": {"$ref": "#/$defs/n", "minimum": 0, "$defs": {"n": INT}},
}


@pytest.mark.parametrize("name", list(LOCAL))
def test_local_references(name: str) -> None:
    assert same(LOCAL[name], 3, 0, -3, "x", None, 1.5)


def test_draft_7_names_an_anchor_by_id() -> None:
    draft = "http://json-schema.org/draft-07/schema#"
    assert same({"$schema": draft, "$ref": "#n", "definitions": {"x": {"$id": "#n", **INT}}}, 1, "x")


def test_draft_7_hides_siblings_of_a_reference() -> None:
    draft = "http://json-schema.org/draft-07/schema#"
    hidden = {
        "$schema": draft,
        "definitions": {"n": INT},
        "properties": {"a": {"$ref": "#/definitions/n", "minimum": 5}},
    }
    assert same(hidden, {"a": 1}, {"a": 7}, {"a": "x"})
    joined = {"definitions": {"n": INT}, "properties": {"a": {"$ref": "#/definitions/n", "minimum": 5}}}
    assert same(joined, {"a": 1}, {"a": 7}, {"a": "x"})


def test_properties_may_be_named_like_keywords() -> None:
    schema = {"type": "object", "properties": {"$ref": TEXT, "$id": INT, "$anchor": TEXT}}
    assert same(schema, {"$ref": "a"}, {"$ref": 1}, {"$id": 1}, {"$id": "x"})


RECURSIVE: dict[str, Any] = {
    "tree": {
        "type": "object",
        "properties": {"v": INT, "c": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v"],
    },
    "list": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "with siblings": {
        "$defs": {"n": {"type": "object", "properties": {"v": INT, "c": {"$ref": "#/$defs/n", "required": ["v"]}}}},
        "$ref": "#/$defs/n",
    },
    "mutual": {
        "$defs": {
            "a": {"type": "object", "properties": {"v": INT, "c": {"$ref": "#/$defs/b"}}},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}},
        },
        "$ref": "#/$defs/a",
    },
    "conjoined with itself": {
        "$defs": {"n": {"type": "object", "properties": {"v": INT, "c": {"$ref": "#/$defs/n"}}}},
        "allOf": [{"$ref": "#/$defs/n"}, {"properties": {"c": {"$ref": "#/$defs/n", "required": ["v"]}}}],
    },
}


@pytest.mark.parametrize("name", list(RECURSIVE))
def test_recursion(name: str) -> None:
    values: tuple[Any, ...] = (
        *({}, {"v": 1}, {"v": "x"}, {"v": 1, "c": []}, {"v": 1, "c": [{"v": 2, "c": [{"v": 3}]}]}),
        *(
            {"v": 1, "c": [{"v": 2, "c": [{"v": "x"}]}]},
            {"next": None},
            {"next": {"next": None}},
            {"next": {"next": 1}},
        ),
        *({"v": 1, "c": {"v": 2}}, {"v": 1, "c": {}}, {"v": 1, "c": {"v": 2, "c": {}}}, {"c": {"v": 1, "c": {"v": 2}}}),
    )
    assert same(RECURSIVE[name], *values)


MISSING: dict[str, tuple[Any, str]] = {
    "remote": ({"$ref": "https://example.org/s.json"}, "nothing is fetched"),
    "another file": ({"$ref": "other.json#/a"}, "nothing is fetched"),
    "nothing there": ({"$ref": "#/$defs/n"}, "points at nothing"),
    "out of a list": ({"$ref": "#/anyOf/7", "anyOf": [{}]}, "points at nothing"),
    "no anchor": ({"$ref": "#n"}, "0 anchors"),
    "two anchors": ({"$ref": "#n", "$defs": {"a": {"$anchor": "n"}, "b": {"$anchor": "n"}}}, "2 anchors"),
    "no string": ({"$ref": 3}, "a reference is a string"),
    "not a schema": ({"$ref": "#/$defs", "$defs": []}, "an object or a boolean"),
    "to itself": ({"$ref": "#"}, "refers to itself"),
    "dynamic": (
        {"$dynamicRef": "#n", "$defs": {"a": {"$dynamicAnchor": "n"}, "b": {"$id": "b", "$dynamicAnchor": "n"}}},
        "depends on where",
    ),
}


@pytest.mark.parametrize("name", list(MISSING))
def test_a_reference_that_cannot_be_followed_is_refused(name: str) -> None:
    schema, reason = MISSING[name]
    assert reason in refusal(schema).message


def test_a_term_that_is_no_schema_is_named() -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        Document({}).term(3, "/properties/a", "")
    assert (caught.value.keyword, caught.value.path) == ("a", "/properties/a")


@pytest.mark.parametrize("draft", [{"$schema": "http://json-schema.org/draft-04/schema#"}, {}])
def test_draft_4_calls_its_identifiers_id(draft: dict[str, str]) -> None:
    schema = {
        **draft,
        "id": "http://example.org/root.json",
        "type": "object",
        "properties": {
            "named": {"$ref": "#name"},
            "other": {"$ref": "other.json"},
            "whole": {"$ref": "http://example.org/root.json#/definitions/name"},
            "id": {"type": "boolean"},
        },
        "definitions": {"name": {"id": "#name", "type": "string"}, "other": {"id": "other.json", "type": "null"}},
    }
    out = made(schema)
    assert accepts_value(out, {"named": "x", "other": None, "whole": "y", "id": True})
    for wrong in ({"named": 1}, {"other": 1}, {"whole": 1}, {"id": "x"}):
        assert not accepts_value(out, wrong)


def test_an_id_without_a_meaning_hides_no_definition() -> None:
    inner = {"id": "/properties/a", "type": "object", "properties": {"b": {"$ref": "#/definitions/b"}}}
    schema = {"type": "object", "properties": {"a": inner}, "definitions": {"b": {"type": "boolean"}}}
    out = made(schema)
    assert accepts_value(out, {"a": {"b": True}})
    assert not accepts_value(out, {"a": {"b": 1}})


def test_id_is_a_plain_word_from_draft_6_on() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"id": "#a"}}, "$ref": "#a"}
    assert "0 anchors" in refusal(schema).message


@pytest.mark.parametrize("uri", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft-06/schema"])
def test_known_metaschemas(uri: str) -> None:
    least = {"properties": {"least": {"$ref": f"{uri.rstrip('#')}#/definitions/nonNegativeInteger"}}}
    values: list[Any] = [
        *({}, True, 3, {"type": "string"}, {"type": "text"}, {"required": ["a", "b"]}, {"required": ["a", "a"]}),
        *(
            {"minLength": -1},
            {"minLength": 1},
            {"least": 3},
            {"least": -3},
            {"items": [{"type": "null"}, {"type": "x"}]},
        ),
        *({"properties": {"a": {"items": [{"type": ["null", "null"]}]}}}, {"properties": {"a": {"items": [{}]}}}),
    ]
    for schema in ({"$ref": uri}, {"$schema": uri, "items": {"$ref": uri}}, least):
        out, validator = made(schema), judge(json.loads(json.dumps(schema).replace("https:", "http:")))
        for value in (*values, values[:1], values[4:5]):
            assert accepts_value(out, value) is validator.is_valid(value), (schema, value)


def test_other_metaschemas_are_refused_by_their_names() -> None:
    old = "http://json-schema.org/draft-04/schema#"
    error = refusal({"$ref": old})
    assert (error.keyword, error.path) == ("uniqueItems", f"{old}/properties/enum")
    assert same({"properties": {"a": {"$ref": f"{old}/definitions/positiveInteger"}}}, {"a": 1}, {"a": -1})
    new = "https://json-schema.org/draft/2020-12/schema"
    assert new in refusal({"$ref": new}).message
