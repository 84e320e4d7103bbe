"""Text around calls: what is content, and which blanks are nobody's."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.scanning import Prose
from penstock.protocol.outputs import Piece


def texts(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_text_is_content_up_to_a_marker() -> None:
    prose, out = Prose("<m>"), list[Piece]()
    assert prose.push("a \n<", out) is None
    assert prose.push("m>rest", out) == "rest"
    assert texts(out) == "a"
    assert prose.blanks == " \n"


@pytest.mark.parametrize(("called", "held"), [(True, ""), (False, " \n")])
def test_blanks_at_the_end_are_content_unless_a_call_stands_before_them(called: bool, held: str) -> None:
    prose, out = Prose("<m>"), list[Piece]()
    assert prose.push("<m>", out) == ""
    prose.resume(called=called)
    assert prose.push(" \n", out) is None
    assert out == []
    assert texts(prose.flush()) == held


def test_what_may_be_a_marker_is_content_at_the_end() -> None:
    prose, out = Prose("<m>"), list[Piece]()
    prose.resume(called=True)
    assert prose.push(" <", out) is None
    assert texts(out + prose.flush()) == " <"


def test_text_behind_a_call_ends_the_wait_for_blanks() -> None:
    prose, out = Prose("<m>"), list[Piece]()
    prose.resume(called=True)
    assert prose.push(" b ", out) is None
    assert texts(out + prose.flush()) == " b "
