"""Markers and ends of values are found wherever the text is cut, and what is held is bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.parsers.scanning import (
    BLANKS,
    MOST_BLANKS,
    PYTHON_SIGNS,
    Reading,
    Scan,
    StreamParser,
    ValueEnd,
    partial_end,
)
from penstock.protocol.outputs import Piece


class Text(StreamParser):
    """Text up to markers, each of which is a call if `called`."""

    def __init__(self, *markers: str, called: bool = False) -> None:
        super().__init__()
        self._markers = markers
        self._called = called
        self.found: list[tuple[str, str]] = []  # blanks and marker

    def _read(self, scan: Scan) -> Reading[None]:
        while marker := (yield from scan.until(self._markers)):
            self.found.append((scan.blanks, marker))
            scan.trailing = self._called
        scan.end()


class Begun(StreamParser):
    """Blanks, then perhaps a mark."""

    def __init__(self, blanks: str = BLANKS, marks: Sequence[str] = ()) -> None:
        super().__init__()
        self._begin = blanks, marks
        self.blanks: str | None = None
        self.mark: str | None = None

    def _read(self, scan: Scan) -> Reading[None]:
        blanks, marks = self._begin
        self.blanks = yield from scan.lead(blanks)
        self.mark = yield from scan.mark(marks)
        yield from scan.all()


def texts(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("text", "held"), [("ab<", 1), ("<to", 3), ("<<t", 2), ("abc", 0), ("", 0), ("<tool", 5), ("<tol", 0)]
)
def test_what_may_become_a_marker_is_held(text: str, held: int) -> None:
    assert partial_end(text, "<tool>") == held


def test_blanks_before_a_marker_belong_to_it() -> None:
    parser = Text("<m>")
    assert [texts(parser.push(text)) for text in ("a \n", "b \n<", "m>rest", "c \n")] == ["a", " \nb", "rest", "c"]
    assert parser.found == [(" \n", "<m>")]
    assert texts(parser.flush()) == " \n"


def test_the_first_of_several_markers_ends_the_text() -> None:
    parser = Text("<m>", "<other>")
    assert [texts(parser.push(text)) for text in ("a <o", "ther>b <m>b <", "m><other>")] == ["a", "bb", ""]
    assert parser.found == [(" ", "<other>"), (" ", "<m>"), (" ", "<m>"), ("", "<other>")]


def test_many_blanks_are_text() -> None:
    parser = Text("<m>")
    assert texts(parser.push("\n" * (MOST_BLANKS + 5))) == "\n" * 5
    assert texts(parser.push("<m>")) == ""
    assert parser.found == [("\n" * MOST_BLANKS, "<m>")]


@pytest.mark.parametrize(("called", "held"), [(True, ""), (False, " \n")])
def test_blanks_at_the_end_are_content_unless_a_call_stands_before_them(called: bool, held: str) -> None:
    parser = Text("<m>", called=called)
    assert parser.push("<m>") + parser.push(" \n") == []
    assert texts(parser.flush()) == held


def test_what_may_be_a_marker_is_content_at_the_end() -> None:
    parser = Text("<m>", called=True)
    assert texts(parser.push("<m> <") + parser.flush()) == " <"


def test_text_behind_a_call_ends_the_wait_for_blanks() -> None:
    parser = Text("<m>", called=True)
    assert texts(parser.push("<m> b ") + parser.flush()) == " b "


def test_a_lead_ends_with_something_else_or_too_many_blanks() -> None:
    lead = Begun()
    assert texts(lead.push(" \n")) == ""
    assert texts(lead.push("\tx ")) == "x "
    assert lead.blanks == " \n\t"
    many = Begun()
    assert texts(many.push(" " * (MOST_BLANKS + 2))) == "  "
    other = Begun(" ;")
    assert texts(other.push("; ;x")) == "x"


@pytest.mark.parametrize(
    ("cuts", "mark", "rest"),
    [(["<", "a>x"], "<a>", "x"), (["<a", "b>"], "<ab>", ""), (["<", "b"], "", "<b"), (["<a"], "", "<a"), ([], "", "")],
)
def test_a_mark_is_waited_for(cuts: list[str], mark: str, rest: str) -> None:
    begun = Begun(marks=("<a>", "<ab>"))
    pieces = [piece for text in cuts for piece in begun.push(text)]
    assert texts(pieces + begun.flush()) == rest
    assert begun.mark == mark


def test_what_comes_behind_the_end_is_dropped() -> None:
    parser = Text("<m>")
    assert texts(parser.push("a") + parser.flush()) == "a"
    assert parser.push("b") == parser.flush() == []


@given(
    value=st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.lists(st.integers(), max_size=3), max_size=4),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_the_end_of_a_value(value: dict[str, object], cuts: list[int]) -> None:
    written = json.dumps(value, ensure_ascii=False)
    text = written + "} and more"
    end = ValueEnd()
    taken = 0
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        found = end.find(text[start:stop])
        if found >= 0:
            taken = start + found
            break
    assert taken == len(written)


def test_brackets_of_python_and_within_a_value() -> None:
    assert ValueEnd(PYTHON_SIGNS).find('(a=\')\', b="]\\")", c=[{}])x') == len('(a=\')\', b="]\\")", c=[{}])')
    assert ValueEnd(depth=1).find(', "id": "}"}x') == len(', "id": "}"}')
    assert ValueEnd().find("{") == -1
