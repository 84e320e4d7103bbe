"""Sessions and where they were."""

from __future__ import annotations

from penstock.engine_core.placement.placement import Sessions


def test_a_session_is_where_it_was_last() -> None:
    sessions = Sessions()
    assert sessions.find("a") is None
    sessions.put("a", 1)
    sessions.put("a", 2)
    assert (sessions.find("a"), len(sessions)) == (2, 1)


def test_no_name_is_no_session() -> None:
    sessions = Sessions()
    sessions.put("", 1)
    assert (sessions.find(""), len(sessions)) == (None, 0)


def test_the_one_that_was_quiet_for_longest_is_forgotten() -> None:
    sessions = Sessions(most=2)
    for name in ("a", "b", "a", "c"):
        sessions.put(name, 0)
    assert [sessions.find(name) for name in ("a", "b", "c")] == [0, None, 0]
