"""RFC 3986: the examples of its section 5.4, and what JSON Schema asks beside them."""

from __future__ import annotations

from urllib.parse import unquote, urljoin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.grammar.schema.document import defragmented, joined, unescaped

BASE = "http://a/b/c/d;p?q"
NORMAL = {
    "g:h": "g:h",
    "g": "http://a/b/c/g",
    "./g": "http://a/b/c/g",
    "g/": "http://a/b/c/g/",
    "/g": "http://a/g",
    "//g": "http://g",
    "?y": "http://a/b/c/d;p?y",
    "g?y": "http://a/b/c/g?y",
    "#s": "http://a/b/c/d;p?q#s",
    "g#s": "http://a/b/c/g#s",
    "g?y#s": "http://a/b/c/g?y#s",
    ";x": "http://a/b/c/;x",
    "": "http://a/b/c/d;p?q",
    ".": "http://a/b/c/",
    "./": "http://a/b/c/",
    "..": "http://a/b/",
    "../": "http://a/b/",
    "../g": "http://a/b/g",
    "../..": "http://a/",
    "../../g": "http://a/g",
    "../../../g": "http://a/g",
    "/./g": "http://a/g",
    "/../g": "http://a/g",
    "./g/.": "http://a/b/c/g/",
    "g/./h": "http://a/b/c/g/h",
    "g/../h": "http://a/b/c/h",
}


@pytest.mark.parametrize("reference", list(NORMAL))
def test_the_examples_of_the_rfc(reference: str) -> None:
    assert joined(BASE, reference) == NORMAL[reference]


@pytest.mark.parametrize(
    ("base", "reference"),
    [("", "a.json"), ("", "#/x"), ("http://e.org", "x"), ("http://e.org/a/", "b/c"), ("a/b.json", "c.json")],
)
def test_plain_cases_are_the_librarys(base: str, reference: str) -> None:
    assert joined(base, reference) == urljoin(base, reference)


def test_names_stay_names() -> None:
    assert joined("urn:a:b", "#x") == "urn:a:b#x"
    assert joined("urn:a:b", "urn:c") == "urn:c"


def test_fragments() -> None:
    assert defragmented("http://a/b#c") == ("http://a/b", "c")
    assert defragmented("a") == ("a", "")


@given(st.text())
def test_escapes(text: str) -> None:
    assert unescaped(text) == unquote(text)


@given(st.text(), st.text())
def test_any_text_is_resolved(base: str, reference: str) -> None:
    assert isinstance(joined(base, reference), str)
