"""The front door: what comes back, and what is refused whole."""

from __future__ import annotations

import pytest

from engine_core.grammar.schema import rewrite
from protocol.errors import UnsupportedSchema


def test_a_plain_schema_passes() -> None:
    assert rewrite({"type": "string"}, lenient=False).schema == {"type": "string"}


@pytest.mark.parametrize("schema", [None, 1, "x", [{}]])
def test_a_schema_is_an_object_or_a_boolean(schema: object) -> None:
    with pytest.raises(UnsupportedSchema):
        rewrite(schema, lenient=False)


def test_depth_is_bounded() -> None:
    schema: dict[str, object] = {}
    for _ in range(10_000):
        schema = {"items": schema}
    with pytest.raises(UnsupportedSchema):
        rewrite(schema, lenient=False)
