"""Tokens by their bytes: all that begin alike, and those that masks of unique items look at one by one."""

from __future__ import annotations

from penstock.engine_core.grammar.token_index import TokenIndex
from tests.engine_core.grammar.vocabulary import tokens

TEXTS = (b"a", b"ab", b"abc", b"b", b"a", b'"', b'a"', b'a","', b"\\", b'["a","a', b"[1,2", b"12", b"1,", b"\xff",
         b"a\xffb", b"a\xff", b'["', b" ]", b"[1", b'","')  # fmt: skip
INDEX = TokenIndex((text, number) for number, text in enumerate(TEXTS))


def test_tokens_by_their_beginning() -> None:
    for begun in (b"a", b"ab", b"abc", b"abcd", b'a"', b"\xff", b"1", b"zz", b"a\xff"):
        wanted = {number for number, text in enumerate(TEXTS) if text.startswith(begun)}
        assert set(INDEX.beginning(begun).tolist()) == wanted


def test_tokens_by_what_they_hold() -> None:
    def texts(found: object) -> set[bytes]:
        return {TEXTS[each] for each in found.tolist()}  # type: ignore[attr-defined]

    assert texts(INDEX.all) == set(TEXTS)
    assert texts(INDEX.escaped) == {b"\\"}
    assert texts(INDEX.inside) == {b'["a","a'}
    assert texts(INDEX.inside_any) == {b'["a","a', b'a","', b'","'}
    assert texts(INDEX.outside) == {b'["a","a', b'a","'}
    assert texts(INDEX.outside_any) == {b'["a","a', b'a","', b'","', b'a"', b'["'}
    assert texts(INDEX.numbers) == {b"[1,2", b"1,", b"[1"}
    assert texts(INDEX.opening) == {b'["a","a', b"[1,2"}


def test_control_tokens_are_no_text() -> None:
    found = tokens().index
    assert found is tokens().index
    assert set(found.all.tolist()).isdisjoint(tokens().specials.values())
    assert tokens().single[b"x"[0]] in found.beginning(b"x").tolist()
