"""First tokens of schemas: what is compared with what, and that an answer without text is an error."""

from __future__ import annotations

import json

import pytest

from benchmarks import schema_first_token
from benchmarks.schema_first_token import body, first_token, result, schema


def test_first_requests_of_fresh_servers_are_compared_with_one_another() -> None:
    rounds = [
        {"schema": 90.0, "plain": 10.0, "second schema": 30.0, "schema after a worker was ended": 45.0},
        {"plain": 50.0, "schema": 35.0, "second schema": 25.0, "schema after a worker was ended": 41.0},
        {"schema": 80.0, "plain": 12.0, "second schema": 27.0, "schema after a worker was ended": 44.0},
    ]
    assert result(rounds)["later_than_plain_ms"] == {
        "schema": 25.0, "schema after a worker was ended": 31.0, "schema, first on a fresh server": 30.0,
        "second schema": 15.0,
    }  # fmt: skip


def test_the_first_text_ends_the_wait_and_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(content: str | None) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": {"content": content}}]}).encode() + b"\n"

    lines = [chunk(None), b"\n", chunk(""), chunk("x"), b"data: [DONE]\n"]
    monkeypatch.setattr(schema_first_token, "answer", lambda url, request: iter(lines))
    assert first_token("http://x", b"") > 0
    del lines[3]
    with pytest.raises(ValueError, match="no text came"):
        first_token("http://x", b"")


def test_schemas_differ_and_stand_in_the_request() -> None:
    assert schema("a") != schema("b")
    assert "response_format" not in json.loads(body(None))
    assert json.loads(body(schema("a")))["response_format"]["json_schema"]["schema"] == schema("a")
