"""Errors in the words of another API."""

from __future__ import annotations

import re

import pytest

from penstock.protocol.errors import InvalidRequest
from penstock.services.openai.field_aliases import Term, told_in

TERMS = (
    Term(re.compile(r"tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    Term(re.compile(r"messages\b"), "input"),
)


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("tools[12].function.name", "tools[12].name"),
        ("messages", "input"),
        ("messages[3].content", "input[3].content"),
        ("messages_of_others", "messages_of_others"),
        ("temperature", "temperature"),
    ],
)
def test_a_field_is_renamed_in_both_places(param: str, own: str) -> None:
    error = told_in(InvalidRequest(f"{param}: it is wrong", param=param, code="x"), TERMS)
    assert (error.param, error.message, error.code) == (own, f"{own}: it is wrong", "x")


def test_an_error_without_a_field_stays_as_it_is() -> None:
    error = told_in(InvalidRequest("messages are late"), TERMS)
    assert (error.param, error.message) == (None, "messages are late")
