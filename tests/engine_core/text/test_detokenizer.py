"""Streams of tokens become the text that the library prints for the whole, however they are cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.text.detokenizer import RUN_LIMIT, SILENT, ByteRun, detokenizer
from penstock.engine_core.tokenizer.vocabulary import Shape, Vocabulary
from tests.engine_core.tokenizer.vocabularies import CORPUS, KINDS, stream, vocabulary

TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(CORPUS), max_size=3).map(" ".join))
SHAPES = {
    "byte_level": Shape.BYTES,
    "byte_fallback": Shape.PIECES,
    "gemma": Shape.PIECES,
    "unigram": Shape.WINDOW,
    "wordpiece": Shape.WINDOW,
    "suffix": Shape.WINDOW,
    "window_fallback": Shape.WINDOW,
    "window_bytes": Shape.WINDOW,
    "plain": Shape.WINDOW,
}


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids of the vocabulary and a little beyond."""
    return st.lists(st.integers(0, vocabulary(kind).size + 3), max_size=60)


def longest_run(found: Vocabulary, token_ids: list[int], skip: bool) -> int:
    """Byte tokens in a row, in what is not skipped."""
    marks = "".join(
        " " if found.byte(token_id) is None else "b"
        for token_id in token_ids
        if not (skip and token_id in found.special)
    )
    return max(map(len, re.findall("b+", marks)), default=0)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_recognised(kind: str) -> None:
    assert vocabulary(kind).spelling.shape is SHAPES[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_librarys_text(kind: str, skip: bool, data: st.DataObject) -> None:
    found = vocabulary(kind)
    token_ids = data.draw(ids_of(kind))
    if longest_run(found, token_ids, skip) <= RUN_LIMIT:
        assert stream(found, token_ids, skip=skip) == found.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_texts_give_the_librarys_text(kind: str, text: str) -> None:
    found = vocabulary(kind)
    token_ids = found.encode(text, add_special_tokens=True)
    assert stream(found, token_ids, skip=True) == found.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma", "unigram", "window_fallback"])
@settings(max_examples=50, deadline=None)
@given(prompt=TEXTS, answer=TEXTS)
def test_an_answer_continues_its_prompt(kind: str, prompt: str, answer: str) -> None:
    """What follows a prompt is the whole text less the prompt's: a leading space is kept."""
    found = vocabulary(kind)
    before = found.encode(prompt, add_special_tokens=True)
    after = found.encode(answer, add_special_tokens=False)
    whole = found.decode(before + after, skip_special_tokens=True)
    start = found.decode(before, skip_special_tokens=True)
    assert stream(found, after, skip=True, context=before) == whole[len(start) :]


@settings(max_examples=50, deadline=None)
@given(text=TEXTS, data=st.data())
def test_a_character_split_between_prompt_and_output_is_whole(text: str, data: st.DataObject) -> None:
    found = vocabulary("byte_level")
    token_ids = found.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(token_ids)))
    before = stream(found, token_ids[:cut], skip=True, flush=False)
    assert before + stream(found, token_ids[cut:], skip=True, context=token_ids[:cut]) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_nothing_given_is_taken_back(kind: str, text: str) -> None:
    """At every moment the text so far begins the final text, and no replacement character is given early."""
    found = vocabulary(kind)
    token_ids = found.encode(text, add_special_tokens=False)
    final = found.decode(token_ids, skip_special_tokens=True)
    pushed, so_far = detokenizer(found, skip_special_tokens=True), ""
    for token_id in token_ids:
        so_far += pushed.push(token_id)
        assert final.startswith(so_far)
    assert so_far + pushed.flush() == final


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=120))
def test_long_runs_of_bytes_stream_whole_characters(data: bytes) -> None:
    run, text = ByteRun(), ""
    for byte in data:
        text += run.push(byte)
        assert len(run.bytes) <= RUN_LIMIT
    text += run.end()
    if len(data) > RUN_LIMIT:
        assert text == data.decode(errors="replace")
    else:
        try:
            assert text == data.decode()
        except UnicodeDecodeError:
            assert text == "\ufffd" * len(data)


def test_a_run_of_exactly_the_limit_is_held_and_one_of_a_byte_more_is_not() -> None:
    data = b"\xff" + "é".encode() * (RUN_LIMIT // 2)  # one byte more than the limit, the first is of no character
    run = ByteRun()
    assert [run.push(byte) for byte in data[:-1]] == [""] * RUN_LIMIT
    assert run.end() == "\ufffd" * RUN_LIMIT, "a part of it is not UTF-8"
    assert [run.push(byte) for byte in data[:-1]] == [""] * RUN_LIMIT
    assert run.push(data[-1]) == "\ufffd" + "é" * (RUN_LIMIT // 2)


def test_a_run_of_bytes_is_one_character_at_its_end() -> None:
    found = vocabulary("byte_fallback")
    bytes_of = {found.piece(token_id): token_id for token_id in range(found.size)}
    pushed = detokenizer(found, skip_special_tokens=True)
    assert [pushed.push(bytes_of[byte]) for byte in "😀".encode()] == ["", "", "", ""]
    assert pushed.held() == 1
    assert pushed.push(bytes_of["a"]) == "😀a"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_text_stay_cheap(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens decode to nothing, the library decodes a bounded number of ids per token."""
    found = vocabulary(kind)
    nothing = found.size + 1  # no such token
    decoded = []
    real = Vocabulary.decode

    def counting(self: Vocabulary, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        decoded.append(len(token_ids))
        return real(self, token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Vocabulary, "decode", counting)
    pushed = detokenizer(found, skip_special_tokens=True)
    assert not any(pushed.push(nothing) for _ in range(2000))
    assert not pushed.flush()
    assert sum(decoded) <= 2000 * 40


def test_flush_prints_an_incomplete_character() -> None:
    found = vocabulary("byte_level")
    token_ids = [found._codec.token_id(character) for character in ("ð", "Ł")]
    assert None not in token_ids
    assert stream(found, token_ids, skip=True, flush=False) == ""  # type: ignore[arg-type]
    assert stream(found, token_ids, skip=True) == "\ufffd"  # type: ignore[arg-type]


def test_silence_says_and_holds_nothing() -> None:
    assert [SILENT.push(token_id) for token_id in (1, 2, 3)] == ["", "", ""]
    assert (SILENT.flush(), SILENT.held()) == ("", 0)
