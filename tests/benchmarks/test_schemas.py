"""The schema table's own parts: what is judged, how instances are spelled, how figures are made."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.schema_corpus import ENTITIES, FAMILIES, FIELDS
from benchmarks.schema_instances import drawn, instances, judge, spoiled
from benchmarks.schema_judge import accepts, accepts_value, byte_tokenizer, compiled, texts
from benchmarks.schema_models import pydantic
from benchmarks.schemas import OWN, Group, Verdict, judged, lines, own_groups, percentile, run, suite_groups, summary


def verdict(**changed: Any) -> Verdict:
    fields: dict[str, Any] = {"name": "x", "refusal": "", "wrong_accepts": 0, "wrong_refusals": 0, "instances": 4}
    return Verdict(**{**fields, "rewrite_seconds": 0.001, "compile_seconds": 0.002, **changed})


def test_keys_are_written_in_the_schemas_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert texts({"a": 1, "z": 2, "b": 3}, schema) == ('{"b":3,"a":1,"z":2}',)


def test_each_alternative_may_have_its_order() -> None:
    one: dict[str, Any] = {"properties": {"a": {}, "b": {}}}
    two: dict[str, Any] = {"properties": {"b": {}, "a": {}}}
    assert set(texts({"a": 1, "b": 2}, {"anyOf": [one, two]})) == {'{"a":1,"b":2}', '{"b":2,"a":1}'}


def test_order_reaches_through_references_and_arrays() -> None:
    schema = {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"properties": {"y": {}, "x": {}}}}}
    assert texts([{"x": 1, "y": 2}], schema) == ('[{"y":2,"x":1}]',)
    assert texts([], schema) == ("[]",)


def test_integral_floats_are_spelled_as_integers() -> None:
    assert texts(1.0, {}) == ("1",)
    assert texts({"a": [2.0, 2.5]}, {}) == ('{"a":[2,2.5]}',)


def test_acceptance_is_of_whole_texts() -> None:
    made = compiled(byte_tokenizer(), {"type": "array", "items": {"type": "integer"}})
    assert made.matcher is not None
    assert accepts(made.matcher, "[1,2]")
    assert not accepts(made.matcher, "[1,2")
    assert not accepts(made.matcher, "[1,2]]")
    assert not accepts(made.matcher, '["a"]')
    assert accepts_value(made, [1])


def test_a_group_is_judged() -> None:
    group = Group("g", {"type": "integer"}, ((1, True), ("x", False), (2, False), ("y", True)))
    found = judged(group, compiled(byte_tokenizer(), group.schema))
    assert (found.wrong_accepts, found.wrong_refusals, found.instances) == (1, 1, 4)
    refused = judged(group, compiled(byte_tokenizer(), False))
    assert refused.refusal
    assert (refused.wrong_accepts, refused.wrong_refusals) == (0, 0)


def test_figures() -> None:
    verdicts = [verdict(), verdict(refusal="no"), verdict(wrong_accepts=1), verdict(wrong_refusals=2)]
    row = summary(verdicts)
    assert (row["schemas"], row["compiled"], row["right"], row["refused"]) == (4, 3, 1, 1)
    assert (row["with_wrong_accepts"], row["with_wrong_refusals"], row["instances"]) == (1, 1, 12)
    printed = "\n".join(lines("own", verdicts))
    assert "own: 4 schemas, 12 instances judged" in printed
    assert "1 wrong accepts, 0 wrong refusals: x" in printed


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.95) == 96.0
    assert percentile([3.0], 0.5) == 3.0
    assert percentile(values, 1.0) == 100.0


def test_a_missing_body_has_no_groups(tmp_path: Path) -> None:
    assert list(suite_groups(tmp_path)) == []
    assert list(own_groups(tmp_path)) == []


def test_groups_are_read(tmp_path: Path) -> None:
    suite = [{"description": "d", "schema": {}, "tests": [{"description": "t", "data": 1, "valid": True}]}]
    (tmp_path / "x.json").write_text(json.dumps(suite))
    assert list(suite_groups(tmp_path)) == [Group("x: d", {}, ((1, True),))]


def test_the_run_keeps_the_order() -> None:
    names = [v.name for v in run([Group("a", {}, ()), Group("b", False, ())])]
    assert names == ["a", "b"]


@pytest.mark.parametrize("path", sorted(OWN.glob("*.json")), ids=lambda path: path.stem)
def test_the_corpus_is_what_jsonschema_says(path: Path) -> None:
    for case in json.loads(path.read_text()):
        validator = judge(case["schema"])
        assert all(validator.is_valid(value) for value in case["valid"]), case["name"]
        assert not any(validator.is_valid(value) for value in case["invalid"]), case["name"]
        assert len(case["valid"]) + len(case["invalid"]) > 5, case["name"]


def test_the_corpus_is_large_and_whole() -> None:
    families = {path.stem for path in OWN.glob("*.json")}
    assert families == {*FAMILIES, "pydantic"}
    assert len(list(own_groups())) >= 200
    assert all(name in FIELDS for names in ENTITIES.values() for name in names)
    assert len(list(pydantic())) >= 15


def test_the_judge_departs_where_it_says() -> None:
    assert judge({"multipleOf": 0.01}).is_valid(19.99)
    assert not judge({"multipleOf": 0.01}).is_valid(19.995)
    assert judge({"type": "string", "nullable": True}).is_valid(None)
    assert not judge({"type": "string"}).is_valid(None)


FORMATS = {
    "date": ("2024-02-29", "2024-02-30"),
    "date-time": ("2024-05-01T12:00:00.5+02:00", "2024-05-01"),
    "time": ("23:59:60Z", "24:00:00Z"),
    "duration": ("P1DT2H", "P"),
    "email": ("a@b.org", "a.org"),
    "hostname": ("a-b.org", "-a.org"),
    "ipv4": ("1.2.3.4", "1.2.3.256"),
    "ipv6": ("::1", "::g"),
    "uuid": ("3f2c7f0e-6b0a-4c58-9a59-0d8d6c9d1a11", "3f2c"),
    "uri": ("urn:a:b", "no scheme"),
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_formats_are_judged(name: str) -> None:
    right, wrong = FORMATS[name]
    for draft in ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"):
        validator = judge({"$schema": draft, "type": "string", "format": name})
        assert validator.is_valid(right)
        assert not validator.is_valid(wrong)


def test_instances_are_the_same_for_the_same_seed() -> None:
    schema = {"type": "object", "properties": {"a": FIELDS["age"]}, "required": ["a"]}
    assert instances(schema, "s") == instances(schema, "s")
    valid, invalid = instances(schema, "s")
    assert valid
    assert invalid


def test_drawing_and_spoiling() -> None:
    dice = random.Random(1)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}}},
        "required": ["a"],
    }
    for _ in range(20):
        value = drawn(schema, schema, dice)
        assert set(value["a"]) <= {1, 2}
        before = json.dumps(value)
        spoiled(value, dice)
        assert json.dumps(value) == before
