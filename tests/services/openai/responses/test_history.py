"""Reasoning that clients carry for the server, and the words of what is refused."""

from __future__ import annotations

import pytest

from penstock.services.openai.responses.items import REASONS, refusal, sealed, unsealed


@pytest.mark.parametrize("text", ["", "hm", "ü\n😀"])
def test_reasoning_is_sealed_and_read_again(text: str) -> None:
    assert unsealed(sealed(text)) == text


@pytest.mark.parametrize("content", [None, "", "gAAAA", "x", "cGVuc3RvY2s=", "é"])
def test_what_others_encrypted_is_not_read(content: str | None) -> None:
    assert unsealed(content) is None


def test_a_refusal_names_the_type_and_says_why() -> None:
    for kind, reason in {**REASONS, "strange": "no such item"}.items():
        error = refusal("input[3].type", kind)
        assert error.param == "input[3].type"
        assert repr(kind) in error.message
        assert reason in error.message
