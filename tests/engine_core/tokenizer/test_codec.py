"""Tokenizer libraries: tokenizer.json directly, transformers only for folders without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.tokenizer.codec import FastCodec, SlowCodec, panics, read_codec
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.errors import ModelError
from tests.engine_core.tokenizer.vocabularies import CORPUS, stream, tokenizer, tokenizer_json


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("_json", ".json").replace("_txt", ".txt")).write_text(text)
    return folder


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    made = tokenizer("byte_level")
    made.enable_truncation(3)
    made.enable_padding(length=8)
    codec = read_codec(write(tmp_path, tokenizer_json=made.to_str()))
    assert codec.decode(codec.encode(CORPUS[0], False)) == CORPUS[0]
    assert len(codec.encode("a", False)) == 1


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": 3}', tokenizer_json("byte_level")[:-50]])
def test_a_malformed_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_codec(write(tmp_path, tokenizer_json=content))


def test_marked_tokens_are_split_off_and_special() -> None:
    codec = FastCodec(Tokenizer.from_str(tokenizer_json("plain")))
    two = codec.token_id("two")
    assert two is not None
    assert two not in codec.special
    codec.mark_special(["two", "nowhere"])
    assert two in codec.special
    assert codec.token_id("nowhere") is None
    assert codec.encode("onetwothree", False)[1] == two


def test_the_post_processor_decides_on_special_tokens() -> None:
    codec = FastCodec(tokenizer("byte_fallback"))
    assert codec.encode("a", True) == [codec.token_id("<s>"), *codec.encode("a", False)]


def test_vocab_and_merges_without_tokenizer_json(tmp_path: Path) -> None:
    model = json.loads(tokenizer_json("byte_level"))["model"]
    write(
        tmp_path,
        vocab_json=model["vocab"],
        merges_txt="#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]),
        tokenizer_config_json={"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"},
        config_json={"model_type": "gpt2"},
    )
    found = read_vocabulary(tmp_path)
    assert isinstance(found._codec, FastCodec)
    assert found.names["eos_token"] == "</s>"
    assert found.eos in found.special
    token_ids = found.encode(CORPUS[1], add_special_tokens=False)
    assert token_ids == tokenizer("byte_level").encode(CORPUS[1]).ids
    assert stream(found, token_ids, skip=True) == CORPUS[1]


def test_a_tokenizer_that_runs_in_python(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config_json={"tokenizer_class": "ByT5Tokenizer"}, config_json={"model_type": "t5"})
    found = read_vocabulary(tmp_path)
    assert isinstance(found._codec, SlowCodec)
    assert found.names["eos_token"] == "</s>"
    for text in CORPUS:
        token_ids = found.encode(text, add_special_tokens=True)
        assert token_ids[-1] == found.eos
        assert stream(found, token_ids, skip=True) == text
        assert stream(found, token_ids, skip=False) == text + "</s>"
    assert found.token(found.size + 5) == ""
    assert found._codec.token_id("nowhere at all") is None
    for framed in (False, True):
        ids = found.encode_pieces(["a</s>b", "</s>", "c"], frozenset(("</s>",)), add_special_tokens=framed)
        assert ids.count(found.eos) == 1 + framed
        assert found.decode(ids, skip_special_tokens=False) == "a</s>b</s>c" + "</s>" * framed


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "cannot make one"),
        ({"tokenizer_class": "LlamaTokenizer"}, "none of tokenizer.model"),
        ({"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}, "cannot make one"),
    ],
)
def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path, config: dict[str, Any], complaint: str) -> None:
    """Code of the model's own is never run."""
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    write(tmp_path, tokenizer_config_json=config, config_json={"model_type": "llama"})
    with pytest.raises(ModelError, match=complaint) as caught:
        read_vocabulary(tmp_path)
    assert "tokenizer.json" in str(caught.value)


def test_added_tokens_are_known_whether_special_or_not() -> None:
    found = read_codec(demo_folder())
    think = found.token_id("<think>")
    assert think in found.added
    assert think not in found.special
    assert found.special <= found.added
    assert found.token_id("the") not in found.added


def test_a_panic_of_the_library_ends_one_request() -> None:
    """A panic is no Exception: it would end the process."""

    class PanicException(BaseException):
        pass

    with pytest.raises(RuntimeError, match="the tokenizer library failed"), panics():
        raise PanicException("index out of bounds")
    for other in (KeyError, KeyboardInterrupt):
        with pytest.raises(other), panics():
            raise other


def pairing(kind: str) -> Tokenizer:
    """A tokenizer whose post-processor joins two texts: as BERT's, with types, or as RoBERTa's, without."""
    made = tokenizer("byte_level")
    made.add_special_tokens(["<s>", "</s>"])
    begin, end = made.token_to_id("<s>"), made.token_to_id("</s>")
    if kind == "typed":
        made.post_processor = processors.TemplateProcessing(
            single="<s>:0 $A:0 </s>:0",
            pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1",
            special_tokens=[("<s>", begin), ("</s>", end)],
        )
    else:
        made.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", begin), trim_offsets=False)
    return made


PAIRS = [
    ("hello world", "a"),
    ("a", "the quick brown fox, twice"),
    ("one two three four", "five six seven eight"),
    ("", "x"),
]


@pytest.mark.parametrize("kind", ["typed", "plain"])
@pytest.mark.parametrize("first", [True, False])
def test_pairs_are_joined_and_cut_as_the_library_does(kind: str, first: bool) -> None:
    made = pairing(kind)
    codec = FastCodec(Tokenizer.from_str(made.to_str()))
    for texts in PAIRS:
        for most in (*range(6, 30), 1000):
            made.enable_truncation(most, strategy="longest_first", direction="right" if first else "left")
            expected = made.encode(*texts)
            ids, second = codec.encode_pair(*texts, most, first)
            assert ids == expected.ids
            types = [int(second > 0 and at >= second) for at in range(len(ids))]
            assert types == expected.type_ids
            assert (second > 0) == (kind == "typed")


def test_a_python_tokenizer_joins_pairs(tmp_path: Path) -> None:
    """As BERT's class of transformers; the ids are those of the one without Python."""

    class Slow:
        """What SlowCodec asks of such a class."""

        all_special_ids: tuple[int, ...] = ()

        def __init__(self) -> None:
            self.added_tokens_decoder: dict[int, str] = {}
            self.special_tokens_map: dict[str, str] = {}

        def __len__(self) -> int:
            return 100

        def encode(self, text: str, **_: Any) -> list[int]:
            return [len(word) for word in text.split()]

        def num_special_tokens_to_add(self, pair: bool) -> int:
            return 3 if pair else 2

        def build_inputs_with_special_tokens(self, one: list[int], other: list[int]) -> list[int]:
            return [90, *one, 91, *other, 91]

        def create_token_type_ids_from_sequences(self, one: list[int], other: list[int]) -> list[int]:
            return [0] * (len(one) + 2) + [1] * (len(other) + 1)

    codec = SlowCodec(Slow())
    assert codec.encode_pair("a bb", "c dd eee ffff", 1000, True) == ([90, 1, 2, 91, 1, 2, 3, 4, 91], 4)
    assert codec.encode_pair("a bb", "c dd eee ffff", 8, True) == ([90, 1, 2, 91, 1, 2, 3, 91], 4)
    assert codec.encode_pair("a bb", "c dd eee ffff", 7, False) == ([90, 1, 2, 91, 3, 4, 91], 4)
