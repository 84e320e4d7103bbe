"""Sessions by header and by user, and what brings a conversation's turns to one tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.messages import Sampling, SubmitText
from services.api.session import affinity, session_of


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


def chat(*contents: str, **fields: Any) -> SubmitText:
    roles = ("system", *("user", "assistant") * len(contents))
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return SubmitText(id=fields.pop("id", 7), messages=json.dumps(turns).encode(), sampling=Sampling(), **fields)


def test_nobody_says_so() -> None:
    assert session_of(scope()) == session_of(scope(), "") == session_of(scope(), None) == ""


def test_the_header_comes_before_the_user() -> None:
    named = scope((b"x-session-id", b"a"))
    assert session_of(named) == session_of(named, "somebody") != ""
    assert session_of(scope(), "somebody") not in ("", session_of(named))
    assert session_of(scope(), "a") != session_of(named), "they are names of different things"


@pytest.mark.parametrize("value", [b"", b"two words", b"x" * 257, "ü".encode()])
def test_what_is_no_name_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        session_of(scope((b"x-session-id", value)))
    assert caught.value.code == "invalid_header"


def test_two_names_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        session_of(scope((b"x-session-id", b"a"), (b"x-session-id", b"b")))


def test_any_user_is_a_digest_of_one_length() -> None:
    assert {len(session_of(scope(), user)) for user in ("a", "é" * 10_000, "\ud800")} == {24}


def test_a_chat_that_goes_on_keeps_its_number() -> None:
    first = chat("be kind", "hello")
    later = chat("be kind", "hello", "hi", "how are you", id=8)
    assert affinity(first) == affinity(later)
    assert affinity(chat("be kind", "good morning")) != affinity(first)
    assert affinity(chat("be rude", "hello")) != affinity(first)


def test_a_session_is_a_number_whatever_it_says() -> None:
    other = SubmitText(id=3, prompt="x", sampling=Sampling(), session="s")
    assert affinity(chat("a", "b", session="s")) == affinity(other)
    assert affinity(chat("a", "b", session="t")) != affinity(chat("a", "b", session="s"))


def test_a_prompt_without_a_session_goes_by_its_id() -> None:
    assert affinity(SubmitText(id=3, prompt="x", sampling=Sampling())) == 3


def test_a_chat_without_a_user_has_a_number_too() -> None:
    messages = [{"role": "system", "content": "be kind"}]
    assert affinity(SubmitText(id=3, messages=json.dumps(messages).encode(), sampling=Sampling())) > 0
