"""What the operator asks goes to every scheduler, and comes back as one answer."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.control import Controlled
from penstock.services.tokenizer.control_calls import GONE, ControlCalls

API: Any = object()


def test_an_answer_comes_once_all_schedulers_have_given_theirs() -> None:
    calls = ControlCalls(2)
    calls.begin(API, 7)
    assert calls.answered(1, Controlled(7, requests=2, paused="keep", version="3")) is None
    assert calls.answered(1, Controlled(8)) is None, "nobody asked"
    peer, found = calls.answered(0, Controlled(7, requests=1, paused="keep", version="3"))  # type: ignore[misc]
    assert peer is API
    assert found == Controlled(7, requests=3, paused="keep", version="3")
    assert calls.answered(0, Controlled(7)) is None, "it has been answered"


def test_replicas_that_differ_say_so() -> None:
    calls = ControlCalls(3)
    calls.begin(API, 7)
    calls.answered(0, Controlled(7, paused="keep", version="1"))
    calls.answered(1, Controlled(7, "no room", version="2"))
    _, found = calls.answered(2, Controlled(7, "no disk", version="1"))  # type: ignore[misc]
    assert (found.error, found.paused, found.version) == ("replica 1: no room; replica 2: no disk", "", "1,2")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_scheduler_that_is_gone_answers_with_that(lost: int) -> None:
    calls = ControlCalls(2)
    calls.begin(API, 7)
    calls.begin(API, 8)
    calls.answered(1 - lost, Controlled(7))
    ((_, found),) = calls.lost(lost)
    assert found == Controlled(7, f"replica {lost}: {GONE}")
    _, other = calls.answered(1 - lost, Controlled(8))  # type: ignore[misc]
    assert other.error == f"replica {lost}: {GONE}"


def test_nobody_is_told_who_has_left() -> None:
    calls = ControlCalls(1)
    calls.begin(API, 7)
    calls.leave(API)
    assert calls.answered(0, Controlled(7)) is None
