"""Texts encoded by pieces have the ids that they have as a whole, in vocabularies of every kind."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from penstock.engine_core.tokenizer import codec, piece_cache
from penstock.engine_core.tokenizer.codec import FastCodec
from penstock.engine_core.tokenizer.piece_cache import PieceCache, cut_tokens, size
from tests.engine_core.tokenizer.vocabularies import ADDED, KINDS, SPECIAL, tokenizer

WORDS = st.one_of(
    st.sampled_from(("one", " two ", "x y", "\n", " ", "Größe", "▁", "</tool_call>", *SPECIAL, *ADDED)),
    st.text(max_size=9),
).map(lambda text: text.encode("utf-8", "ignore").decode())
CONTROLS = frozenset((*SPECIAL, "<tool_call>"))


def cached(kind: str, *extra: AddedToken, first: bool = False) -> FastCodec:
    made = tokenizer(kind)
    made.add_tokens(list(extra))
    if first:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return FastCodec(made)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of four characters are remembered."""
    monkeypatch.setattr(piece_cache, "LEAST", 4)
    monkeypatch.setattr(codec, "LEAST", 4)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(st.lists(WORDS, max_size=6).map("".join), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_ids_are_those_of_the_whole(kind: str, first: bool, texts: list[str]) -> None:
    """Texts that share pieces, one after the other; with tokens that take spaces beside them, are words or overlap."""
    odd = (
        AddedToken("<strip>", lstrip=True, rstrip=True), AddedToken("end|>x", normalized=False),
        AddedToken("word", single_word=True), AddedToken("one", single_word=True, normalized=False),
        AddedToken("END", normalized=False), AddedToken("e", normalized=True),
    )  # fmt: skip
    found, plain = cached(kind, *odd, first=first), cached(kind, *odd, first=first)
    for text in (*texts, "".join(texts), "<|im_end|>".join(texts), *texts):
        expected = plain.encode(text, False)
        assert found.encode(text, False, "") == found.encode(text, False, "") == expected
        pieces = [each for part in (text, *texts) for each in (part, "<|im_start|>")][:-1]
        expected = plain.encode_pieces(pieces, CONTROLS, False)
        assert found.encode_pieces(pieces, CONTROLS, False, "") == expected
        assert found.encode_pieces(pieces, CONTROLS, False, "") == expected
        assert found.encode_pieces(pieces, CONTROLS, True, "") == plain.encode_pieces(pieces, CONTROLS, True)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_between_control_tokens_are_text(kind: str) -> None:
    """Some of these take the space behind them: texts are cut beside others."""
    made = tokenizer(kind)
    made.add_special_tokens([AddedToken("<u>", rstrip=True, normalized=False), AddedToken("<e>", normalized=False)])
    pieces, controls = ["y " * 9, "<u>", "1", "<u>", "0", "<e>", "1", "<e>", "z " * 9], frozenset(("<u>", "<e>"))
    found = FastCodec(made)
    ids = found.encode_pieces(pieces, controls, False, "")
    assert ids == found.encode_pieces(pieces, controls, False)
    assert [ids.count(made.token_to_id(each)) for each in ("<u>", "<e>")] == [2, 2]


def test_chats_are_found_again_whichever_way_they_are_encoded() -> None:
    """With control tokens in their contents, too, which are text there."""
    found = cached("byte_level")
    pieces = ["some text", "<|im_start|>", "more <|im_start|>text", "<|im_end|>", "and more"]

    for encode in (
        lambda: found.encode("".join(pieces), False, ""),
        lambda: found.encode_pieces(pieces, CONTROLS, False, ""),
    ):
        ids = encode()
        with pytest.MonkeyPatch.context() as patch:
            for part in (found, found._plain):
                if part is not None:
                    patch.setattr(part, "_tokenizer", None)
            assert encode() == ids


def test_a_text_without_a_scope_is_not_remembered() -> None:
    found = cached("byte_level")
    found.encode("some text<|im_end|>and more", False)
    found.encode("some text<|im_end|>and more", True, "")
    assert found._pieces is None
    found.encode_pieces(["some text", "<|im_start|>", "and more"], CONTROLS, False)
    assert found._plain is not None
    assert not found._plain._pieces.bytes


class Counted:
    """Encodes a text as its letters, and says what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int] | None:
        self.asked.append(text)
        return None if "!" in text else list(map(ord, text))


def test_what_was_encoded_before_is_not_encoded_again() -> None:
    encode = Counted()
    cache = PieceCache(["<a>", "<b>"])
    text = "system<a>user<b>ok<a>again"
    assert cache.encode(text, "", encode) == list(map(ord, text))
    assert encode.asked == ["system", "<a>user", "<b>ok", "<a>again"]
    assert cache.encode(text + "<b>more", "", encode) == list(map(ord, text + "<b>more"))
    assert encode.asked[4:] == ["<b>more"]
    assert cache.encode("<a>user", "other tenant", encode) == list(map(ord, "<a>user"))
    assert encode.asked[5:] == ["<a>user"]


def test_short_pieces_are_encoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_cache, "LEAST", 8)
    encode = Counted()
    cache = PieceCache(["<a>"])
    for _ in range(2):
        assert cache.encode("x<a>y<a>longer<a>z<a>", "", encode) == list(map(ord, "x<a>y<a>longer<a>z<a>"))
    assert encode.asked == ["x<a>y", "<a>longer", "<a>z<a>", "x<a>y", "<a>z<a>"]


@pytest.mark.parametrize("text", ["<a>plain!<a>more", "!", "<a>more<a>!"])
def test_a_text_with_a_piece_without_ids_has_none(text: str) -> None:
    cache = PieceCache(["<a>"])
    assert cache.encode(text, "", Counted()) is None


def test_pieces_used_last_are_kept() -> None:
    encode = Counted()
    cache = PieceCache(["<a>"], most=3 * size(("", "<a>first"), codec_ids("<a>first")))
    for name in ("first", "other", "first", "third", "first", "extra"):
        cache.encode(f"<a>{name}", "", encode)
    assert encode.asked == [f"<a>{name}" for name in ("first", "other", "third", "extra")]
    assert cache.bytes <= cache._most
    cache.encode("<a>first", "", encode)
    assert len(encode.asked) == 4
    cache.encode("<a>other", "", encode)
    assert len(encode.asked) == 5
    for at in range(40):
        cache.encode(f"<a>{at:05}", "", encode)
    assert cache.bytes == sum(size(key, ids) for key, ids in cache._kept.items()) <= cache._most
    kept = list(cache._kept)
    assert cache.encode("<a>" + "long" * 999, "", encode) == list(map(ord, "<a>" + "long" * 999))
    assert list(cache._kept) == kept, "it alone would take more than all may"


def codec_ids(text: str) -> piece_cache.array[int]:
    return piece_cache.array("i", map(ord, text))


def test_threads_may_share_it() -> None:
    cache, found = PieceCache(["<a>"], most=2000), []
    texts = [f"<a>{number:06}" * 3 for number in range(50)]

    def run() -> None:
        for text in texts * 20:
            assert cache.encode(text, "", Counted()) == list(map(ord, text))
        found.append(True)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert cache.bytes == sum(size(key, ids) for key, ids in cache._kept.items())


def test_tokens_at_which_texts_are_cut() -> None:
    def token(text: str, **options: bool) -> AddedToken:
        return AddedToken(text, **{"normalized": False, **options})

    assert cut_tokens([token("<a>"), token("<b>"), token("a")]) == ["<a>", "<b>"]
    assert cut_tokens([token("<a>"), token("-<a>")]) == ["-<a>"]
    assert cut_tokens([token("<a>"), token("-<")]) == ["-<"]
    assert cut_tokens([token("<a>"), token("<a><b>")]) == ["<a><b>"]
    assert cut_tokens([token("-a-"), token("--")]) == []
    assert cut_tokens([token("<a>"), token("+ <a> -")]) == ["+ <a> -"]
    assert cut_tokens([token("word"), token("_x"), token("#")]) == ["#"]
    for option in ("normalized", "single_word", "lstrip", "rstrip"):
        assert cut_tokens([token("<a>", **{option: True})]) == []
    assert cut_tokens([token("")]) == []


def test_thousands_of_tokens_take_no_time() -> None:
    """As many as Gemma's: by pairs they took minutes, and texts were tried with each where they had a bracket."""
    names = [f"<unused{number}>" for number in range(6000)] + ["\n" * count for count in range(1, 32)]
    began = time.process_time()
    found = cut_tokens([AddedToken(name, normalized=False) for name in names])
    assert len(found) == 6000
    cuts, text = piece_cache.Cuts(found), "<div>x <= y</div><unused77>\n" * 4000
    places = list(cuts.find(text))
    assert time.process_time() - began < 5, "0.3 s on a machine of its own"
    assert [text[at : at + 10] for at in places[:2]] == ["<unused77>", "<unused77>"]
    assert len(places) == 4000


@given(texts=st.text("<ab>", max_size=12), tokens=st.lists(st.text("<ab>", min_size=1, max_size=5), max_size=6))
def test_tokens_are_found_as_the_library_finds_them(texts: str, tokens: list[str]) -> None:
    made = tokenizer("byte_level")
    made.add_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(tokens)])
    cuts = cut_tokens(list(made.get_added_tokens_decoder().values()))
    found = made.encode(texts, add_special_tokens=False)
    expected = [first for (first, _), token in zip(found.offsets, found.tokens, strict=True) if token in cuts]
    assert list(piece_cache.Cuts(cuts).find(texts)) == expected
