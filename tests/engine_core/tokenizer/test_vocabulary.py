"""What token ids stand for, in every kind of vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.tokenizer.vocabulary import (
    Shape,
    Spelling,
    byte_alphabet,
    end_tokens,
    read_spelling,
    read_vocabulary,
)
from penstock.protocol.errors import ModelError
from tests.engine_core.text.families import vocabulary_of
from tests.engine_core.tokenizer.vocabularies import CORPUS, KINDS, SPECIAL, vocabulary, write_folder


def test_the_byte_alphabet_covers_every_byte_once() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["A"], alphabet["Ġ"], alphabet["Ċ"], alphabet["ÿ"]) == (0x41, 0x20, 0x0A, 0xFF)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma"])
@pytest.mark.parametrize("text", CORPUS)
def test_bytes_of_tokens_add_up_to_the_text(kind: str, text: str) -> None:
    found = vocabulary(kind)
    raw = b"".join(map(found.raw, found.encode(text, add_special_tokens=False)))
    assert raw.decode().removeprefix(" ") == text


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_bytes_of_words_within_a_text_carry_their_space(kind: str) -> None:
    found = vocabulary(kind)
    token_ids = found.encode("one two three", add_special_tokens=False)
    assert b"".join(map(found.raw, token_ids)) == b" one two three"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_known_by_name(kind: str) -> None:
    found = vocabulary(kind)
    assert {found.token(token_id) for token_id in found.special} == set(SPECIAL)
    assert found.token(found.eos or 0) == "</s>"
    assert found.raw(found.eos or 0).strip() == b"</s>"
    assert found.token(found.size + 1) == ""
    assert found.raw(found.size + 1) == b""


@pytest.mark.parametrize(
    ("decoder", "spelling"),
    [
        ({}, Spelling(Shape.WINDOW)),
        ({"type": "ByteLevel"}, Spelling(Shape.BYTES)),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, Spelling(Shape.BYTES)),
        ({"type": "Metaspace", "replacement": "▁"}, Spelling(Shape.WINDOW)),
        ({"type": "ByteFallback"}, Spelling(Shape.WINDOW, byte_fallback=True)),
    ],
)
def test_decoders_have_a_shape(decoder: dict[str, Any], spelling: Spelling) -> None:
    assert read_spelling(decoder) == spelling


def test_sentencepiece_decoders_with_more_to_them_go_through_the_window() -> None:
    replace: dict[str, Any] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    known = Spelling(Shape.PIECES, "▁", " ", 1, " ", byte_fallback=True)
    assert read_spelling({"type": "Sequence", "decoders": [*steps, strip]}) == known
    assert read_spelling({"type": "Sequence", "decoders": [*steps, strip, strip]}).shape is Shape.WINDOW
    assert read_spelling({"type": "Sequence", "decoders": [*steps, {**strip, "stop": 1}]}).shape is Shape.WINDOW
    pattern = {**replace, "pattern": {"Regex": "▁"}}
    assert read_spelling({"type": "Sequence", "decoders": [pattern, *steps[1:]]}).shape is Shape.WINDOW


def test_a_folders_names_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert read_vocabulary(folder).names == {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<unk>", "eos_token": "<|im_end|>"}))
    assert read_vocabulary(folder).names == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    config = {"added_tokens_decoder": {"5": {"content": "<tool_call>", "special": True}, "6": {"content": "x y"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_vocabulary(folder)
    assert found.names["eos_token"] == "<|im_end|>"
    special = {found.token(token_id) for token_id in found.special}
    assert special == {*SPECIAL, "<tool_call>"}


def test_extra_special_tokens_have_names_or_none(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    config: dict[str, Any] = {"extra_special_tokens": {"call_token": {"content": "<tool_call>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_vocabulary(folder).names == {"call_token": "<tool_call>"}
    config = {"additional_special_tokens": ["<tool_call>", {"content": "x y"}, "absent"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_vocabulary(folder)
    assert {found.token(token_id) for token_id in found.special} == {*SPECIAL, "<tool_call>", "x y"}


@pytest.mark.parametrize(
    "config", [{"eos_token": 3}, {"added_tokens_decoder": [1]}, {"additional_special_tokens": [3]}]
)
def test_malformed_names_name_the_file(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        read_vocabulary(folder)


def test_a_call_of_gpt_oss_ends_an_output_whatever_its_files_say(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    found = vocabulary_of("harmony")
    names = {found.token(token_id) for token_id in end_tokens(folder, found)} - {""}
    assert {"<|return|>", "<|call|>"} <= names
    plain = read_vocabulary(folder)
    assert {plain.token(token_id) for token_id in end_tokens(folder, plain)} == {"</s>", "<|im_end|>"}
