"""Markers and ends of values are found wherever the text is cut, and what is held is bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.parsers.scanning import MOST_BLANKS, PYTHON_SIGNS, FreeText, Lead, ValueEnd, partial_end


@pytest.mark.parametrize(
    ("text", "held"), [("ab<", 1), ("<to", 3), ("<<t", 2), ("abc", 0), ("", 0), ("<tool", 5), ("<tol", 0)]
)
def test_what_may_become_a_marker_is_held(text: str, held: int) -> None:
    assert partial_end(text, "<tool>") == held


def test_blanks_before_a_marker_belong_to_it() -> None:
    free = FreeText("<m>")
    assert free.push("a \n") == ("a", None)
    assert free.push("b \n<") == (" \nb", None)
    assert free.push("m>rest") == ("", "rest")
    assert free.blanks == " \n"
    assert free.push("c \n") == ("c", None)
    assert free.release() == " \n"


def test_the_first_of_several_markers_ends_the_text() -> None:
    free = FreeText("<m>", "<other>")
    assert free.push("a <o") == ("a", None)
    assert free.push("ther>b <m>") == ("", "b <m>")
    assert free.marker == "<other>"
    assert free.push("b <") == ("b", None)
    assert free.push("m><other>") == ("", "<other>")
    assert (free.marker, free.blanks) == ("<m>", " ")


def test_many_blanks_are_text() -> None:
    free = FreeText("<m>")
    given_text, rest = free.push("\n" * (MOST_BLANKS + 5))
    assert (given_text, rest) == ("\n" * 5, None)
    assert free.push("<m>") == ("", "")
    assert len(free.blanks) == MOST_BLANKS


def test_a_lead_ends_with_something_else_or_too_many_blanks() -> None:
    lead = Lead()
    assert lead.push(" \n") == ""
    assert lead.push("\tx ") == "x "
    assert lead.held == " \n\t"
    many = Lead()
    assert many.push(" " * (MOST_BLANKS + 2)) == "  "
    assert Lead(" ;").push("; ;x") == "x"


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
